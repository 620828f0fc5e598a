"""Weights & Biases: logged offline into the run's folder unless WANDB_MODE is set; `wandb sync` uploads it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from subfleet.journal.records import RunObserver
from subfleet.observers.figures import FigureObserver, flatten_parameters, import_tracker
from subfleet.settings.run import Run


@contextmanager
def wandb(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Log to `folder/wandb`; by default nothing leaves the machine.

    Raises:
        MissingExtraError: wandb is not installed.
    """
    package = import_tracker("wandb")
    tracked = package.init(
        project=os.environ.get("WANDB_PROJECT") or "subfleet",
        name=run.name,
        dir=str(folder),
        config=flatten_parameters(run),
        mode=os.environ.get("WANDB_MODE") or "offline",  # wandb itself rejects unknown modes
        reinit="create_new",
        settings=package.Settings(silent=True, console="off", x_disable_stats=True),
    )
    code = 1
    try:
        yield FigureObserver(lambda figures, round_number: tracked.log(figures, step=round_number))
        code = 0
    finally:
        tracked.finish(exit_code=code)
