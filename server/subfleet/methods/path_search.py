"""A search between two rounds for paths of a supernet: what a method is asked, and what it answers.

The search goes on a generation at a time: paths are proposed, scored on validation data, by the server or by devices
on data of their own, and remembered. When nothing is left to propose, the paths that were found become networks of the
run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Network

__all__ = ["FederatedScoring", "Generation", "PathSearch", "ProposalContext", "ScoredGeneration"]

Path = tuple[str, ...]
"""The operator of each of the network's choices, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalContext:
    """A search that is to propose paths, asked beside the loop.

    Attributes:
        network: the supernet.
        memory: what the method remembers.
        seed: of the run.
    """

    network: Network
    memory: Any
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Paths that are scored together.

    Attributes:
        number: counted over the whole search, from 1.
        tier: of devices that they are for, from 1.
        paths: different ones.
        least_macs: what devices must be able to take to be asked for scores, in multiplications of one sample's forward
            pass.
    """

    number: int
    tier: int
    paths: tuple[Path, ...]
    least_macs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGeneration:
    """A generation whose paths have been scored.

    Attributes:
        scores: of each, higher is better: mean accuracy, or minus the mean loss where accuracy means nothing.
    """

    generation: Generation
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedScoring:
    """Devices score, on their held-out data, in place of the server.

    Attributes:
        clients: asked in each round of scoring, drawn anew.
        rounds: of scoring for each generation, whose scores are means over all labels that were counted.
    """

    clients: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSearch:
    """How a method searches. Each function is pure.

    Attributes:
        is_due: of what the method remembers and a round that was aggregated last, whether there is something to search
            for before the next one; asked in the loop.
        propose: the next generation; None where nothing is left to propose. It may take seconds.
        record: what is remembered once a generation has been scored.
        skip: what is remembered where nobody can score a generation: nothing more is proposed for its tier.
        conclude: of what is remembered, the supernet and the round that was aggregated last, the networks that the best
            paths become; the supernet then retires. They begin with its weights, or with first ones.
        federated: who scores; None has the server do so on its validation data.
    """

    is_due: Callable[[Any, int], bool]
    propose: Callable[[ProposalContext], Generation | None]
    record: Callable[[Any, ScoredGeneration], Any]
    skip: Callable[[Any, Generation], Any]
    conclude: Callable[[Any, Network, int], Sequence[Lineage]]
    federated: FederatedScoring | None = None
