"""Writes the results of a run: `summary.json`, `report.html`, and rounds, clients and evaluations as CSV."""

import csv
import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subfleet.journal.costs import sum_costs
from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.networks import NetworkRecord
from subfleet.journal.outliers import count_outliers
from subfleet.journal.records import ClientRow, RoundRecord, RunResult, compute_participation, select_fields
from subfleet.methods.aggregator import EvaluatedModel
from subfleet.protocol.errors import explain_os_errors
from subfleet.reporting.report import render_failure, render_report
from subfleet.reporting.texts import find_data_warnings
from subfleet.settings.run_folder import write_summary

_LOG = logging.getLogger(__name__)


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
    return {
        "name": name,
        **select_fields(result, "run_id", "method", "method_status", "ended_early", "accuracy", "headline"),
        "outliers": count_outliers(result.rounds),
        "model": _build_model(result.rounds[-1].model) if result.rounds else None,
        "metrics": result.rounds[-1].all_metrics if result.rounds else {},
        "participation": compute_participation(result.rounds),
        "data_warnings": find_data_warnings(result),
        "evaluation": _build_evaluation(result.evaluations[-1]) if result.evaluations else None,
        "evaluations": [_build_evaluation(record) for record in result.evaluations],
        "generations": [dataclasses.asdict(record) for record in result.generations],
        "tuning": result.tuning and dataclasses.asdict(result.tuning),
        "networks": [build_network_row(network) for network in result.networks],
        "costs": dataclasses.asdict(sum_costs(result)),
        "programs_from": dict(result.programs_from),
        "rounds": [
            {**build_round_row(record), "clients": [_build_client_row(row) for row in record.clients]}
            for record in result.rounds
        ],
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
        "due": len(record.due),
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
