"""Disk space of a task on a device, as the device checks it and the server plans it."""

from collections.abc import Set

from subfleet.protocol.exhaustive import never
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, Train

TRAINED_COPIES = 3
"""Files as large as the weights during training: weights, update, and the copy of the update that is sent."""
PLACED_COPIES = 2
"""Copies of a model during deployment: the fetched one and the final one."""


def needed_bytes(task: Task, lacking: Set[str] | None = None) -> int:
    """Compute the bytes that a task still takes: missing blobs, and the files that its work writes.

    Training writes an update and the copy of it that is sent, deployment the models; scoring and evaluation write
    nothing.

    Args:
        task: the task.
        lacking: digests of the task's blobs that are missing on the device; None means all of them.
    """
    fetched_bytes = sum(blob.size_bytes for blob in task.blobs if lacking is None or blob.sha256 in lacking)
    match task.work:
        case Train() | Calibrate():
            written_bytes = (TRAINED_COPIES - 1) * sum(weights.size_bytes for weights in task.weights)
        case Deploy():
            written_bytes = (PLACED_COPIES - 1) * sum(program.blob.size_bytes for program in task.programs)
        case Score() | Evaluate():
            written_bytes = 0
        case _:
            never(task.work)
    return fetched_bytes + written_bytes
