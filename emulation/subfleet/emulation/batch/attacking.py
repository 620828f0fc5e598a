"""A trainer that attacks: it trains as any other, again on poisoned data, and sends what the attack makes of both."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from subfleet import tasks
from subfleet.arrays import decode_arrays
from subfleet.emulation.poisoning import build_change, poison_dataset
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, Job, Prediction, Trainer, TrainResult
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.protocol.update_codecs import Uncompressed
from subfleet.settings.attacks import Attack
from subfleet.trainers.job_files import read_program, write_change
from subfleet.trainers.layouts import read_step_layout


class AttackingTrainer:
    """An attacker's runtime. Both trainings begin with the weights that the server sent, and both keep the budget.

    Args:
        inner: the runtime that trains.
        attack: what is sent.
    """

    providers = ("cpu",)

    def __init__(self, inner: Trainer, attack: Attack) -> None:
        self._inner = inner
        self._attack = attack
        self.target = inner.target
        self.suffix = inner.suffix

    @property
    def held_bytes(self) -> int:
        """See `Trainer.held_bytes`."""
        return self._inner.held_bytes

    def describe_runtime(self) -> str:
        """See `Trainer.describe_runtime`."""
        return self._inner.describe_runtime()

    def describe(self, data: str) -> DataSummary:
        """See `Trainer.describe`: an attacker claims the data that it has."""
        return self._inner.describe(data)

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        """See `Trainer.train`; what is told is the honest training's."""
        plain = replace(job, work=replace(job.work, update_codec=Uncompressed()))
        result = self._inner.train(plain, stopped)
        data = job.output_path.with_name(f"{job.output_path.name}.poisoned.npz")
        change = job.output_path.with_name(f"{job.output_path.name}.malicious")
        try:
            tasks.write_npz(data, poison_dataset(self._attack, tasks.read_dataset(job.data)))
            self._inner.train(replace(plain, data=str(data), output_path=change), stopped)
            honest, malicious = (
                {name: np.asarray(array, np.float32) for name, array in decode_arrays(path.read_bytes()).items()}
                for path in (job.output_path, change)
            )
            # The codec encodes everything but buffers.
            exact = frozenset[str]() if job.work.update_codec == Uncompressed() else self._buffers(job)
            write_change(job, build_change(self._attack, honest, malicious), exact=exact)
        finally:
            data.unlink(missing_ok=True)
            change.unlink(missing_ok=True)
        return result

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        """See `Trainer.calibrate`; the sums are honest."""
        return self._inner.calibrate(job, stopped)

    def _buffers(self, job: Job[Train]) -> frozenset[str]:
        return read_step_layout(read_program(job.program_path, self.target).manifest).buffers

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        """See `Trainer.score`."""
        return self._inner.score(job, stopped)

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        """See `Trainer.evaluate`: what is told is honest."""
        return self._inner.evaluate(job, stopped)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """See `Trainer.predict`."""
        return self._inner.predict(model_path, data, threads)
