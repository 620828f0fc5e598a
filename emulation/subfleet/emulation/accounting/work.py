"""Tasks that are not done: what they would send back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from subfleet.agent.outcomes import TrainingEnded
from subfleet.elastic.network import Network
from subfleet.emulation.accounting.programs import count_update_bytes
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Task, Train


class AccountedBlobs:
    """See `Blobs`. Blobs have names and sizes, and no content, so every one of them can be fetched."""

    def has(self, ref: BlobRef) -> bool:
        """See `Blobs.has`."""
        del ref
        return True

    def take_file(self, path: Path) -> BlobRef:
        """See `Blobs.take_file`; nothing is written.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{path} is the output of a training, but nothing is trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedWork:
    """See `ClientWork`: every training ends with an update of the size that it would have, and without a loss.

    Attributes:
        sample_count: of the device's training data.
        find_network: of a submodel.
    """

    sample_count: int
    find_network: Callable[[Architecture], Network]

    def expect(self, task: Task) -> None:
        """See `ClientWork.expect`."""

    def begin(self, task: Task, memory_limit_bytes: int) -> Callable[[], TrainingEnded]:
        """See `ClientWork.begin`."""
        del memory_limit_bytes
        return partial(self._end, task)

    def _end(self, task: Task) -> TrainingEnded:
        """What a training sends back. Raises ProtocolError for other tasks, which a run that is accounted lacks."""
        if not isinstance(task.work, Train):
            raise ProtocolError(f"task {task.task_id!r} is no training, but only trainings are accounted")
        settings = task.work.settings
        count = settings.round_count(self.sample_count)
        size_bytes = count_update_bytes(self.find_network(task.architecture), task.architecture, task.work)
        result = TrainResult(
            sample_count=count,
            step_count=settings.step_count(count),
            loss=0.0,
            accuracy=0.0,
            measured_peak_bytes=0,
            train_seconds=0.0,
        )
        blob = BlobRef(sha256=BlobRef.of(task.task_id.encode()).sha256, size_bytes=size_bytes)
        return TrainingEnded(task_id=task.task_id, result=result, blob=blob)
