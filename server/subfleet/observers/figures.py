"""Runs as experiment trackers take them: settings as flat parameters, rounds and evaluations as numbers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.records import RoundRecord, select_fields
from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.silence import import_silently
from subfleet.settings.fingerprint import select_outcome_settings
from subfleet.settings.run import Run

_MAX_CHARACTERS = 250
"""Of a parameter's value; trackers refuse longer ones."""


class FigureObserver:
    """An observer that logs figures, and ignores sentences.

    Args:
        log: called with figures by name, and the number of the round.
    """

    def __init__(self, log: Callable[[Mapping[str, float], int], object]) -> None:
        self._log = log

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver.round_finished`."""
        self._log(round_figures(record), record.round)

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `RunObserver`."""
        self._log(evaluation_figures(record), record.round)


def import_tracker(name: str, module: str = "") -> Any:
    """Import the package of a tracker, by default the one of this name.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_silently(module or name)
    except ImportError as error:
        raise MissingExtraError(name, name) from error


def flatten_parameters(run: Run) -> dict[str, str]:
    """The settings that determine the outcome of a run by dotted key, and `accuracy_of`, which model is evaluated."""
    parameters = {key: str(value)[:_MAX_CHARACTERS] for key, value in _flatten(select_outcome_settings(run), "")}
    return {**parameters, "accuracy_of": run.method.roles().aggregator.model}


def _flatten(plain: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value not in (None, [], ""):
            yield f"{prefix}{key}", value


def round_figures(record: RoundRecord) -> dict[str, float]:
    """The figures of a finished round that were measured."""
    aggregated = record.aggregated
    used = [row.utilisation for row in aggregated if row.utilisation is not None]
    measured = [row.measured_peak_bytes for row in aggregated if row.measured_peak_bytes is not None]
    figures = {
        **record.all_metrics,
        **select_fields(record, "loss", "participation", "seconds"),
        **select_fields(record.model, "untrained"),
        "submodels": float(len({row.architecture_id for row in aggregated})),
        **{name: float(sum(getattr(row, name) for row in record.clients)) for name in ("bytes_down", "bytes_up")},
        "planned_peak_bytes": float(max((row.planned_peak_bytes for row in aggregated), default=0)),
        "measured_peak_bytes": float(max(measured)) if measured else None,
        "utilisation": sum(used) / len(used) if used else None,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def evaluation_figures(record: EvaluationRecord) -> dict[str, float]:
    """Figures of an evaluation on devices' own held-out samples; empty if no device has measured anything."""
    spread, loss = record.spread(), record.spread("loss")
    if spread is None or loss is None:
        return {}
    name = f"own_{record.headline}"
    return {
        name: spread.mean,
        f"{name}_range": spread.interquartile_range,
        f"{name}_worst": spread.worst,
        f"{name}_worst_tier": spread.worst_tier_mean,
        "own_loss": loss.mean,
    }
