"""The commands of `subfleet data`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subfleet.cli.decorators import Answers, query

if TYPE_CHECKING:
    from subfleet.tasks import Dataset
    from subfleet.tasks.named_dataset import NamedDataset

data = typer.Typer(
    help="List data sets, and show what one contains.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_AVAILABILITY = {
    "given": "in SUBFLEET_DATA",
    "installed": "in a package",
    "cached": "in the cache",
    "download": "to download",
    "missing": "to put there",
    "broken": "broken",
}
"""Where the files of a data set are, the nearest place first."""
_SHOWN_CLASSES = 12


@query(data, "data list --json", name="list")
def list_datasets() -> Answers:
    """List the data sets that runs and `--data NAME:train` accept, and where their files are."""
    from rich.console import Console

    from subfleet.cli.console import show_table
    from subfleet.tasks.named_dataset import DATASETS

    described = {name: _describe(task) for name, task in DATASETS.items()}
    described |= {name: _describe_broken(name, reason) for name, reason in DATASETS.broken.items()}
    described = dict(sorted(described.items()))
    titles = ("name", "sample", "classes", "owners", "files", "what is learned")
    cells = (
        (
            name,
            "x".join(map(str, row["input_shape"])),
            str(row["classes"]),
            row["owner"],
            _AVAILABILITY[row["files"]],
            row["summary"] + (f" (stands in for {row['stand_in_for']})" if row["stand_in_for"] else ""),
        )
        for name, row in described.items()
    )
    # Only the last column wraps, so that names can be copied.
    yield described, lambda: show_table(Console(), titles, cells, left=titles, unwrapped=titles[:-1])


@query(data, "data show fashion_mnist --partition dirichlet --alpha 0.3 --clients 50")
def show(
    name: Annotated[str, typer.Argument(help="Name of the data set; see `subfleet data list`.")],
    partition: Annotated[
        str, typer.Option(help="Also split it over clients: iid, dirichlet, pathological, shard or natural.")
    ] = "",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients in the partition.")] = 10,
    alpha: Annotated[float, typer.Option(help="Concentration of a Dirichlet partition, above 0.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the partition.")] = 0,
) -> Answers:
    """Count the samples of a data set by class. It is downloaded if it is not there yet."""
    from subfleet.emulation.partitions import partition as divide
    from subfleet.protocol.schema import validate
    from subfleet.settings.samples import PartitionSettings
    from subfleet.tasks.named_dataset import DATASETS

    task = DATASETS.load(name)
    settings = None
    if partition:
        settings = validate(PartitionSettings, {"name": partition, "alpha": alpha}, "the partition")
    parts = task.load(announce=lambda text: typer.echo(text, err=True))
    shown = {**_describe(task), "train": _count(parts.train), "test": _count(parts.test)}
    if settings is not None:
        parts_by_client = divide(parts.train, settings, clients=clients, seed=seed)
        split = [_count(parts.train.take(indices)) for indices in parts_by_client]
        shown["partition"] = {"name": partition, "clients": split}
    yield shown, lambda: _print_details(shown)


def _describe(task: "NamedDataset") -> dict[str, Any]:
    from subfleet.tasks.source_files import find_availability, find_data_folders

    availabilities = [find_availability(file, find_data_folders()) for file in task.files]
    return {
        "name": task.name,
        "summary": task.summary,
        "input_shape": list(task.input_shape),
        "classes": task.class_count,
        "class_names": list(task.class_names),
        "objective": task.objective,
        "metric": task.kind.headline,
        **{name: getattr(task, name) for name in ("owner", "stand_in_for", "licence", "source")},
        # The farthest file determines what is left to do.
        "files": max(availabilities, key=list(_AVAILABILITY).index) if availabilities else "installed",
    }


def _describe_broken(name: str, reason: str) -> dict[str, Any]:
    """The row of a data set that cannot be loaded: all fields are empty except the reason."""
    texts = {"objective": "", "metric": "", "owner": "", "stand_in_for": "", "licence": "", "source": ""}
    sizes: dict[str, Any] = {"input_shape": [], "classes": 0, "class_names": []}
    return {"name": name, "summary": f"broken: {reason}", **sizes, **texts, "files": "broken"}


def _count(dataset: "Dataset") -> dict[str, Any]:
    counted: dict[str, Any] = {"samples": len(dataset), "class_counts": dataset.class_counts().tolist()}
    if dataset.owners is not None:
        counted["owners"] = len(set(dataset.owners[dataset.owners >= 0].tolist()))
    return counted


def _print_details(shown: Mapping[str, Any]) -> None:
    for key in ("name", "summary", "stand_in_for", "objective", "metric", "owner", "licence", "source"):
        if shown[key]:
            typer.echo(f"{key.replace('_', ' ')}: {shown[key]}")
    typer.echo(f"sample: {' x '.join(map(str, shown['input_shape']))}, {shown['classes']} classes")
    if shown["class_names"]:
        typer.echo(f"class names: {', '.join(shown['class_names'])}")
    for part in ("train", "test"):
        owners = f" of {shown[part]['owners']} {shown['owner']}s" if "owners" in shown[part] else ""
        typer.echo(f"{part}: {shown[part]['samples']} samples{owners}; by class {_format_counts(shown[part])}")
    if "partition" not in shown:
        return
    clients = shown["partition"]["clients"]
    most = max(client["samples"] for client in clients)
    typer.echo(f"{shown['partition']['name']} over {len(clients)} clients:")
    for number, client in enumerate(clients):
        bar = "#" * max(1, round(40 * client["samples"] / most))
        typer.echo(f"{number:>5} {client['samples']:>7} {bar:<40} {_format_counts(client)}")


def _format_counts(part: Mapping[str, Any]) -> str:
    counts = part["class_counts"]
    more = f" ... ({len(counts)} classes)" if len(counts) > _SHOWN_CLASSES else ""
    return " ".join(map(str, counts[:_SHOWN_CLASSES])) + more
