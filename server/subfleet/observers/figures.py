"""What trackers are told: a run's settings as flat parameters, a round as numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.records import RoundRecord
from subfleet.settings.fingerprint import select_outcome_settings
from subfleet.settings.run import Run

__all__ = ["evaluation_figures", "figures_of", "parameters_of"]

_LONGEST = 250
"""Characters of a parameter: trackers refuse longer ones."""


def parameters_of(run: Run) -> dict[str, str]:
    """Everything that takes part in a run's outcome, by dotted key; and `accuracy_of`, what the method's model is."""
    told = {key: str(value)[:_LONGEST] for key, value in _flat(select_outcome_settings(run), "")}
    return {**told, "accuracy_of": run.method.roles().aggregator.model}


def _flat(plain: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value not in (None, [], ""):
            yield f"{prefix}{key}", value


def figures_of(record: RoundRecord) -> dict[str, float]:
    """A finished round in numbers, without those that nobody has measured."""
    aggregated = record.aggregated
    used = [row.utilisation for row in aggregated if row.utilisation is not None]
    measured = [row.measured_peak_bytes for row in aggregated if row.measured_peak_bytes is not None]
    found = {
        **record.all_metrics,
        "loss": record.loss,
        "participation": record.participation,
        "untrained": None if record.model is None else record.model.untrained,
        "seconds": record.seconds,
        "submodels": float(len({row.architecture_id for row in aggregated})),
        "bytes_down": float(sum(row.bytes_down for row in record.clients)),
        "bytes_up": float(sum(row.bytes_up for row in record.clients)),
        "planned_peak_bytes": float(max((row.planned_peak_bytes for row in aggregated), default=0)),
        "measured_peak_bytes": float(max(measured)) if measured else None,
        "utilisation": sum(used) / len(used) if used else None,
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def evaluation_figures(record: EvaluationRecord) -> dict[str, float]:
    """What devices found on held-out samples of their own, in numbers; none where nobody found anything."""
    found, loss = record.spread(), record.spread("loss")
    if found is None or loss is None:
        return {}
    name = f"own_{record.headline}"
    return {
        name: found.mean,
        f"{name}_range": found.interquartile_range,
        f"{name}_worst": found.worst,
        f"{name}_worst_tier": found.worst_tier_mean,
        "own_loss": loss.mean,
    }
