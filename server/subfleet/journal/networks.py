"""Records of a run's networks: their lineage, costs, training and quality."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.protocol.task_kinds import format_metrics

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRecord:
    """One network of a run.

    Attributes:
        lineage: its origin, the round of its appearance, and the reason.
        parameters: of the whole network, including running statistics.
        forward_macs: multiply-accumulates of one sample's forward pass through the whole network.
        wider: cells of its parent network that are wider in it.
        deeper: cells of its parent network that are followed by new cells in it.
        trained: by round, the clients with aggregated updates of it.
        training_macs: of all its trainings with an update.
        ready_round: the first round in which a program that trains it was written for at least one target; None if
            there was none, as far as is known of a retired network.
        owners: clients that evaluated it in the last evaluation.
        own_mean: mean of their results in the metric that the run's models are judged by; None without any.
        metric: the name of that metric.
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
        """Its display name."""
        return self.lineage.id or "the first"

    @property
    def quality(self) -> str:
        """The mean result of its owners, in words; empty without any."""
        return "" if self.own_mean is None else format_metrics({self.metric: self.own_mean})

    @property
    def in_use(self) -> bool:
        """Whether it was in use in any round; the configured network may retire before the first."""
        return self.lineage.retired_round != 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights, without a container."""
        return _FLOAT_BYTES * self.parameters

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that have trained it."""
        return tuple(sorted({name for names in self.trained.values() for name in names}))

    def list_changes(self, most_names: int = sys.maxsize) -> list[str]:
        """The changes from its parent network in words: the names of the cells, or the number of more than this."""
        return [
            f"{' and '.join(cells) if len(cells) <= most_names else f'{len(cells)} cells'} {change}"
            for change, cells in (("wider", self.wider), ("deeper", self.deeper))
            if cells
        ]


def walk_descendants(
    networks: Sequence[NetworkRecord], parent: str | None = None, depth: int = 0
) -> Iterator[tuple[int, NetworkRecord]]:
    """Each network after its parent, with the number of its ancestors; by default all, else those below a parent."""
    for network in networks:
        if network.lineage.parent == parent:
            yield depth, network
            yield from walk_descendants(networks, network.lineage.id, depth + 1)
