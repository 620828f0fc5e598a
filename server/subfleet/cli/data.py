"""`subfleet data`: the data sets that are known by name, and what is in one."""

import json as json_module
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subfleet.cli.failures import reporting

if TYPE_CHECKING:
    from subfleet.tasks import Dataset
    from subfleet.tasks.named_dataset import NamedDataset

__all__ = ["data"]

data = typer.Typer(
    help="Data sets by name: which there are, and what is in one.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log what happens inside to standard error.")]
_PLACES = {
    "given": "in SUBFLEET_DATA",
    "installed": "in a package",
    "cached": "in the cache",
    "download": "to download",
    "missing": "to put there",
    "broken": "broken",
}
"""Where files are, the nearest first."""
_SHOWN_CLASSES = 12


@data.command(name="list", epilog="Example: subfleet data list --json")
def list_all(json: Json = False, verbose: Verbose = False) -> None:
    """List the data sets that experiments and `--data NAME:train` know, and where their files are."""
    with reporting(verbose=verbose):
        from rich.console import Console
        from rich.table import Table

        from subfleet.cli.literal import literal
        from subfleet.tasks.catalogue import DATASETS

        described = {name: _described(task) for name, task in DATASETS.items()}
        described |= {name: _broken(name, why) for name, why in DATASETS.broken.items()}
        described = dict(sorted(described.items()))
        if json:
            typer.echo(json_module.dumps(described))
            return
        table = Table("name", "sample", "classes", "owners", "files", "what is learned", box=None, padding=(0, 2, 0, 0))
        # Only the last column wraps: names must be there as a whole to be copied.
        for column in table.columns[:-1]:
            column.no_wrap = True
        for name, named in described.items():
            shape = "x".join(map(str, named["input_shape"]))
            stands_in = f" (stands in for {named['stand_in_for']})" if named["stand_in_for"] else ""
            place = _PLACES[named["files"]]
            cells = (name, shape, str(named["classes"]), named["owner"], place, named["summary"] + stands_in)
            table.add_row(*map(literal, cells))
        Console().print(table)


@data.command(epilog="Example: subfleet data show fashion_mnist --partition dirichlet --alpha 0.3 --clients 50")
def show(  # noqa: PLR0913, PLR0917 - one parameter per option is how typer reads a command
    name: Annotated[str, typer.Argument(help="Name of the data set, of those that `subfleet data list` lists.")],
    partition: Annotated[str, typer.Option(help="Also split it: iid, dirichlet, pathological, shard or natural.")] = "",
    clients: Annotated[int, typer.Option(min=1, help="Clients of the partition.")] = 10,
    alpha: Annotated[float, typer.Option(help="Concentration of a Dirichlet partition, above 0.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the partition.")] = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Read a data set (downloading it where it is not here yet) and count what is in it."""
    with reporting(verbose=verbose):
        from subfleet.emulation.partitions import partition as divide
        from subfleet.protocol.schema import validated
        from subfleet.settings.samples import PartitionSettings
        from subfleet.tasks.catalogue import DATASETS

        task = DATASETS.named(name)
        settings = None
        if partition:
            settings = validated(PartitionSettings, {"name": partition, "alpha": alpha}, "the partition")
        parts = task.load(announce=lambda text: typer.echo(text, err=True))
        shown = {**_described(task), "train": _counted(parts.train), "test": _counted(parts.test)}
        if settings is not None:
            pieces = divide(parts.train, settings, clients=clients, seed=seed)
            split = [_counted(parts.train.take(indices)) for indices in pieces]
            shown["partition"] = {"name": partition, "clients": split}
        if json:
            typer.echo(json_module.dumps(shown))
        else:
            _print(shown)


def _described(task: "NamedDataset") -> dict[str, Any]:
    from subfleet.tasks.source_files import find_availability, find_data_folders

    places = [find_availability(file, find_data_folders()) for file in task.files]
    return {
        "name": task.name,
        "summary": task.summary,
        "input_shape": list(task.input_shape),
        "classes": task.class_count,
        "class_names": list(task.class_names),
        "objective": task.objective,
        "metric": task.kind.headline,
        "owner": task.owner,
        "stand_in_for": task.stand_in_for,
        "licence": task.licence,
        "source": task.source,
        # The worst of them says what is still to do.
        "files": max(places, key=list(_PLACES).index) if places else "installed",
    }


def _broken(name: str, why: str) -> dict[str, Any]:
    """Of one that cannot be loaded: the same fields, of which nothing is known but why."""
    untold = {"objective": "", "metric": "", "owner": "", "stand_in_for": "", "licence": "", "source": ""}
    sizes: dict[str, Any] = {"input_shape": [], "classes": 0, "class_names": []}
    return {"name": name, "summary": f"broken: {why}", **sizes, **untold, "files": "broken"}


def _counted(dataset: "Dataset") -> dict[str, Any]:
    counted: dict[str, Any] = {"samples": len(dataset), "class_counts": dataset.class_counts().tolist()}
    if dataset.owners is not None:
        counted["owners"] = len(set(dataset.owners[dataset.owners >= 0].tolist()))
    return counted


def _print(shown: Mapping[str, Any]) -> None:
    for key in ("name", "summary", "stand_in_for", "objective", "metric", "owner", "licence", "source"):
        if shown[key]:
            typer.echo(f"{key.replace('_', ' ')}: {shown[key]}")
    typer.echo(f"sample: {' x '.join(map(str, shown['input_shape']))}, {shown['classes']} classes")
    if shown["class_names"]:
        typer.echo(f"class names: {', '.join(shown['class_names'])}")
    for part in ("train", "test"):
        owners = f" of {shown[part]['owners']} {shown['owner']}s" if "owners" in shown[part] else ""
        typer.echo(f"{part}: {shown[part]['samples']} samples{owners}; by class {_counts(shown[part])}")
    if "partition" not in shown:
        return
    clients = shown["partition"]["clients"]
    most = max(client["samples"] for client in clients)
    typer.echo(f"{shown['partition']['name']} over {len(clients)} clients:")
    for number, client in enumerate(clients):
        bar = "#" * max(1, round(40 * client["samples"] / most))
        typer.echo(f"{number:>5} {client['samples']:>7} {bar:<40} {_counts(client)}")


def _counts(part: Mapping[str, Any]) -> str:
    counts = part["class_counts"]
    more = f" ... ({len(counts)} classes)" if len(counts) > _SHOWN_CLASSES else ""
    return " ".join(map(str, counts[:_SHOWN_CLASSES])) + more
