"""What a task takes of a device's disk: the device weighs by it, and the server plans by it."""

from collections.abc import Set

from subfleet.protocol.exhaustive import never
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, Train

__all__ = ["PLACED_COPIES", "TRAINED_COPIES", "needed_bytes"]

TRAINED_COPIES = 3
"""How often what has the size of the weights is there while a device trains: the weights that it fetched, an update,
and the copy of it that is sent."""
PLACED_COPIES = 2
"""How often a model is there while it is placed: as it was fetched, and where it stays."""


def needed_bytes(task: Task, lacking: Set[str] | None = None) -> int:
    """What a task still takes of the disk: blobs that are not here, and what doing it writes.

    That is an update and the copy of it that is sent, or the placed models; scores and evaluations write nothing.

    Args:
        task: as it was announced, or is to be.
        lacking: digests of the task's blobs that are not here; None stands for all of them.
    """
    fetched_bytes = sum(blob.size_bytes for blob in task.blobs if lacking is None or blob.sha256 in lacking)
    match task.work:
        case Train(weights=weights) | Calibrate(weights=weights):
            written_bytes = (TRAINED_COPIES - 1) * weights.size_bytes
        case Deploy(models=models):
            written_bytes = (PLACED_COPIES - 1) * sum(model.blob.size_bytes for model in models)
        case Score() | Evaluate():
            written_bytes = 0
        case _:
            never(task.work)
    return fetched_bytes + written_bytes
