"""What a run of an emulated fleet left behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.journal.records import RoundRecord

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left behind.

    Attributes:
        accuracy: of the full model on the held-out samples.
        folder: with run.json, summary.json, rounds.csv, clients.csv, report.html and the model; of client processes
            also the logs and the devices' own models.
        report: the page to look at.
        rounds: every round, with a row for each client.
        models: one entry per device and model file: its subnet, its difference from PyTorch, its own accuracy.
    """

    accuracy: float
    folder: Path
    report: Path
    rounds: tuple[RoundRecord, ...]
    models: tuple[dict[str, Any], ...] = ()
