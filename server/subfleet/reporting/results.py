"""Writes the results of a run: `summary.json`, `report.html`, CSV tables, and the models of the devices."""

import csv
import dataclasses
import hashlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.networks import NetworkRecord
from subfleet.journal.records import ClientRow, DeployedModel, RoundRecord, RunResult, select_fields
from subfleet.journal.totals import count_outliers, sum_costs
from subfleet.methods.aggregator import EvaluatedModel
from subfleet.protocol.errors import explain_os_errors
from subfleet.reporting.report import render_failure, render_report
from subfleet.reporting.spending import list_reached, sum_spent
from subfleet.reporting.texts import find_data_warnings
from subfleet.settings.run_folder import write_summary

_LOG = logging.getLogger(__name__)

MODELS = "models"
"""Folder in the folder of a run, with a folder for each device."""


def write_results(
    folder: Path,
    *,
    name: str,
    result: RunResult,
    models: Sequence[Mapping[str, Any]] = (),
    figures: Mapping[str, Any] | None = None,
) -> Path:
    """Write summary.json, rounds.csv, clients.csv, evaluations.csv and report.html; returns the report's path.

    If the report cannot be made, a page with the reason is written instead.

    Args:
        folder: created if it is missing.
        name: display name of the run.
        result: of the run.
        models: devices' own models, see `copy_models`.
        figures: of the whole run, see `compute_figures`.

    Raises:
        FileError: the folder cannot be written.
    """
    rounds = result.rounds
    record = {**build_summary(name, result), "models": list(models), "figures": dict(figures or {})}
    report = folder / "report.html"
    with explain_os_errors(f"the results cannot be written to {folder}", "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_summary(folder, record)
        _write_csv(folder / "rounds.csv", [build_round_row(record) for record in rounds])
        clients = [{"round": record.round, **_build_client_row(row)} for record in rounds for row in record.clients]
        _write_csv(folder / "clients.csv", clients)
        evaluations = [build_evaluation_row(record, row) for record in result.evaluations for row in record.clients]
        _write_csv(folder / "evaluations.csv", evaluations)
        report.write_text(_render(name, result, record), encoding="utf-8")
    return report


def _render(name: str, result: RunResult, record: dict[str, Any]) -> str:
    """The report, or a page with the reason why it cannot be made."""
    try:
        return render_report(name, result, record)
    except Exception as error:  # noqa: BLE001 - a failed plot must not lose the results
        why = f"{type(error).__name__}: {error}"
        _LOG.error("the report of run %s cannot be made (%s)", name, why, exc_info=_LOG.isEnabledFor(logging.DEBUG))
        return render_failure(name, why)


def build_summary(name: str, result: RunResult) -> dict[str, Any]:
    """The results of a run as plain data: metrics, costs, and its rounds with a row for each client."""
    rounds = [
        {
            **build_round_row(record),
            "idle": dict(record.idle),
            "clients": [_build_client_row(row) for row in record.clients],
        }
        for record in result.rounds
    ]
    return {
        "name": name,
        **select_fields(result, "run_id", "method", "method_status", "ended_early", "accuracy", "headline"),
        "memory_limit": result.memory_limit,
        "outliers": count_outliers(result.rounds),
        "model": _build_model(result.rounds[-1].model) if result.rounds else None,
        "metrics": result.rounds[-1].all_metrics if result.rounds else {},
        "participation": result.participation,
        "data_warnings": find_data_warnings(result),
        "evaluation": _build_evaluation(result.evaluations[-1]) if result.evaluations else None,
        "evaluations": [_build_evaluation(record) for record in result.evaluations],
        "generations": [dataclasses.asdict(record) for record in result.generations],
        "tuning": result.tuning and dataclasses.asdict(result.tuning),
        "networks": [build_network_row(network) for network in result.networks],
        "costs": dataclasses.asdict(sum_costs(result)),
        "programs_from": dict(result.programs_from),
        "reached": list_reached(list(sum_spent(rounds, result.headline)), result.headline),
        "rounds": rounds,
    }


def _build_model(model: EvaluatedModel | None) -> dict[str, Any] | None:
    """The model that was evaluated."""
    return None if model is None else dataclasses.asdict(model) | select_fields(model, "description", "short")


def _build_evaluation(record: EvaluationRecord) -> dict[str, Any]:
    """An evaluation by devices: spreads of metrics, and a row for each client."""
    spreads = {name: record.spread(name) for name in (record.headline, "accuracy", "loss")}
    return {
        **select_fields(record, "round", "seconds", "headline"),
        **{name: spread and dataclasses.asdict(spread) for name, spread in spreads.items()},
        "together": dict(record.together),
        "clients": [dataclasses.asdict(row) for row in record.clients],
    }


def build_evaluation_row(record: EvaluationRecord, row: EvaluationRow) -> dict[str, Any]:
    """One client in one evaluation, as a flat row."""
    lists = {name: " ".join(map(str, getattr(row, name))) for name in ("class_counts", "class_correct")}
    plain = dataclasses.asdict(row)
    metrics = plain.pop("metrics")
    return {"round": record.round, **plain, **lists, **metrics}


def build_network_row(record: NetworkRecord) -> dict[str, Any]:
    """One network of a run as a row."""
    lineage = record.lineage
    return {
        "network": lineage.id,
        "map": lineage.map.TYPE,
        **select_fields(lineage, "parent", "born_round", "retired_round", "reason"),
        **select_fields(record, "wider", "deeper", "parameters", "weight_bytes", "forward_macs", "ready_round"),
        **select_fields(record, "training_macs", "own_mean", "metric"),
        "trained_rounds": len(record.trained),
        "clients": len(record.clients),
        "clients_by_round": {number: len(names) for number, names in record.trained.items()},
        "owners": len(record.owners),
        "accuracy": record.own_mean if record.metric == "accuracy" else None,
    }


def build_round_row(record: RoundRecord) -> dict[str, Any]:
    """One round without its clients, as a flat row."""
    aggregated, count = record.aggregated, len(record.aggregated)
    return {
        **select_fields(record, "round", "accuracy"),
        "model": record.model_description,
        "loss": record.loss,
        **record.metrics,
        **select_fields(record, "seconds", "log_time_s"),
        **select_fields(record, "not_drawn", "due"),
        "aggregated": count,
        **select_fields(record, "participation", "left_out"),
        "submodels": len({row.architecture_id for row in aggregated}),
        "limits": _count_limits(aggregated),
        **{
            name: sum(getattr(row, name) for row in record.clients)
            for name in ("bytes_down", "bytes_up", "training_macs")
        },
        "model_bytes": record.model_bytes,
        "expected_s": max((row.expected_s for row in record.clients if row.sample_passes), default=0.0) or None,
        "utilisation": sum(row.utilisation or 0.0 for row in aggregated) / count if count else None,
        "parameters_lost": sum(row.parameters_lost for row in aggregated) / count if count else 0.0,
        **select_fields(record, "programs_written", "failed_attempts"),
    }


def _count_limits(rows: Sequence[ClientRow]) -> str:
    """The number of submodels that each limit determined, such as "2 link, 1 memory"."""
    counted = Counter(row.limit for row in rows if row.limit)
    return ", ".join(f"{count} {limit}" for limit, count in sorted(counted.items()))


def _build_client_row(row: ClientRow) -> dict[str, Any]:
    """One client in a round, as a flat row."""
    return {**dataclasses.asdict(row), **select_fields(row, "utilisation", "training_macs")}


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        # Rows of clients without an answer have fewer columns.
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
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
    """The rows of models with the metrics that `trial` measures for their files; equal files are measured once."""
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
