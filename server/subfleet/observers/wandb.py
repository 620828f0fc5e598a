"""Weights & Biases: written offline into the run's folder unless WANDB_MODE says otherwise; `wandb sync` sends it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.records import RoundRecord, RunObserver
from subfleet.observers.figures import evaluation_figures, figures_of, parameters_of
from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.silence import imported
from subfleet.settings.run import Run

__all__ = ["wandb"]


class _History:
    def __init__(self, tracked: Any) -> None:
        self._tracked = tracked

    def say(self, text: str) -> None:
        """Sentences are for people."""

    def round_finished(self, record: RoundRecord) -> None:
        self._tracked.log(figures_of(record), step=record.round)

    def evaluated(self, record: EvaluationRecord) -> None:
        self._tracked.log(evaluation_figures(record), step=record.round)


@contextmanager
def wandb(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Write to `folder/wandb`. Nothing leaves the machine by itself.

    Raises:
        MissingExtraError: wandb is not installed.
    """
    try:
        package = imported("wandb")
    except ImportError as error:
        raise MissingExtraError("wandb", "wandb") from error
    tracked = package.init(
        project=os.environ.get("WANDB_PROJECT") or "subfleet",
        name=run.name,
        dir=str(folder),
        config=parameters_of(run),
        mode=os.environ.get("WANDB_MODE") or "offline",  # it says what is wrong with others
        reinit="create_new",
        settings=package.Settings(silent=True, console="off", x_disable_stats=True),
    )
    code = 1
    try:
        yield _History(tracked)
        code = 0
    finally:
        tracked.finish(exit_code=code)
