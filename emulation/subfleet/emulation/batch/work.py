"""How the tasks of an emulated client are done, and with what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from subfleet import tasks
from subfleet.agent.outcomes import TrainingEnded
from subfleet.edge_client.task_work import Outcome, TaskWork
from subfleet.emulation.batch.trainers import AttackingTrainer
from subfleet.emulation.gathering import EmulatedDevice
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.task import Task
from subfleet.settings.fleet import Attack
from subfleet.tasks import Dataset


class ClientWork(Protocol):
    """Does the tasks of a client."""

    def expect(self, task: Task) -> None:
        """Note a task that the client has received, and may begin."""
        ...

    def begin(self, task: Task, memory_limit_bytes: int) -> Callable[[], Outcome | TrainingEnded]:
        """Begin a task.

        Args:
            task: the task.
            memory_limit_bytes: as in `TaskWork.do`.

        Returns:
            A function that waits for the outcome; a training may have its output stored already. It is called once, or
            never if the task is stopped.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkHere:
    """Does tasks in this process, when their outcome is asked for; see `ClientWork`.

    Attributes:
        work: the means to do them.
        stopped: called between steps; True ends the task.
    """

    work: TaskWork
    stopped: Callable[[], bool]

    def expect(self, task: Task) -> None:
        """See `ClientWork.expect`."""

    def begin(self, task: Task, memory_limit_bytes: int) -> Callable[[], Outcome]:
        """See `ClientWork.begin`."""
        return partial(self.work.do, task, memory_limit_bytes, self.stopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMeans:
    """With what the tasks of a client are done, in any process.

    Attributes:
        runtime: the target of its programs.
        threads: number of threads of the runtime.
        attack: how it falsifies its updates; None for an honest client.
        data: file of its training samples, which need not exist where a trainer holds them.
        held_out: file of its held-out samples; None without any.
        folder: for outputs.
    """

    runtime: str
    threads: int
    attack: Attack | None
    data: Path
    held_out: Path | None
    folder: Path

    @classmethod
    def of(cls, client: EmulatedDevice, folder: Path) -> "ClientMeans":
        """The means of a client whose files are in a folder."""
        return cls(
            runtime=client.runtime,
            threads=client.profile.threads,
            attack=client.attack,
            data=folder / f"{client.client_id}.npz",
            held_out=None if client.test is None else folder / f"{client.client_id}.held-out.npz",
            folder=folder,
        )

    def name_samples(self, client: EmulatedDevice) -> Mapping[Path, Dataset]:
        """The samples of the client by the files that are named for them."""
        pairs = ((self.data, client.data), (self.held_out, client.test))
        return {path: samples for path, samples in pairs if path is not None and samples is not None}

    def open(self, trainer: Trainer, blob_path: Callable[[BlobRef], Path]) -> TaskWork:
        """The work with a trainer, which an attacker's wraps.

        Args:
            trainer: of the runtime.
            blob_path: as in `TaskWork`.
        """
        return TaskWork(
            trainers={trainer.target: trainer if self.attack is None else AttackingTrainer(trainer, self.attack)},
            blob_path=blob_path,
            work_folder=self.folder,
            data=str(self.data),
            held_out=None if self.held_out is None else str(self.held_out),
            threads=self.threads,
        )


def write_samples(samples: Mapping[Path, Dataset]) -> None:
    """Write the files of samples that do not exist yet."""
    for path, held in samples.items():
        if not path.exists():
            tasks.write_npz(path, held)
