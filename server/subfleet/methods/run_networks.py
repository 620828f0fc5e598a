"""The networks of a method: which ones a run begins with, and which appear and retire between rounds.

A supernet becomes networks by a search between two rounds, one generation at a time: the method proposes paths, the
server or the devices score them, and the method remembers the scores. When nothing is left to propose, the best paths
become networks of the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import ModelState, Participant
from subfleet.methods.assigner import open_stream
from subfleet.protocol.submodel import Architecture

__all__ = ["Evolution", "EvolutionContext", "Networks", "StandingContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginContext:
    """The start of a run: its first clients have reported their budgets and have no task yet.

    Attributes:
        network: the configured one.
        rates: width rates of its search space.
        clients: the ids of the clients that can take part, in order.
        brought: by client, the networks of their own that these have declared.
        carried_by: as in `EvolutionContext`, among these clients. With `Assigner.lasting`, a client that replays a log
            counts with what its log has most of the time.
    """

    network: Network
    rates: tuple[float, ...]
    clients: tuple[str, ...]
    carried_by: Callable[[Lineage], tuple[str, ...]]
    brought: Mapping[str, AnyFamily] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionContext:
    """An aggregated round, after which networks may appear or retire.

    Attributes:
        round: its number.
        seed: of the run.
        lineages: of all networks that the run has had, in the order in which they appeared.
        networks: the networks of the round, by id.
        before: the model that the round started from.
        after: the model with all updates, each in its network.
        clients: the clients that sent them.
        losses: by client, the mean over the labels of its last epoch.
        carried_by: the ids of the clients that could carry the largest size of a network, estimated by shapes, with
            their budget in this round.
        aggregated_with: from a network's id and the ids of some clients, the network's state with their updates alone.
        brought: networks that clients have declared and that are a member of no network in use.
        observation: what `Memory.observe` returned for the round's updates.
        memory: what the method remembers.
    """

    round: int
    seed: int
    lineages: tuple[Lineage, ...]
    networks: Mapping[str, Network]
    before: ModelState
    after: ModelState
    clients: tuple[Participant, ...]
    losses: Mapping[str, float]
    carried_by: Callable[[Lineage], tuple[str, ...]]
    aggregated_with: Callable[[str, Collection[str]], ModelState]
    brought: tuple[AnyFamily, ...] = ()
    observation: Any = None
    memory: Any = None

    def stream(self, purpose: str) -> random.Random:
        """Random numbers for one purpose."""
        return open_stream(f"{self.seed}/{self.round}/evolving/{purpose}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolution:
    """The networks after a round.

    Attributes:
        after: the aggregated model, changed as the method wants; with the networks of the round.
        born: networks that appear. Their ids are new in the run, their parents were in use in the round, and their
            inputs and outputs are those of the first network. Each begins with what its `map` makes of its parent's
            weights in `after`.
        states: by id, the first state of a network in place of that.
        retired: ids of networks that retire. At least one network stays in use.
        observation: what `Memory.remember` gets in place of the result of `Memory.observe`; None keeps that.
    """

    after: ModelState
    born: tuple[Lineage, ...] = ()
    states: Mapping[str, ModelState] = field(default_factory=lambda: MappingProxyType({}))
    retired: tuple[str, ...] = ()
    observation: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingContext:
    """A client that is not training, and needs a submodel to evaluate and to keep.

    Attributes:
        seed: of the run.
        client: with what it trained last; that network may have retired.
        networks: the networks in use, by id; the run has had two or more.
        ready: whether the client may have a size: the program that trains it counts in the round, and it fits what the
            client could give when it trained last. Its last size is ready while its network is in use.
        memory: what the method remembers.
        declared: the size that it has declared, of a network in use; else None.
    """

    seed: int
    client: Participant
    networks: Mapping[str, Network]
    ready: Callable[[Architecture], bool]
    memory: Any = None
    declared: Architecture | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Paths that are scored together.

    Attributes:
        number: within the whole search, from 1.
        tier: the tier of devices that they are for, from 1.
        paths: different ones; each has the operator of each choice of the network, in order.
        least_macs: multiply-accumulates of one sample's forward pass that a device must be able to do to score them.
    """

    number: int
    tier: int
    paths: tuple[tuple[str, ...], ...]
    least_macs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedScoring:
    """Devices score paths on their held-out data, in place of the server.

    Attributes:
        clients: how many are asked in each round of scoring, drawn again each time.
        rounds: of scoring for each generation; scores are means over all counted labels.
    """

    clients: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSearch:
    """How a method searches for paths of a supernet. Each function is pure.

    Attributes:
        is_due: from the memory and the last aggregated round, whether a search precedes the next round; called in the
            loop.
        propose: from the memory, the supernet and the run's seed, the next generation; None ends the search. It may
            take seconds.
        record: the memory after a generation has got its scores, one for each path; higher is better.
        skip: the memory after nobody could score a generation; its tier gets no further proposals.
        conclude: from the memory, the supernet and the last aggregated round, the networks that the best paths become.
            The supernet then retires.
        federated: how devices score; None has the server score on its validation data.
    """

    is_due: Callable[[Any, int], bool]
    propose: Callable[[Any, Network, int], Generation | None]
    record: Callable[[Any, Generation, Sequence[float]], Any]
    skip: Callable[[Any, Generation], Any]
    conclude: Callable[[Any, Network, int], Sequence[Lineage]]
    federated: FederatedScoring | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """Which networks a run has; by default the configured one throughout.

    Attributes:
        begin: the networks that the run begins with, with ids and drawn first weights; an empty tuple keeps the
            configured one. Called beside the server's loop, before the first round selects clients.
        evolve: the networks after a round, called beside the loop. `Assigner.assign` then chooses among the submodels
            of all networks in use; everything else is done for each network separately. None never changes networks.
        standing: once a run has had several networks, the submodel of a client that is not training. With None it is
            the one it trained last, and a client whose network has retired counts as new.
        path_search: the search for paths of a supernet between two rounds; None searches nothing.
        grows: whether `evolve` makes cells wider or deeper, which needs a family whose settings have widths.
    """

    begin: Callable[[BeginContext], tuple[Lineage, ...]] | None = None
    evolve: Callable[[EvolutionContext], Evolution] | None = None
    standing: Callable[[StandingContext], Architecture] | None = None
    path_search: PathSearch | None = None
    grows: bool = False
