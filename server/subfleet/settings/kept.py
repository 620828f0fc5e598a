"""The description of a run in the run's own folder: by it the run is taken up, played again, shown and compared."""

import json
import os
from dataclasses import replace
from pathlib import Path

from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.schema import to_plain, validate
from subfleet.settings.parts import parts_of
from subfleet.settings.resuming import check_taken_up
from subfleet.settings.run import Run
from subfleet.settings.summary import SUMMARY, read_summary, understood_summary

__all__ = [
    "FILE",
    "MODEL",
    "SUPERNET",
    "check_not_over",
    "free_folder",
    "keep_run",
    "kept_run",
    "make_folder",
    "replayed_run",
]

FILE = "run.json"
MODEL = "model.safetensors"
"""The whole model after the last round, with all networks that were in use then."""
SUPERNET = "supernet.safetensors"
"""The whole model as it was before a search took paths of it; of runs that searched."""


def make_folder(folder: Path) -> Path:
    """The absolute path of a run's folder, which is made where it is missing.

    Raises:
        FileError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"the folder {folder} cannot be made: {error.strerror}; choose another with --runs") from error
    return folder.resolve()


def free_folder(runs: Path, name: str, chosen: str | None) -> Path:
    """Where a run's folder is: `runs/<chosen>`, by default the run's name with the first free number. It makes none."""
    folder = runs / (chosen or name)
    number = 2
    while chosen is None and folder.exists():
        folder = runs / f"{name}-{number}"
        number += 1
    return folder


def check_not_over(folder: Path, run: Run) -> None:
    """Make sure that a folder's run is not over, or is to have more rounds.

    Raises:
        FileError: its description cannot be read.
        ConfigError: it is over, or its description is none.
    """
    if (folder / SUMMARY).exists() and not ((folder / FILE).exists() and kept_run(folder).rounds < run.rounds):
        raise ConfigError(f"the run {folder} is over already; choose another --name, raise its rounds, or remove it")


def keep_run(folder: Path, run: Run) -> None:
    """Write a run's description into its folder, as a whole or not at all.

    A run that is over goes on where it is to have more rounds; what it came to before is kept as
    `summary-<rounds>.json`.

    Raises:
        FileError: it cannot be written.
        ConfigError: the folder is that of another run.
    """
    path, summary = folder / FILE, folder / SUMMARY
    before = kept_run(folder) if path.exists() else None
    raised = before is not None and check_taken_up(
        f"the run in {folder}", parts_of(before), parts_of(run), "restore that, choose another --name, or remove it"
    )
    partial = path.with_name(path.name + ".part")
    try:
        if raised and before is not None and summary.exists():
            os.replace(summary, folder / f"summary-{before.rounds}.json")  # noqa: PTH105 - as below
        partial.write_text(json.dumps(to_plain(run), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105 - the same call, and atomic on every system
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}; choose another folder with --runs") from error


def kept_run(folder: Path) -> Run:
    """Read it again.

    Raises:
        FileError: there is none, or it cannot be read.
        ConfigError: it is no description of a run.
    """
    path = folder / FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; name the folder of a run") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}; remove that run") from error
    return validate(Run, plain, str(path))


def replayed_run(folder: Path) -> Run:
    """The run of a folder, in which programs count from the same turns on as they did in it.

    Raises:
        FileError: there is none, or it cannot be read.
        ConfigError: it is not over, or is no description of a run.
    """
    summary = read_summary(folder)
    if summary is None:
        raise ConfigError(f"the run in {folder} is not over; go on with it with: subfleet runs resume")
    with understood_summary(folder):
        return replace(kept_run(folder), programs_from=dict(summary.get("programs_from", {})))
