"""TensorBoard: scalars of each round in the folder of the run; show them with: tensorboard --logdir runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subfleet.journal.records import RunObserver
from subfleet.observers.figures import FigureObserver, flatten_parameters
from subfleet.protocol.errors import MissingExtraError
from subfleet.settings.run import Run

FOLDER = "tensorboard"


@contextmanager
def tensorboard(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Log to `folder/tensorboard`.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboard", "tensorboard") from error
    writer: Any = SummaryWriter(log_dir=str(folder / FOLDER))

    def log(figures: Mapping[str, float], round_number: int) -> None:
        for name, figure in figures.items():
            writer.add_scalar(name, figure, round_number)
        writer.flush()

    try:
        text = "\n".join(f"    {key}: {value}" for key, value in flatten_parameters(run).items())
        writer.add_text("settings", text)
        yield FigureObserver(log)
    finally:
        writer.close()
