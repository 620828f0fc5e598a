"""`subfleet runs`: the runs in a folder; look at one, go on with it, play it again, remove it."""

import json as json_module
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subfleet.cli.failures import reporting
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.settings.fleet import HostKind

if TYPE_CHECKING:
    from subfleet.settings.run import Run

__all__ = ["runs"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log what happens inside to standard error.")]
Name = Annotated[str, typer.Argument(help="Name of the run's folder.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs' own folders.")]
_FOLDER = Path("runs")

runs = typer.Typer(
    no_args_is_help=True, help="List the runs that are here, look at one, go on with it, play it again, remove it."
)


@runs.command("list", epilog="Example: subfleet runs list --json")
def listed(folder: Runs = _FOLDER, json: Json = False, verbose: Verbose = False) -> None:
    """List the runs in a folder: what was run, with which seed, and how it stands."""
    with reporting(verbose=verbose):
        from subfleet.protocol.task_kinds import told_metrics
        from subfleet.settings.kept import FILE

        found = [_described(path.parent) for path in sorted(folder.glob(f"*/{FILE}"))]
        if json:
            typer.echo(json_module.dumps(found))
            return
        if not found:
            typer.echo(f"there is no run in {folder}; begin one with: subfleet run quickstart")
        for one in found:
            reached = told_metrics({one["headline"]: one["value"]}) if one["over"] else "not over"
            reached += f" of {one['model']}" if one["model"] else ""
            typer.echo(f"{one['folder']}: {one['method']}, {one['rounds']} rounds, seed {one['seed']}, {reached}")


@runs.command(epilog="Example: subfleet runs show quickstart")
def show(name: Name, folder: Runs = _FOLDER, json: Json = False, verbose: Verbose = False) -> None:
    """Show the settings of a run, and what it came to."""
    with reporting(verbose=verbose):
        from subfleet.protocol.schema import to_plain
        from subfleet.settings.kept import kept_run

        place = _existing(folder, name)
        shown = {**_described(place), "settings": to_plain(kept_run(place))}
        typer.echo(json_module.dumps(shown, indent=None if json else 2))


@runs.command(epilog="Example: subfleet runs networks fedtrans fedavg")
def networks(
    names: Annotated[list[str], typer.Argument(help="Names of the runs' folders.")],
    folder: Runs = _FOLDER,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the networks that runs ended with by what a forward pass costs: one may be the model of another run."""
    with reporting(verbose=verbose):
        from rich.console import Console

        from subfleet.cli.networks import network_rows, show_networks

        rows = network_rows([_existing(folder, name) for name in names])
        if json:
            typer.echo(json_module.dumps(rows))
        else:
            show_networks(rows, Console())


@runs.command(epilog="Example: subfleet runs path fedoras --random 1 --target onnx --out path")
def path(  # noqa: PLR0913, PLR0917 - one parameter per option is how typer reads a command
    name: Name,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", help="Of each choice in turn; once for each of them.")
    ] = None,
    random: Annotated[int | None, typer.Option("--random", help="Draw a path with this seed instead.")] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="Write this network of the run's end instead, such as t1.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="What to write models for; else the run's own targets.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the files.")] = Path("path"),
    folder: Runs = _FOLDER,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write any path of a run's supernet, with the weights that it has before any fine-tuning; or what was found in it.

    Of a tier whose network no device was left with, --network has the result all the same.
    """
    with reporting(verbose=verbose):
        from subfleet.cli.paths import chosen_path, found_network, supernet_of, write_path
        from subfleet.programs.place import open_default_cache

        if network is None:
            kept = supernet_of(_existing(folder, name))
            wanted = chosen_path(kept.network, operators or (), random)
        elif operators or random is not None:
            raise ConfigError("--network is given beside --operator or --random; leave one out")
        else:
            kept = found_network(_existing(folder, name), network)
            wanted = kept.network.full_architecture()
        targets = target or kept.run.deploy_targets or kept.run.targets
        found = write_path(kept, wanted, targets, out, cache=open_default_cache())
        if json:
            typer.echo(json_module.dumps(found))
            return
        typer.echo(f"{found['forward_macs']} multiplications a sample, {found['parameters']} parameters:")
        for choice, operator in found["operators"].items():
            typer.echo(f"  {choice}: {operator}")
        typer.echo(f"Its weights are in {found['weights']}")
        for one, file in found["files"].items():
            difference = found["max_abs_diff"][one]
            known = "an unknown amount" if difference is None else f"{difference:.1e}"
            typer.echo(f"{file} for {one} differs from PyTorch by {known}")


@runs.command(epilog="Example: subfleet runs resume quickstart")
def resume(
    name: Name,
    folder: Runs = _FOLDER,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Go on to this many rounds, which may be more than it was begun with.")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Go on with a run that was interrupted, with the settings that it was begun with; or with more rounds."""
    with reporting(verbose=verbose):
        from subfleet.settings.kept import kept_run

        run = kept_run(_existing(folder, name))
        _play(run if rounds is None else replace(run, rounds=rounds), folder, name, json=json)


@runs.command(epilog="Example: subfleet runs replay fedtrans --host batch")
def replay(
    name: Name,
    folder: Runs = _FOLDER,
    host: Annotated[HostKind | None, typer.Option("--host", help="Run on this host; else on that of the run.")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Play a run that is over again, in a folder of its own: programs count from the same rounds on as they did."""
    with reporting(verbose=verbose):
        from subfleet.cli.running import on_host
        from subfleet.settings.kept import replayed_run

        (run,) = on_host([replayed_run(_existing(folder, name))], host)
        _play(run, folder, None, json=json)


@runs.command(epilog="Example: subfleet runs remove quickstart --yes")
def remove(
    name: Name,
    folder: Runs = _FOLDER,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    verbose: Verbose = False,
) -> None:
    """Remove a run's folder with everything in it."""
    with reporting(verbose=verbose):
        place = _existing(folder, name)
        if not yes and not _confirmed(f"Remove {place} with everything in it?"):
            return
        try:
            shutil.rmtree(place)
        except OSError as error:
            raise FileError(f"{place} cannot be removed: {error.strerror}") from error


def _confirmed(question: str) -> bool:
    try:
        return typer.confirm(question)
    except RuntimeError as error:  # `typer.Abort` is one, and so is what `input` raises where there is no input at all
        raise ConfigError("nobody answers, as standard input is at its end; say --yes in place of an answer") from error


def _play(run: "Run", folder: Path, name: str | None, *, json: bool) -> None:
    from subfleet.cli.commands import stopped_by_signals
    from subfleet.cli.console import display_for
    from subfleet.cli.running import RunOptions, next_steps, run_all
    from subfleet.programs.place import open_default_cache

    display = display_for(json=json)
    options = RunOptions(runs=folder, name=name, broker=None, cache=open_default_cache(), stopping=stopped_by_signals)
    (outcome,) = run_all([run], options, display)
    if json:
        typer.echo((outcome.folder / "summary.json").read_text(encoding="utf-8"))
    for line in next_steps(outcome):
        display.say(line)


def _existing(folder: Path, name: str) -> Path:
    from subfleet.protocol.suggestion import did_you_mean
    from subfleet.settings.kept import FILE

    known = [path.parent.name for path in folder.glob(f"*/{FILE}")]
    if name not in known:
        meant = did_you_mean(name, known)
        raise ConfigError(f"there is no run {name!r:.80} in {folder}; choose one of {sorted(known)}{meant}")
    return folder / name


def _described(place: Path) -> dict[str, Any]:
    from subfleet.settings.kept import kept_run
    from subfleet.settings.summary import read_summary, understood_summary

    run, over = kept_run(place), read_summary(place)
    with understood_summary(place):
        return _row(place, run, over)


def _row(place: Path, run: "Run", over: Mapping[str, Any] | None) -> dict[str, Any]:
    headline = "accuracy" if over is None else over.get("headline", "accuracy")  # summaries of before have no other
    return {
        "folder": str(place),
        "name": run.name,
        "method": run.method.TYPE,
        "rounds": run.rounds,
        "seed": run.seed,
        "host": run.host.type,
        "over": over is not None,
        "accuracy": None if over is None else over["accuracy"],
        "model": None if over is None else (over.get("model") or {}).get("told"),
        "headline": headline,
        "value": None if over is None else over.get("metrics", over).get(headline),
    }
