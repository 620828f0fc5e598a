"""What a task takes of a device's disk: the device weighs by it, and the server plans by it."""

from collections.abc import Set

from subfleet.protocol.task import Task

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
    if task.work == "deploy":
        return fetched_bytes + (PLACED_COPIES - 1) * sum(program.blob.size_bytes for program in task.programs)
    trained = None if task.work == "evaluate" else task.weights
    return fetched_bytes + (0 if trained is None else (TRAINED_COPIES - 1) * trained.size_bytes)
