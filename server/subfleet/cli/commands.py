"""The commands of `subfleet`; each loads what it needs when it runs."""

import json as json_module
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from subfleet.cli.brokers import Broker, Ca, Cert, Key, PasswordFile, broker_address, check_broker
from subfleet.cli.comparing import compare
from subfleet.cli.data import data
from subfleet.cli.failures import reporting
from subfleet.cli.keeping import runs as kept_runs
from subfleet.protocol.errors import ConfigError, ExportError, RunError
from subfleet.settings.fleet import HostKind

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(data, name="data")
app.add_typer(kept_runs, name="runs")
app.command(epilog="Example: subfleet compare runs/heterofl-s* runs/fjord-s* --out comparison")(compare)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"subfleet {version('subfleet')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the release and end.")
    ] = False,
) -> None:
    """Trains one elastic model across a fleet of unequal devices."""


Verbose = Annotated[bool, typer.Option("--verbose", help="Log what happens inside to standard error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")]
Description = Annotated[
    str, typer.Argument(metavar="FILE|NAME", help="Description of the run: a TOML file, or a run that we ship.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, such as rounds=3 or method.type=fedavg."),
]


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C interrupts at once."""
    stop = threading.Event()

    def ask(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.command(epilog="Example: subfleet run quickstart --set rounds=3 --seeds 1..3")
def run(
    description: Description,
    host: Annotated[
        HostKind | None, typer.Option(help="Where emulated devices are: a process each, or all in this one.")
    ] = None,
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Run once with each seed, such as 1..5 or 1,2,7.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder; an interrupted run of that name is taken up.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")] = Path("runs"),
    broker: Broker = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    password_file: PasswordFile = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run an emulated fleet on this machine: a server and every device that the description names."""
    with reporting(verbose=verbose):
        # First of all, before anything is loaded, cut or started.
        address = broker_address(broker, ca=ca, cert=cert, key=key, password_file=password_file)
        from subfleet.cli.running import RunOptions, next_steps, on_host, run_all
        from subfleet.programs.place import open_default_cache
        from subfleet.settings.reading import read_runs
        from subfleet.settings.sweeping import seeds_of

        chosen = on_host(read_runs(description, overrides or (), seeds_of(seeds) if seeds else ()), host)
        check_broker(address)
        from subfleet.cli.console import display_for

        display = display_for(json=json)
        options = RunOptions(
            runs=runs, name=name, broker=address, cache=open_default_cache(), stopping=stopped_by_signals
        )
        for outcome in run_all(chosen, options, display):
            if json:
                typer.echo((outcome.folder / "summary.json").read_text(encoding="utf-8"))
            for line in next_steps(outcome):
                display.say(line)


@app.command(epilog="Example: subfleet serve fleet --broker mqtt://localhost:1883")
def serve(
    description: Description,
    overrides: Overrides = None,
    broker: Broker = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    password_file: PasswordFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a broker that is not there yet.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder; an interrupted run of that name is taken up.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")] = Path("runs"),
    http_host: Annotated[str, typer.Option(help="Address of the HTTP API.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP API; 0 takes a free one.")] = 8000,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve a fleet of real devices: the coordinator, its HTTP API, and an embedded broker unless --broker is given."""
    with reporting(verbose=verbose):
        # First of all, before anything is loaded, cut or started.
        address = broker_address(broker, ca=ca, cert=cert, key=key, password_file=password_file)
        from subfleet.cli.console import display_for
        from subfleet.cli.serving import ServeOptions, serve_fleet
        from subfleet.programs.place import open_default_cache
        from subfleet.reporting.address import HttpAddress
        from subfleet.settings.reading import read_run

        options = ServeOptions(
            run=read_run(description, overrides or ()),
            broker=address,
            runs=runs,
            http=HttpAddress(host=http_host, port=http_port),
            cache=open_default_cache(),
            wait=wait,
            name=name,
        )
        with stopped_by_signals() as stop:
            folder = serve_fleet(options, display=display_for(json=json), stop=stop)
        if json and folder is not None:
            typer.echo((folder / "summary.json").read_text(encoding="utf-8"))


@app.command(epilog="Example: subfleet preflight fleet --json")
def preflight(
    description: Description,
    overrides: Overrides = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export every submodel of a run for every runtime: what each takes, or the layer that cannot be trained."""
    with reporting(verbose=verbose):
        from rich.console import Console

        from subfleet.cli.console import progress
        from subfleet.cli.preflight import preflight as verdicts_of
        from subfleet.cli.preflight import table
        from subfleet.programs.place import open_default_cache
        from subfleet.protocol.schema import to_plain
        from subfleet.settings.reading import read_run
        from subfleet.settings.taking import with_model

        console = Console(stderr=json)
        verdicts = []
        with progress("Exporting") as tell:
            described = with_model(read_run(description, overrides or ()), Path("runs"))
            for verdict in verdicts_of(described, open_default_cache()):
                verdicts.append(verdict)
                tell(f"{len(verdicts)} done, last {verdict.submodel} for {verdict.target}")
        if json:
            typer.echo(json_module.dumps([to_plain(verdict) for verdict in verdicts]))
        else:
            table(verdicts, console)
        failed = [verdict for verdict in verdicts if verdict.problem]
        if failed:
            raise ExportError(
                f"{len(failed)} of {len(verdicts)} programs cannot be written, first {failed[0].submodel} for "
                f"{failed[0].target}: {failed[0].problem}"
            )


@app.command(epilog="Example: subfleet example fleet > mine.toml")
def example(
    name: Annotated[str, typer.Argument(help="Name of a run that we ship; `subfleet examples` lists them.")] = "fleet",
    verbose: Verbose = False,
) -> None:
    """Print a run that we ship, to start one of your own from."""
    with reporting(verbose=verbose):
        from subfleet.protocol.suggestion import did_you_mean
        from subfleet.settings.shipped import shipped_names, shipped_text

        known = shipped_names()
        if name not in known:
            raise ConfigError(f"there is no run {name!r:.80}; choose one of {sorted(known)}{did_you_mean(name, known)}")
        typer.echo(shipped_text(name), nl=False)


@app.command(epilog="Example: subfleet methods fedtrans")
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, to see its parameters beside what its paper has.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run three rounds of each with every policy of norms; takes some minutes.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the federated methods: paper, what varies between clients, runtimes, status."""
    with reporting(verbose=verbose):
        from rich.console import Console

        from subfleet.cli.methods import listing, row_of, show, show_parameters

        console = Console(stderr=json)
        if name is not None and check:
            raise ConfigError(f"--check runs every method, but one was named, {name!r:.80}; leave one of them out")
        if name is not None:
            if json:
                typer.echo(json_module.dumps(row_of(name)))
            else:
                show_parameters(console, name)
            return
        verdicts = _checked_methods() if check else None
        if json:
            typer.echo(json_module.dumps(listing() if verdicts is None else verdicts))
        else:
            show(console, verdicts)
        found = [(one, norms, said) for one, row in (verdicts or {}).items() for norms, said in row.items()]
        failed = [(one, norms, said) for one, norms, said in found if said != "ok"]
        for first, norms, said in failed:
            raise RunError(
                f"{len(failed)} of {len(found)} checks of methods fail, first {first} with norms {norms!r}: {said}"
            )


def _checked_methods() -> dict[str, dict[str, str]]:
    from subfleet.cli.console import progress
    from subfleet.emulation.batch.exports import LazyExports
    from subfleet.emulation.method_checks import check_methods
    from subfleet.programs.place import open_default_cache

    verdicts: dict[str, dict[str, str]] = {}
    with progress("Checking") as tell, LazyExports(open_default_cache()) as exports:
        for name, norms, said in check_methods(exports):
            verdicts.setdefault(name, {})[norms] = said
            tell(f"{sum(map(len, verdicts.values()))} done, last {name} with norms {norms!r}: {said}")
    return verdicts


@app.command(epilog="Example: subfleet examples --json")
def examples(json: Json = False, verbose: Verbose = False) -> None:
    """List the runs that we ship, which `subfleet run` and `subfleet serve` know by name."""
    with reporting(verbose=verbose):
        from subfleet.settings.shipped import shipped_names, shipped_text

        told = {name: shipped_text(name).partition("\n")[0].removeprefix("# ") for name in shipped_names()}
        typer.echo(json_module.dumps(told) if json else "\n".join(f"{name}: {text}" for name, text in told.items()))
