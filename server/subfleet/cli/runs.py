"""The commands of `subfleet runs`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from subfleet.cli.decorators import Answers, Json, command, query
from subfleet.cli.options import RUNS, Ray, Runs, Workers
from subfleet.protocol.errors import ConfigError, explain_os_errors
from subfleet.settings.fleet import HostKind

Name = Annotated[str, typer.Argument(help="Name of the run's folder.")]

runs = typer.Typer(no_args_is_help=True, help="List, show, resume, replay and remove runs.")


@query(runs, "runs list --json", name="list")
def list_runs(folder: Runs = RUNS) -> Answers:
    """List the runs in a folder with their method, rounds, seed and result."""
    from subfleet.protocol.task_kinds import format_metrics
    from subfleet.settings.run_folder import DESCRIPTION

    rows = [_describe(path.parent) for path in sorted(folder.glob(f"*/{DESCRIPTION}"))]

    def show_rows() -> None:
        if not rows:
            typer.echo(f"there is no run in {folder}; start one with: subfleet run quickstart")
        for row in rows:
            known = {} if row["value"] is None else {row["headline"]: row["value"]}
            result = (format_metrics(known) or "no model") if row["over"] else "not finished"
            model = f" of {row['model']}" if row["model"] else ""
            typer.echo(f"{row['folder']}: {row['method']}, {row['rounds']} rounds, seed {row['seed']}, {result}{model}")

    yield rows, show_rows


@query(runs, "runs show quickstart")
def show(name: Name, folder: Runs = RUNS) -> Answers:
    """Show the settings and the result of a run."""
    from subfleet.protocol.schema import to_plain
    from subfleet.settings.run_folder import read_description

    path = _find(folder, name)
    shown = {**_describe(path), "settings": to_plain(read_description(path))}
    yield shown, lambda: typer.echo(json.dumps(shown, indent=2))


@query(runs, "runs networks fedtrans fedavg")
def networks(
    names: Annotated[list[str], typer.Argument(help="Names of the runs' folders.")],
    folder: Runs = RUNS,
) -> Answers:
    """List the final networks of runs by the cost of a forward pass. Each can be the model of another run."""
    from rich.console import Console

    from subfleet.cli.run_networks import describe_networks, show_networks

    rows = describe_networks([_find(folder, name) for name in names])
    yield rows, lambda: show_networks(rows, Console())


@query(runs, "runs path fedoras --random 1 --target onnx --out path")
def path(
    name: Name,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", help="Operator of a choice; give one for each choice, in order.")
    ] = None,
    random: Annotated[int | None, typer.Option("--random", help="Draw a path with this seed instead.")] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="Write this final network of the run instead, such as t1.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="Format of the model. Default: the targets of the run.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the files.")] = Path("path"),
    folder: Runs = RUNS,
) -> Answers:
    """Write a path of a run's supernet with its weights before fine-tuning, or a network that the run found.

    With --network, also the network of a tier that no device belongs to any more can be written.
    """
    from subfleet.cli.run_networks import choose_path, load_network, load_supernet, show_path, write_path
    from subfleet.export.cache import open_default_cache

    if network is None:
        weights = load_supernet(_find(folder, name))
        architecture = choose_path(weights.network, operators or (), random)
    elif operators or random is not None:
        raise ConfigError("--network is given beside --operator or --random; leave one out")
    else:
        weights = load_network(_find(folder, name), network)
        architecture = weights.network.full_architecture()
    targets = target or weights.run.deploy_targets or weights.run.targets
    written = write_path(weights, architecture, targets, out, cache=open_default_cache())
    yield written, lambda: show_path(written)


@command(runs, "runs resume quickstart")
def resume(
    name: Name,
    folder: Runs = RUNS,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Continue to this many rounds; it may be more than the run had.")
    ] = None,
    json: Json = False,
) -> None:
    """Resume an interrupted run with its own settings, or continue a run with more rounds."""
    from subfleet.cli.running import run_and_show
    from subfleet.settings.run_folder import read_description

    run = read_description(_find(folder, name))
    run_and_show([run if rounds is None else replace(run, rounds=rounds)], folder, json=json, name=name)


@command(runs, "runs replay fedtrans --host batch")
def replay(
    name: Name,
    folder: Runs = RUNS,
    host: Annotated[
        HostKind | None,
        typer.Option(help="As with subfleet run. Default: as the run did."),
    ] = None,
    workers: Workers = None,
    ray: Ray = None,
    json: Json = False,
) -> None:
    """Repeat a finished run in a new folder. Programs become available in the same rounds as they did."""
    from subfleet.cli.running import run_and_show, set_host
    from subfleet.settings.run_folder import read_replay

    run_and_show(set_host([read_replay(_find(folder, name))], host, workers=workers, ray=ray), folder, json=json)


@command(runs, "runs remove quickstart --yes")
def remove(
    name: Name,
    folder: Runs = RUNS,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a run's folder with everything in it."""
    path = _find(folder, name)
    if not yes and not _confirm(f"Remove {path} with everything in it?"):
        return
    with explain_os_errors(f"{path} cannot be removed", "remove it by hand"):
        shutil.rmtree(path)


def _confirm(question: str) -> bool:
    try:
        return typer.confirm(question)
    except RuntimeError as error:  # `typer.Abort`, or what `input` raises without standard input
        raise ConfigError("standard input is closed, so nobody can confirm; add --yes") from error


def _find(folder: Path, name: str) -> Path:
    from subfleet.protocol.suggestion import suggest
    from subfleet.settings.run_folder import DESCRIPTION

    known = [path.parent.name for path in folder.glob(f"*/{DESCRIPTION}")]
    if name not in known:
        hint = suggest(name, known)
        raise ConfigError(f"there is no run {name!r:.80} in {folder}; choose one of {sorted(known)}{hint}")
    return folder / name


def _describe(folder: Path) -> dict[str, Any]:
    from subfleet.settings.run_folder import interpret_summary, read_description, read_summary

    run, summary = read_description(folder), read_summary(folder)
    results = {"accuracy": None, "model": None, "headline": "accuracy", "metrics": {}} if summary is None else summary
    with interpret_summary(folder):
        return {
            "folder": str(folder),
            "name": run.name,
            "method": run.method.TYPE,
            "rounds": run.rounds,
            "seed": run.seed,
            "host": run.host.type,
            "over": summary is not None,
            "accuracy": results["accuracy"],
            "model": (results["model"] or {}).get("description"),
            "headline": results["headline"],
            "value": results["metrics"].get(results["headline"]),
        }
