"""Many clients' trainings in one process: they share loaded programs; its memory and its time are no client's."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.jobs import Trainer
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.kept import Host, Kept
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.memory_watch import GrowthWatch
from subfleet.trainers.onnx import OnnxTrainer
from subfleet.trainers.torch import TorchTrainer

TRAINERS: Mapping[str, Callable[[Host], Trainer]] = MappingProxyType(
    {
        "onnx": lambda host: OnnxTrainer(host=host),
        "executorch": lambda host: ExecutorchTrainer(host=host),
        "torch": lambda host: TorchTrainer(host=host),
    }
)
"""Program target to the trainer of it in a given process."""


class Unmeasured:
    """Measures nothing: what this process grows by is no single client's. Budgets are kept by planned peaks alone."""

    def held_bytes(self) -> int:
        """See `Watch.held_bytes`."""
        return 0

    def growth_bytes(self) -> int:
        """See `Watch.growth_bytes`."""
        return 0

    def check(self) -> None:
        """See `Watch.check`."""


class SharedHost:
    """The process of a whole fleet; see `Host`. A program that several clients run is loaded once.

    A session begins every training with the weights that it is given and with state of zero, so who used it before
    makes no difference to the result.

    Args:
        most: sessions kept at once; beyond it the one that was not used for the longest goes.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._sessions: OrderedDict[tuple[str, int], Loaded] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """No client holds any of it."""
        return 0

    @property
    def shared(self) -> bool:
        """See `Host.shared`."""
        return True

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
        """Freed memory stays with the process: the next client takes it at once."""

    def now_s(self) -> float:
        """Steps take no time: how long they take here says nothing of any device, and the same run is the same."""
        return 0.0


def create_trainers(runtimes: set[str]) -> Mapping[str, Trainer]:
    """One trainer for each target, for all clients of a process.

    Raises:
        ConfigError: a target has no trainer that runs in process.
    """
    unknown = sorted(runtimes - set(TRAINERS))
    if unknown:
        raise ConfigError(
            f"clients run {', '.join(unknown)}, but in one process they can run {', '.join(sorted(TRAINERS))}"
        )
    host = SharedHost()
    return MappingProxyType({name: TRAINERS[name](host) for name in sorted(runtimes)})
