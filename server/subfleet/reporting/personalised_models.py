"""Each device's own models in a run's folder, and what is told of them: the same, whichever host played the run."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.journal.records import DeployedModel
from subfleet.protocol.errors import FileError

__all__ = ["MODELS", "OwnMetric", "kept_models", "tried", "tried_models"]

MODELS = "models"
"""The folder of these files in a run's folder: a folder for each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric:
    """How good a model file is.

    Attributes:
        metric: that it is judged by, a name in `subfleet.protocol.task_kinds.METRICS`.
    """

    metric: str
    value: float


def kept_models(folder: Path, models: Iterable[tuple[DeployedModel, Path]]) -> tuple[dict[str, Any], ...]:
    """Copy devices' models to where people look for them; equal ones are one file with several names.

    Args:
        folder: of the run.
        models: each with its file.

    Returns:
        A row for each; `metric`, `own` and `accuracy` are None, as nobody has tried them yet.

    Raises:
        FileError: a file cannot be read or written.
    """
    first: dict[str, Path] = {}
    rows = []
    for model, file in models:
        kept = folder / MODELS / model.client_id / f"model{file.suffix}"
        try:
            digest = _keep(file, kept, first)
        except OSError as error:
            raise FileError(f"model {kept} cannot be written: {error.strerror}; make room for it") from error
        rows.append(
            {
                "client_id": model.client_id,
                "file": str(kept.relative_to(folder)),
                "target": model.target,
                "architecture": model.architecture,
                "bytes": kept.stat().st_size,
                "sha256": digest,
                "max_abs_diff": model.max_abs_diff,
                "quantised_accuracy": model.quantised_accuracy,
                "float_accuracy": model.float_accuracy,
                "metric": None,
                "own": None,
                "accuracy": None,
                "status": model.status,
            }
        )
    return tuple(rows)


def tried(row: Mapping[str, Any], metric: str, value: float) -> dict[str, Any]:
    """The row of a model that somebody has tried: by which metric its kind is judged, and what it came to."""
    return {**row, "metric": metric, "own": value, "accuracy": value if metric == "accuracy" else None}


def tried_models(
    folder: Path, rows: Sequence[dict[str, Any]], trial: Callable[[Sequence[Path]], Sequence[OwnMetric | None]]
) -> tuple[dict[str, Any], ...]:
    """The rows of models in a run's folder with what a trial of their files tells; of equal files one is tried."""
    distinct = dict[tuple[str, str], Path]()
    for row in rows:
        distinct.setdefault((row["sha256"], row["target"]), folder / row["file"])
    metrics = dict(zip(distinct, trial(list(distinct.values())), strict=True))
    known = ((row, metrics[row["sha256"], row["target"]]) for row in rows)
    return tuple(row if one is None else tried(row, one.metric, one.value) for row, one in known)


def _keep(file: Path, kept: Path, first: dict[str, Path]) -> str:
    """A copy, or another name of an equal one where the file system has such; returns the SHA-256 of both."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.unlink(missing_ok=True)
    if digest in first:
        try:
            os.link(first[digest], kept)
        except OSError:
            pass
        else:
            return digest
    shutil.copyfile(file, kept)
    first.setdefault(digest, kept)
    return digest
