"""What a run tells of each of its networks: where it comes from, what it costs, who trained it, how good it is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.protocol.task_kinds import told_metrics

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRecord:
    """One network of a run.

    Attributes:
        lineage: where it comes from, after which round, and why.
        parameters: of the whole network, running statistics included.
        forward_macs: multiply-accumulates of one sample's forward pass through the whole of it.
        wider: cells of the network that it grew from which are wider in it.
        deeper: cells of that behind which it has others.
        trained: by round, the clients whose updates of it were aggregated.
        training_macs: of all trainings of it that came to an update.
        ready_round: the first round in which clients could be given it, as the program that trains it was written for
            one target at least; None where that was never so, as far as is still known of one that has retired.
        owners: clients that said in the last evaluation how good it is on held-out samples of their own.
        own_mean: the mean of what they found, of the metric that the run's models are judged by; None where there are
            none.
        metric: which one that is.
    """

    lineage: Lineage
    parameters: int = 0
    forward_macs: int = 0
    wider: tuple[str, ...] = ()
    deeper: tuple[str, ...] = ()
    trained: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    training_macs: int = 0
    ready_round: int | None = None
    owners: tuple[str, ...] = ()
    own_mean: float | None = None
    metric: str = "accuracy"

    @property
    def name(self) -> str:
        """What people call it."""
        return self.lineage.id or "the first"

    @property
    def told(self) -> str:
        """What they found, in words; empty where there is nothing."""
        return "" if self.own_mean is None else told_metrics({self.metric: self.own_mean})

    @property
    def in_use(self) -> bool:
        """Whether it was in use in any round: what a configuration describes may give way before the first."""
        return self.lineage.retired_round != 0

    @property
    def weight_bytes(self) -> int:
        """Of its weights, without any container."""
        return _FLOAT_BYTES * self.parameters

    @property
    def clients(self) -> tuple[str, ...]:
        """Everybody who has trained it."""
        return tuple(sorted({name for names in self.trained.values() for name in names}))

    @property
    def changed(self) -> str:
        """What of the network that it grew from was changed, for people; empty where nothing was."""
        parts = {"wider": self.wider, "deeper": self.deeper}
        return ", ".join(f"{' and '.join(cells)} {how}" for how, cells in parts.items() if cells)


def walk_descendants(networks: Sequence[NetworkRecord]) -> Iterator[tuple[int, NetworkRecord]]:
    """Each network behind the one that it grew from, with the number of those that it descends from."""
    children: dict[str | None, list[NetworkRecord]] = {}
    for one in networks:
        children.setdefault(one.lineage.parent, []).append(one)
    open_ones = [(0, one) for one in reversed(children.get(None, []))]
    while open_ones:
        depth, one = open_ones.pop()
        yield depth, one
        open_ones += [(depth + 1, child) for child in reversed(children.get(one.lineage.id, []))]
