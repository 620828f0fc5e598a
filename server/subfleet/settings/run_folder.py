"""The folder of a run: its description `run.json`, its result `summary.json`, and the files of its model."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from subfleet.protocol.errors import ConfigError, FileError, SubfleetError, explain_os_errors
from subfleet.protocol.schema import to_plain, validate
from subfleet.settings.fingerprint import check_resumable, select_outcome_settings
from subfleet.settings.run import Run

DESCRIPTION = "run.json"
SUMMARY = "summary.json"
"""Written when the run is finished."""
MODEL = "model.safetensors"
"""The model after the last round, with all networks that were in use."""
SUPERNET = "supernet.safetensors"
"""The supernet before paths of it were selected, if the run searched one."""


def choose_folder(runs: Path, name: str, chosen: str | None) -> Path:
    """The folder of a run: `runs/<chosen>`, or the name of the run with the first free number. It is not created."""
    folder = runs / (chosen or name)
    number = 2
    while chosen is None and folder.exists():
        folder = runs / f"{name}-{number}"
        number += 1
    return folder


def create_folder(folder: Path) -> Path:
    """Create the folder of a run if it is missing; returns its absolute path.

    Raises:
        FileError: it cannot be created.
    """
    with explain_os_errors(f"the folder {folder} cannot be created", "choose another with --runs"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def check_not_over(folder: Path, run: Run) -> None:
    """Check that the run of a folder is not finished, or gets more rounds.

    Raises:
        FileError: its description cannot be read.
        ConfigError: it is finished, or its description is invalid.
    """
    if not (folder / SUMMARY).exists():
        return
    if not (folder / DESCRIPTION).exists() or read_description(folder).rounds >= run.rounds:
        raise ConfigError(
            f"the run {folder} is already finished; choose another --name, raise its rounds, or remove it"
        )


def write_description(folder: Path, run: Run) -> None:
    """Write the description of a run into its folder.

    If a finished run gets more rounds, its summary is renamed to `summary-<rounds>.json`.

    Raises:
        FileError: it cannot be written.
        ConfigError: the folder belongs to another run.
    """
    path, summary = folder / DESCRIPTION, folder / SUMMARY
    before = read_description(folder) if path.exists() else None
    extended = before is not None and check_resumable(
        f"the run in {folder}",
        select_outcome_settings(before),
        select_outcome_settings(run),
        "restore the settings, choose another --name, or remove it",
    )
    with explain_os_errors(f"{path} cannot be written", "choose another folder with --runs"):
        if extended and before is not None and summary.exists():
            summary.replace(folder / f"summary-{before.rounds}.json")
        _write_json(path, to_plain(run))


def read_description(folder: Path) -> Run:
    """The run that a folder belongs to.

    Raises:
        FileError: there is no description, or it cannot be read.
        ConfigError: the description is invalid.
    """
    path = folder / DESCRIPTION
    try:
        with explain_os_errors(f"{path} cannot be read", "name the folder of a run"):
            plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; remove that run") from error
    return validate(Run, plain, str(path))


def read_replay(folder: Path) -> Run:
    """The run of a folder, with programs available from the same attempts on as they were in it.

    Raises:
        FileError: the description or the summary cannot be read.
        ConfigError: the run is not finished, or its description is invalid.
    """
    summary = read_summary(folder)
    if summary is None:
        raise ConfigError(f"the run in {folder} is not finished; resume it with: subfleet runs resume")
    with interpret_summary(folder):
        return replace(read_description(folder), programs_from=dict(summary["programs_from"]))


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary of a run; raises OSError if that fails."""
    _write_json(folder / SUMMARY, summary)


def read_summary(folder: Path) -> Mapping[str, Any] | None:
    """The summary of a run, or None if the run is not finished.

    Raises:
        FileError: it cannot be read, or is not a JSON object.
    """
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; make it readable, or run that again") from error
    except (ValueError, RecursionError) as error:
        raise _describe_damage(folder, f"it is not valid JSON: {error}") from error
    if not isinstance(summary, dict):
        raise _describe_damage(folder, f"it is {type(summary).__name__}, but must be an object")
    return summary


@contextmanager
def interpret_summary(folder: Path) -> Iterator[None]:
    """A context that works on a summary: an error in it means that the file is damaged or from another release.

    Raises:
        FileError: the work failed; other `SubfleetError`s pass unchanged.
    """
    try:
        yield
    except SubfleetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _describe_damage(folder, f"{type(error).__name__}: {error}") from error


def _describe_damage(folder: Path, reason: str) -> FileError:
    return FileError(
        f"{folder / SUMMARY} is damaged, or was written by another release ({' '.join(reason.split()):.200}); run that "
        "again, or restore the file"
    )


def _write_json(path: Path, content: Any) -> None:
    """Replace a file as a whole, so that it is never half written."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
