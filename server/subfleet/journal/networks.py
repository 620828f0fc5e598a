"""Records of a run's networks, their lineage, costs, training and quality, and of the searches that find them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.protocol.task_kinds import better, format_metrics
from subfleet.search.supernets import kendall_tau

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesRecord:
    """The scoring of a generation by devices.

    Attributes:
        rounds: number of scoring rounds; answers: number of answers in all of them; labels: number of counted labels.
        supernet_bytes: of the weights that each device was sent: the smallest supernet that contains the paths.
        bytes_down: of all payloads to these devices; bytes_up: from them.
        ranks: after each scoring round, Kendall's tau of the scores so far and the server's own on its validation
            samples; None if nothing is ranked.
    """

    rounds: int
    answers: int
    labels: int
    supernet_bytes: int
    bytes_down: int
    bytes_up: int
    ranks: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """A scored generation of paths.

    Attributes:
        round: the round after which the search was.
        number: of the generation in that search, from 1.
        tier: the tier of devices that its paths are for.
        paths: number of paths.
        best: the highest score among them; best_path: the operators of that path, in the order of the choices.
        mean: of their scores.
        seconds: from its request until it was scored; None if not measured.
        devices: the scoring by devices; None if the server scored it.
    """

    round: int
    number: int
    tier: int
    paths: int
    best: float
    best_path: tuple[str, ...]
    mean: float
    seconds: float | None
    devices: DevicesRecord | None = None


def describe_generation(record: GenerationRecord) -> str:
    """A generation in one sentence."""
    summary = (
        f"search after round {record.round}, generation {record.number}: {record.paths} paths of tier {record.tier}, "
        f"best score {record.best:.4f}, mean {record.mean:.4f}"
    )
    scoring = record.devices
    if scoring is None:
        return summary
    ranks = ", ".join("-" if rank is None else f"{rank:.2f}" for rank in scoring.ranks)
    return (
        f"{summary}; {scoring.answers} answers of devices in {scoring.rounds} rounds, "
        f"{scoring.supernet_bytes / 1e3:.0f} kB of weights each, {scoring.bytes_down / 1e6:.2f} MB down and "
        f"{scoring.bytes_up / 1e6:.2f} MB up"
        + (f"; Kendall's tau against the server's own scores {ranks}" if ranks else "")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """The ranks of the networks that a search found, before and after further training.

    Attributes:
        networks: number of these networks that devices have evaluated since.
        tau: Kendall's tau of their scores in the search and of their evaluations; None if nothing is ranked.
    """

    networks: int
    tau: float | None


def build_tuning_record(
    generations: Sequence[GenerationRecord], networks: Sequence[NetworkRecord]
) -> TuningRecord | None:
    """The record of the networks found by a search, one for each tier; None without a search, or before its end.

    Args:
        generations: of the search.
        networks: of the run, in the order in which they appeared.
    """
    if not generations:
        return None
    tiers = sorted({generation.tier for generation in generations})
    best = [max(generation.best for generation in generations if generation.tier == tier) for tier in tiers]
    searched = [network for network in networks if 0 < network.lineage.born_round == generations[-1].round]
    if len(searched) != len(tiers):
        return None
    pairs = zip(best, searched, strict=True)
    known = [
        (score, better(network.metric) * network.own_mean) for score, network in pairs if network.own_mean is not None
    ]
    tau = kendall_tau([score for score, _ in known], [result for _, result in known])
    return TuningRecord(networks=len(known), tau=tau)
