"""The commands of `subfleet`; each loads what it needs when it runs."""

import json as json_module
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subfleet.cli.brokers import Broker, Ca, Cert, Key, PasswordFile, broker_address, check_broker
from subfleet.cli.data import data
from subfleet.cli.failures import reporting
from subfleet.protocol.errors import ConfigError, ExportError, RunError

if TYPE_CHECKING:
    from subfleet.export.cache import CacheFolder

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(data, name="data")


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
Config = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Description of the run: a TOML file, or `fleet`, our example.")
]


def default_cache() -> "CacheFolder":
    """Where exported programs are kept between runs: $SUBFLEET_CACHE, or the user's cache folder.

    $SUBFLEET_CACHE_BYTES limits its size.

    Raises:
        ConfigError: the limit is no whole number of 1 or more.
    """
    from subfleet.export.cache import DEFAULT_LIMIT_BYTES, CacheFolder

    chosen = os.environ.get("SUBFLEET_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    limit = os.environ.get("SUBFLEET_CACHE_BYTES") or str(DEFAULT_LIMIT_BYTES)
    if not limit.isascii() or not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"SUBFLEET_CACHE_BYTES is {limit!r}, but must be a whole number of bytes, 1 or more")
    return CacheFolder(path=Path(chosen) if chosen else Path(base) / "subfleet" / "programs", limit_bytes=int(limit))


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


@app.command(epilog="Example: subfleet run quickstart --name first --runs ./runs")
def run(
    experiment: Annotated[str, typer.Argument(help="Name of the experiment; `quickstart` is a good first one.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the run; an interrupted run of that name is taken up.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")] = Path("runs"),
    broker: Broker = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    password_file: PasswordFile = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the experiment's own number.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the experiment's own.")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run an experiment on this machine: a broker, a server and one process per emulated device."""
    with reporting(verbose=verbose):
        # First of all, before anything is loaded, cut or started.
        address = broker_address(broker, ca=ca, cert=cert, key=key, password_file=password_file)
        from subfleet.cli.experiment import next_steps, run_folder, with_overrides
        from subfleet.export.pool import ExportPool

        chosen = with_overrides(experiment, rounds=rounds, seed=seed)
        check_broker(address)
        folder = run_folder(runs, chosen.name, name)
        with ExportPool(default_cache()) as exports:  # it loads PyTorch while this process does
            from subfleet.cli.console import display_for
            from subfleet.emulation.run import run_experiment

            display = display_for(json=json)
            with stopped_by_signals() as stop:
                outcome = run_experiment(chosen, folder, observer=display, stop=stop, exports=exports, broker=address)
        if json:
            typer.echo((outcome.folder / "summary.json").read_text(encoding="utf-8"))
        for line in next_steps(outcome):
            display.say(line)


@app.command(epilog="Example: subfleet serve --config fleet --broker mqtt://localhost:1883")
def serve(
    config: Config,
    broker: Broker = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    password_file: PasswordFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a broker that is not there yet.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address of the HTTP API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP API.")] = 8000,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve a fleet of real devices: the coordinator, its HTTP API, and an embedded broker unless --broker is given."""
    with reporting(verbose=verbose):
        # First of all, before anything is loaded, cut or started.
        address = broker_address(broker, ca=ca, cert=cert, key=key, password_file=password_file)
        from subfleet.cli.console import display_for
        from subfleet.cli.serving import ServeOptions, serve_fleet
        from subfleet.settings.config import HttpAddress

        options = ServeOptions(
            config=config,
            broker=address,
            runs=runs,
            http=HttpAddress(host=host, port=port),
            cache=default_cache(),
            wait=wait,
        )
        with stopped_by_signals() as stop:
            folder = serve_fleet(options, display=display_for(json=json), stop=stop)
        if json and folder is not None:
            typer.echo((folder / "summary.json").read_text(encoding="utf-8"))


@app.command(epilog="Example: subfleet preflight --config fleet --json")
def preflight(
    config: Config,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export every subnet of a run for every runtime now: what each takes, or the layer that keeps it from training."""
    with reporting(verbose=verbose):
        from rich.console import Console

        from subfleet.cli.console import progress
        from subfleet.cli.preflight import preflight as verdicts_of
        from subfleet.cli.preflight import table
        from subfleet.protocol.schema import to_plain
        from subfleet.settings.reading import load_config

        console = Console(stderr=json)
        verdicts = []
        with progress("Exporting") as tell:
            for verdict in verdicts_of(load_config(config), default_cache()):
                verdicts.append(verdict)
                tell(f"{len(verdicts)} done, last {verdict.subnet} for {verdict.target}")
        if json:
            typer.echo(json_module.dumps([to_plain(verdict) for verdict in verdicts]))
        else:
            table(verdicts, console)
        failed = [verdict for verdict in verdicts if verdict.problem]
        if failed:
            raise ExportError(
                f"{len(failed)} of {len(verdicts)} programs cannot be written, first {failed[0].subnet} for "
                f"{failed[0].target}: {failed[0].problem}"
            )


@app.command(epilog="Example: subfleet example > fleet.toml")
def example(verbose: Verbose = False) -> None:
    """Print the configuration that `--config fleet` names, to start one of your own from."""
    with reporting(verbose=verbose):
        from subfleet.settings.shipped import shipped_text

        typer.echo(shipped_text("fleet"), nl=False)


@app.command(epilog="Example: subfleet methods --check --json")
def methods(
    check: Annotated[
        bool, typer.Option("--check", help="Run three rounds of each with every policy of norms; takes some minutes.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the federated methods: paper, what varies between clients, runtimes, status."""
    with reporting(verbose=verbose):
        from rich.console import Console

        from subfleet.cli.methods import listing, show

        console = Console(stderr=json)
        verdicts = _checked_methods() if check else None
        if json:
            typer.echo(json_module.dumps(listing() if verdicts is None else verdicts))
        else:
            show(console, verdicts)
        found = [(name, norms, said) for name, row in (verdicts or {}).items() for norms, said in row.items()]
        failed = [(name, norms, said) for name, norms, said in found if said != "ok"]
        for name, norms, said in failed:
            raise RunError(
                f"{len(failed)} of {len(found)} checks of methods fail, first {name} with norms {norms!r}: {said}"
            )


def _checked_methods() -> dict[str, dict[str, str]]:
    from subfleet.cli.console import progress
    from subfleet.emulation.method_checks import check_methods
    from subfleet.emulation.virtual.exports import SettledExports

    verdicts: dict[str, dict[str, str]] = {}
    with progress("Checking") as tell, SettledExports(default_cache()) as exports:
        for name, norms, said in check_methods(exports):
            verdicts.setdefault(name, {})[norms] = said
            tell(f"{sum(map(len, verdicts.values()))} done, last {name} with norms {norms!r}: {said}")
    return verdicts


@app.command(epilog="Example: subfleet experiments --json")
def experiments(json: Json = False, verbose: Verbose = False) -> None:
    """List the experiments that `subfleet run` knows."""
    with reporting(verbose=verbose):
        from subfleet.emulation.experiments import EXPERIMENTS

        names = {name: (make.__doc__ or "").strip() for name, make in EXPERIMENTS.items()}
        typer.echo(json_module.dumps(names) if json else "\n".join(f"{name}: {text}" for name, text in names.items()))
