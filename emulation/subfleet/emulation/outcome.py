"""What a run of an emulated fleet left behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.journal.records import RunResult

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left behind.

    Attributes:
        result: how the run ended; files that its server had are gone.
        folder: with run.json, summary.json, rounds.csv, clients.csv, report.html and the model; of client processes
            also the logs and the devices' own models.
        report: the page to look at.
        models: one entry per device and model file: its subnet, its difference from PyTorch, its own accuracy.
    """

    result: RunResult
    folder: Path
    report: Path
    models: tuple[dict[str, Any], ...] = ()
