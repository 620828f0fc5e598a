"""TensorBoard: scalars of each round, in the run's folder. Look with: tensorboard --logdir runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.records import RoundRecord, RunObserver
from subfleet.observers.figures import evaluation_figures, figures_of, parameters_of
from subfleet.protocol.errors import MissingExtraError
from subfleet.settings.run import Run

__all__ = ["FOLDER", "tensorboard"]

FOLDER = "tensorboard"


class _Scalars:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def say(self, text: str) -> None:
        """Sentences are for people."""

    def round_finished(self, record: RoundRecord) -> None:
        for name, figure in figures_of(record).items():
            self._writer.add_scalar(name, figure, record.round)
        self._writer.flush()

    def evaluated(self, record: EvaluationRecord) -> None:
        for name, figure in evaluation_figures(record).items():
            self._writer.add_scalar(name, figure, record.round)
        self._writer.flush()


@contextmanager
def tensorboard(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Write to `folder/tensorboard`.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboard", "tensorboard") from error
    writer: Any = SummaryWriter(log_dir=str(folder / FOLDER))
    try:
        text = "\n".join(f"    {key}: {value}" for key, value in parameters_of(run).items())
        writer.add_text("settings", text)
        yield _Scalars(writer)
    finally:
        writer.close()
