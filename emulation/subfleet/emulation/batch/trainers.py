"""Trainers of clients that share a process: they share loaded programs, and may attack."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from subfleet import tasks
from subfleet.arrays import decode_arrays
from subfleet.emulation.poisoning import build_change, poison_dataset
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, Job, Prediction, Trainer, TrainResult
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.protocol.update_codecs import Uncompressed
from subfleet.settings.fleet import Attack
from subfleet.tasks import DataForm, Dataset
from subfleet.tasks.data_form import fit_to_form
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.job_files import read_program, write_change
from subfleet.trainers.kept import Host, Kept
from subfleet.trainers.layouts import read_step_layout
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.memory_watch import GrowthWatch
from subfleet.trainers.onnx import OnnxTrainer
from subfleet.trainers.program_layout import ProgramLayout
from subfleet.trainers.torch import TorchTrainer

TRAINERS: Mapping[str, Callable[[Host], Trainer]] = MappingProxyType(
    {
        "onnx": lambda host: OnnxTrainer(host=host),
        "executorch": lambda host: ExecutorchTrainer(host=host),
        "torch": lambda host: TorchTrainer(host=host),
    }
)
"""By program target, a function that creates the trainer of a host."""


class Unmeasured:
    """Measures no memory, because the growth of the process belongs to no single client; planned peaks keep budgets."""

    def measure_held_bytes(self) -> int:
        """See `GrowthWatch.measure_held_bytes`."""
        return 0

    def growth_bytes(self) -> int:
        """See `GrowthWatch.growth_bytes`."""
        return 0

    def check(self) -> None:
        """See `GrowthWatch.check`."""


class SharedHost:
    """The process of all clients; see `Host`. A program that several clients run is loaded once.

    Every training sets all weights and state of a session, so results do not depend on earlier users of it.

    Args:
        most: number of sessions that stay loaded; the least recently used one is dropped first.
        data: data sets by the names that jobs have for them; other names are read as a device would.
    """

    def __init__(self, most: int = 64, data: Mapping[str, Dataset] = MappingProxyType({})) -> None:
        self._most = most
        self._data = data
        self._sessions: OrderedDict[tuple[str, int], Loaded] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """See `Host.held_bytes`; no client holds any."""
        return 0

    @property
    def shared(self) -> bool:
        """See `Host.shared`."""
        return True

    def find_layout(self, sha256: str, threads: int) -> ProgramLayout | None:
        """See `Host.find_layout`."""
        loaded = self._sessions.get((sha256, threads))
        return None if loaded is None else loaded.layout

    def take(self, sha256: str, threads: int) -> Kept | None:
        """See `Host.take`."""
        loaded = self._sessions.pop((sha256, threads), None)
        return None if loaded is None else Kept(loaded=loaded, held_bytes=0)

    def keep(self, loaded: Loaded, *, held_bytes: int, limit_bytes: int) -> None:
        """See `Host.keep`."""
        del held_bytes, limit_bytes
        self._sessions[loaded.sha256, loaded.threads] = loaded
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)

    def watch(self, limit_bytes: int, *, held_bytes: int) -> GrowthWatch:
        """See `Host.watch`."""
        del limit_bytes, held_bytes
        return Unmeasured()

    def release(self) -> None:
        """See `Host.release`; the process keeps freed memory for the next client."""

    def read(self, source: str, form: DataForm) -> Dataset:
        """See `Host.read`."""
        dataset = self._data.get(source)
        return tasks.read_dataset(source, form) if dataset is None else fit_to_form(dataset, form, source)

    def now_s(self) -> float:
        """See `Host.now_s`; always 0, because times in this process are not those of devices, and vary between runs."""
        return 0.0


def create_trainers(runtimes: set[str], host: SharedHost | None = None) -> Mapping[str, Trainer]:
    """Create a trainer for each target, for all clients of this process.

    Args:
        runtimes: the targets.
        host: that they share; None for one that reads all samples from files.

    Raises:
        ConfigError: there is no trainer for a target.
    """
    unknown = sorted(runtimes - set(TRAINERS))
    if unknown:
        raise ConfigError(
            f"clients run {', '.join(unknown)}, but in one process they can run {', '.join(sorted(TRAINERS))}"
        )
    shared = host or SharedHost()
    return MappingProxyType({name: TRAINERS[name](shared) for name in sorted(runtimes)})


class AttackingTrainer:
    """A trainer that trains on a client's data and on poisoned data, and combines both changes to an attack.

    Both trainings start with the weights that the server sent, and both keep the budget.

    Args:
        inner: trains.
        attack: of the client.
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
        """See `Trainer.describe`; it describes the client's own data."""
        return self._inner.describe(data)

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        """See `Trainer.train`; the result is that of the honest training, and only the change is falsified."""
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
            # The codec encodes everything except buffers.
            exact = frozenset[str]()
            if job.work.update_codec != Uncompressed():
                exact = read_step_layout(read_program(job.program_path, self.target).manifest).buffers
            write_change(job, build_change(self._attack, honest, malicious), exact=exact)
        finally:
            data.unlink(missing_ok=True)
            change.unlink(missing_ok=True)
        return result

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        """See `Trainer.calibrate`; it is honest."""
        return self._inner.calibrate(job, stopped)

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        """See `Trainer.score`."""
        return self._inner.score(job, stopped)

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        """See `Trainer.evaluate`; it is honest."""
        return self._inner.evaluate(job, stopped)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """See `Trainer.predict`."""
        return self._inner.predict(model_path, data, threads)
