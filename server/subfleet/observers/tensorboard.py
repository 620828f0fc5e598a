"""TensorBoard: scalars of each round in the folder of the run; show them with: tensorboard --logdir runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from subfleet.journal.records import RunObserver
from subfleet.observers.figures import FigureObserver, flatten_parameters, import_tracker
from subfleet.settings.run import Run

FOLDER = "tensorboard"


@contextmanager
def tensorboard(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Log to `folder/tensorboard`.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """
    writer = import_tracker("tensorboard", "torch.utils.tensorboard").SummaryWriter(log_dir=str(folder / FOLDER))

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
