"""The networks of a method: what a run begins with, and what appears and retires between rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import ClientUpdate, Participant
from subfleet.methods.assigner import stream_of
from subfleet.methods.path_search import PathSearch
from subfleet.protocol.submodel import Architecture

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from subfleet.elastic.model_state import ModelState

__all__ = ["BeginContext", "Evolution", "EvolutionContext", "Networks", "StandingContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginContext:
    """A run whose first clients have told what they can give, before any of them is given anything.

    Attributes:
        network: that the configuration describes.
        rates: width rates of its search space.
        clients: the ids of those that can take part, in order.
        brought: of these by their ids, the networks of their own that they have declared.
        carried_by: as in `EvolutionContext`, of these; a client that replays a log goes by what that has but for
            a fraction of the time, where `Assigner.lasting` asks for it.
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
        networks: by id, those that the round was played with.
        before: the model that the round started from.
        after: the model with all updates aggregated in, each in its network.
        clients: whose updates were aggregated.
        losses: of these by their ids: mean over the labels of the last epoch that each trained.
        carried_by: the ids of those of these whose budget in this round has room for the largest size of a network, as
            shapes tell what that takes.
        trained: gives what they trained, in the order of their ids; it needs the memory of all updates.
        aggregated_with: a network's id and the ids of some clients to its state with the updates of these alone,
            aggregated as all are.
        brought: networks that clients have declared and that no network in use has among its members.
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
    trained: Callable[[], tuple[ClientUpdate, ...]]
    aggregated_with: Callable[[str, Collection[str]], ModelState]
    brought: tuple[AnyFamily, ...] = ()
    observation: Any = None
    memory: Any = None

    def stream(self, purpose: str) -> random.Random:
        """A stream of random numbers of its own for each purpose."""
        return stream_of(f"{self.seed}/{self.round}/evolving/{purpose}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolution:
    """What becomes of the networks.

    Attributes:
        after: the aggregated model, changed as the method will have it; networks neither appear nor retire in it.
        born: networks that appear: their ids were never used in the run, their parents were in use in the round, and
            what they take and answer is what the run's first network does. Each begins with what its `map` makes of
            its parent's weights in `after`.
        states: by id, in place of that with what networks that appear begin.
        retired: ids of networks that retire. At least one is in use afterwards.
        observation: what `Memory.remember` is given in place of what `Memory.observe` returned; None leaves it that.
    """

    after: ModelState
    born: tuple[Lineage, ...] = ()
    states: Mapping[str, ModelState] = field(default_factory=lambda: MappingProxyType({}))
    retired: tuple[str, ...] = ()
    observation: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingContext:
    """A client that trains nothing: which network's submodel is its own, that it evaluates and is left with?

    Attributes:
        seed: of the run.
        client: with what it trained last, of a network that may have retired.
        networks: those that are in use, by id; of two or more that the run has had.
        ready: whether it may have a size: the program that trains that counts in the round, and all that it takes is
            within what the client had to give when it trained last. What it trained then is ready as long as its
            network is in use.
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
class Networks:
    """Which networks a run has. By default it has the configured one throughout.

    Attributes:
        begin: the networks that the run begins with, in place of the configured one: with ids, and first weights that
            are drawn; an empty tuple leaves the configured one. It is called beside the server's loop, before the first
            round's clients are chosen.
        evolve: networks that appear and retire after a round, called beside the loop. `Assigner.assign` then has the
            submodels of all networks in use to choose from, each with its network's id; all else is done for each
            network apart. None has one network throughout.
        standing: where a run has had several networks, the submodel of one in use that is a client's own while it
            trains nothing. With None it is what it trained last, and a client whose network has retired counts as one
            that has not taken part yet.
        path_search: between two rounds, for paths of a supernet that become networks of the run; None searches none.
    """

    begin: Callable[[BeginContext], tuple[Lineage, ...]] | None = None
    evolve: Callable[[EvolutionContext], Evolution] | None = None
    standing: Callable[[StandingContext], Architecture] | None = None
    path_search: PathSearch | None = None
