"""The models of the devices: their files in the folder of a run, and their rows in the results."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.journal.records import DeployedModel, select_fields
from subfleet.protocol.errors import explain_os_errors

MODELS = "models"
"""Folder in the folder of a run, with a folder for each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric:
    """The headline metric of a model file, by a name in `subfleet.protocol.task_kinds.METRICS`."""

    metric: str
    value: float


def copy_models(folder: Path, models: Iterable[tuple[DeployedModel, Path]]) -> tuple[dict[str, Any], ...]:
    """Copy models into the folder of a run; equal models are hard links to one file.

    Args:
        folder: of the run.
        models: each with its file.

    Returns:
        A row for each model; `metric`, `own` and `accuracy` are None, see `measure_models`.

    Raises:
        FileError: a file cannot be read or written.
    """
    first: dict[str, Path] = {}
    rows = []
    for model, file in models:
        copy = folder / MODELS / model.client_id / f"model{file.suffix}"
        with explain_os_errors(f"model {copy} cannot be written", "make room for it"):
            digest = _copy(file, copy, first)
        rows.append(
            {
                **select_fields(model, "client_id", "target", "architecture", "status"),
                **select_fields(model, "max_abs_diff", "quantised_accuracy", "float_accuracy"),
                **dict.fromkeys(("metric", "own", "accuracy")),
                "file": str(copy.relative_to(folder)),
                "bytes": copy.stat().st_size,
                "sha256": digest,
            }
        )
    return tuple(rows)


def add_metric(row: Mapping[str, Any], metric: str, value: float) -> dict[str, Any]:
    """The row of a model with its headline metric."""
    return {**row, "metric": metric, "own": value, "accuracy": value if metric == "accuracy" else None}


def measure_models(
    folder: Path, rows: Sequence[dict[str, Any]], trial: Callable[[Sequence[Path]], Sequence[OwnMetric | None]]
) -> tuple[dict[str, Any], ...]:
    """The rows of models with the metrics that `trial` measures for their files; of equal files, one is measured."""
    distinct = dict[tuple[str, str], Path]()
    for row in rows:
        distinct.setdefault((row["sha256"], row["target"]), folder / row["file"])
    metrics = dict(zip(distinct, trial(list(distinct.values())), strict=True))
    known = ((row, metrics[row["sha256"], row["target"]]) for row in rows)
    return tuple(row if own is None else add_metric(row, own.metric, own.value) for row, own in known)


def _copy(file: Path, copy: Path, first: dict[str, Path]) -> str:
    """Copy a file, or link to an equal copy if the file system can; returns the SHA-256."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.unlink(missing_ok=True)
    if digest in first:
        with suppress(OSError):
            os.link(first[digest], copy)
            return digest
    shutil.copyfile(file, copy)
    first.setdefault(digest, copy)
    return digest
