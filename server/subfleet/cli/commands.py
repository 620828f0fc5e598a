"""The commands of `subfleet`. Each imports what it needs when it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subfleet.cli import options
from subfleet.cli.data import data
from subfleet.cli.decorators import Answers, Json, command, query
from subfleet.cli.runs import runs as runs_app
from subfleet.protocol.errors import ConfigError, ExportError, RunError, explain_os_errors
from subfleet.reporting.spending import Axis
from subfleet.settings.fleet import HostKind

if TYPE_CHECKING:
    from subfleet.reporting.comparison import Entrant

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(shows_version: bool) -> None:
    if shows_version:
        from importlib.metadata import version

        typer.echo(f"subfleet {version('subfleet')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one elastic model across a fleet of unequal devices."""


@command(app, "run quickstart --set rounds=3 --seeds 1..3")
def run(
    description: options.Description,
    host: Annotated[
        HostKind | None,
        typer.Option(
            help="Run each device as a process (processes), all devices in this process (batch), or account decisions, "
            "bytes and seconds alone (accounting)."
        ),
    ] = None,
    workers: options.Workers = None,
    ray: options.Ray = None,
    overrides: options.Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Run once with each seed, such as 1..5 or 1,2,7.")] = None,
    name: options.RunName = None,
    runs: options.Runs = options.RUNS,
    broker: options.Broker = None,
    ca: options.Ca = None,
    cert: options.Cert = None,
    key: options.Key = None,
    password_file: options.PasswordFile = None,
    json: Json = False,
) -> None:
    """Run an emulated fleet on this machine: the server and all devices of the description."""
    address = options.read_broker_address(broker, ca=ca, cert=cert, key=key, password_file=password_file)
    from subfleet.cli.running import run_and_show, set_host
    from subfleet.settings.reading import read_runs
    from subfleet.settings.sweeps import parse_seeds

    described = set_host(
        read_runs(description, overrides or (), parse_seeds(seeds) if seeds else ()), host, workers=workers, ray=ray
    )
    options.check_broker(address)
    run_and_show(described, runs, json=json, name=name, broker=address)


@command(app, "serve fleet --broker mqtt://localhost:1883")
def serve(
    description: options.Description,
    overrides: options.Overrides = None,
    broker: options.Broker = None,
    ca: options.Ca = None,
    cert: options.Cert = None,
    key: options.Key = None,
    password_file: options.PasswordFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the broker if it cannot be reached yet.")] = False,
    name: options.RunName = None,
    runs: options.Runs = options.RUNS,
    http_host: Annotated[str, typer.Option(help="Address on which the HTTP API listens.")] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the HTTP API; 0 selects a free port.")
    ] = 8000,
    json: Json = False,
) -> None:
    """Serve a fleet of real devices: the server, its HTTP API, and an embedded broker unless --broker is given."""
    address = options.read_broker_address(broker, ca=ca, cert=cert, key=key, password_file=password_file)
    from subfleet.cli.console import open_display
    from subfleet.cli.running import stop_on_signals
    from subfleet.cli.serving import serve_fleet
    from subfleet.export.cache import open_default_cache
    from subfleet.reporting.api import HttpAddress
    from subfleet.settings.reading import read_run

    described = read_run(description, overrides or ())
    with stop_on_signals() as stop, open_display(json=json) as display:
        folder = serve_fleet(
            described,
            runs,
            display,
            stop,
            http=HttpAddress(host=http_host, port=http_port),
            cache=open_default_cache(),
            name=name,
            broker=address,
            wait=wait,
        )
    if json and folder is not None:
        typer.echo((folder / "summary.json").read_text(encoding="utf-8"))


@query(app, "preflight fleet --json")
def preflight(
    description: options.Description,
    overrides: options.Overrides = None,
) -> Answers:
    """Export every submodel of a run for every runtime; report its memory, or the layer that cannot be trained."""
    from rich.console import Console

    from subfleet.cli.console import show_progress
    from subfleet.cli.preflight import export_submodels, show_verdicts
    from subfleet.export.cache import open_default_cache
    from subfleet.protocol.schema import to_plain
    from subfleet.settings.reading import read_run
    from subfleet.settings.stored_networks import resolve_model

    verdicts = []
    with show_progress("Exporting") as show:
        described = resolve_model(read_run(description, overrides or ()), options.RUNS)
        for verdict in export_submodels(described, open_default_cache()):
            verdicts.append(verdict)
            show(f"{len(verdicts)} done, last {verdict.submodel} for {verdict.target}")
    yield [to_plain(verdict) for verdict in verdicts], lambda: show_verdicts(verdicts, Console())
    failed = [verdict for verdict in verdicts if verdict.problem]
    if failed:
        raise ExportError(
            f"{len(failed)} of {len(verdicts)} programs cannot be written, first {failed[0].submodel} for "
            f"{failed[0].target}: {failed[0].problem}"
        )


@query(app, "inspect torchvision.models:resnet18 --input-shape 3,64,64")
def inspect(
    network: Annotated[
        str,
        typer.Argument(
            metavar="FILE|NAME|MODULE",
            help="A run's file or name, or a function that returns a PyTorch module, such as my_net:build.",
        ),
    ],
    overrides: options.Overrides = None,
    input_shape: Annotated[str, typer.Option(help="For a module: shape of one sample, such as 3,64,64.")] = "",
    arguments: Annotated[
        list[str] | None, typer.Option("--argument", metavar="KEY=VALUE", help="For a module: an argument.")
    ] = None,
    symbols: Annotated[int, typer.Option(min=0, help="For a module of tokens: size of the vocabulary.")] = 0,
) -> Answers:
    """Show how a network can be cut, what is kept whole, and what its submodels cost on each runtime."""
    from rich.console import Console

    from subfleet.cli.console import show_progress
    from subfleet.cli.inspection import describe_network, read_request, try_submodels
    from subfleet.cli.inspection_tables import show_network, show_submodels
    from subfleet.elastic.building import network_of
    from subfleet.export.cache import open_default_cache
    from subfleet.protocol.schema import to_plain

    request, targets = read_request(network, overrides or (), input_shape, arguments or (), symbols)
    elastic = network_of(request.model)
    submodels = []
    with show_progress("Exporting and training") as show:
        for submodel in try_submodels(request, targets, open_default_cache()):
            submodels.append(submodel)
            show(f"{submodel.name} done")

    def show_all() -> None:
        show_network(elastic, Console())
        show_submodels(submodels, Console())

    yield {**to_plain(describe_network(elastic)), "submodels": to_plain(submodels)}, show_all


@query(app, "compare runs/heterofl-s* runs/fjord-s* --out comparison")
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Write comparison.svg, comparison.csv and comparison.md to this folder.")
    ] = None,
    over: Annotated[Axis, typer.Option(help="What the plot has quality over.")] = "rounds",
    target: Annotated[
        float | None, typer.Option(help="Also tell what it takes to reach this quality, such as 0.9.")
    ] = None,
) -> Answers:
    """Compare runs: each configuration over its seeds, and its gain over the first one, paired by seed."""
    from subfleet.reporting.comparison import build_rows, compare_entrants, read_entrants

    entrants = read_entrants(folders)
    comparisons = compare_entrants(entrants, target)
    headline = entrants[0].headline
    rows = build_rows(comparisons, headline)
    if out is not None:
        _write_comparison(out, entrants, rows, over)
    yield comparisons, lambda: _show_comparison(rows, headline, target, out)


def _show_comparison(rows: "list[dict[str, str]]", headline: str, target: float | None, out: Path | None) -> None:
    from rich.console import Console

    from subfleet.cli.console import show_table
    from subfleet.protocol.task_kinds import METRICS
    from subfleet.reporting.comparison import COSTS, FIGURES, list_reached_titles

    # Outliers, metrics of clients and costs have tables of their own, so that each fits the screen.
    figures = {*FIGURES.values()} - {METRICS[headline].title}
    groups = ({"outliers"}, figures, {title for title, *_ in COSTS.values()}, set(list_reached_titles(target)))
    selected = [[title for title in rows[0] if title in group] for group in groups]
    rest = [title for title in rows[0] if not any(title in group for group in groups)]
    for titles in (rest, *(["name", *titles] for titles in selected if titles)):
        cells = ([row[title] for title in titles] for row in rows)
        show_table(Console(), titles, cells, left=("name",), unwrapped=("name",))
    if out is not None:
        typer.echo(f"comparison.svg, comparison.csv and comparison.md are in {out}")


def _write_comparison(out: Path, entrants: "tuple[Entrant, ...]", rows: "list[dict[str, str]]", over: Axis) -> None:
    from subfleet.reporting.comparison import format_csv, format_markdown
    from subfleet.reporting.plots import plot_comparison

    traces = {entrant.title: entrant.trace(over) for entrant in entrants}
    with explain_os_errors(f"{out} cannot be written", "choose another folder with --out"):
        out.mkdir(parents=True, exist_ok=True)
        plot = plot_comparison(traces, entrants[0].headline, over)
        (out / "comparison.svg").write_text(plot, encoding="utf-8")
        (out / "comparison.csv").write_text(format_csv(rows), encoding="utf-8")
        (out / "comparison.md").write_text(format_markdown(rows), encoding="utf-8")


@command(app, "example fleet > mine.toml")
def example(
    name: Annotated[str, typer.Argument(help="Name of an included run; see `subfleet examples`.")] = "fleet",
) -> None:
    """Print the description of an included run, as a starting point for your own."""
    from subfleet.settings.reading import read_included_run

    typer.echo(read_included_run(name), nl=False)


@query(app, "examples --json")
def examples() -> Answers:
    """List the included runs, which `subfleet run` and `subfleet serve` accept by name."""
    from subfleet.settings.reading import list_included_runs, read_included_run

    titles = {name: read_included_run(name).partition("\n")[0].removeprefix("# ") for name in list_included_runs()}
    yield titles, lambda: typer.echo("\n".join(f"{name}: {title}" for name, title in titles.items()))


@query(app, "methods fedtrans")
def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show the parameters of this method beside the values of its paper.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run three rounds of each method with every norm policy (minutes).")
    ] = False,
) -> Answers:
    """List the federated methods: paper, what varies between clients, runtimes, status."""
    from rich.console import Console

    from subfleet.cli.method_list import describe_method, describe_methods, show_methods, show_parameters

    if name is not None:
        if check:
            raise ConfigError(f"--check runs every method, but {name!r:.80} is named; leave one of them out")
        yield describe_method(name), lambda: show_parameters(Console(), name)
        return
    verdicts = _check_methods() if check else None
    yield describe_methods() if verdicts is None else verdicts, lambda: show_methods(Console(), verdicts)
    results = [(method, norms, text) for method, row in (verdicts or {}).items() for norms, text in row.items()]
    failed = [result for result in results if result[-1] != "ok"]
    if failed:
        method, norms, text = failed[0]
        raise RunError(
            f"{len(failed)} of {len(results)} checks of methods fail, first {method} with norms {norms!r}: {text}"
        )


def _check_methods() -> dict[str, dict[str, str]]:
    from subfleet.cli.console import show_progress
    from subfleet.emulation.method_checks import check_methods
    from subfleet.export.cache import open_default_cache
    from subfleet.export.pool import ExportPool

    verdicts: dict[str, dict[str, str]] = {}
    with show_progress("Checking") as show, ExportPool(open_default_cache(), workers=1) as exports:
        for name, norms, verdict in check_methods(exports):
            verdicts.setdefault(name, {})[norms] = verdict
            show(f"{sum(map(len, verdicts.values()))} done, last {name} with norms {norms!r}: {verdict}")
    return verdicts


app.add_typer(data, name="data")
app.add_typer(runs_app, name="runs")
