"""Unions of the networks that clients bring: what a run begins with, and what succeeds them where clients bring more.

Of networks of one family that can be joined there is one union, and each is a size of it. A client that comes later
with another network waits for the end of the round: the union is then succeeded by one that has its network, too.
Unions of different families share nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median_low
from typing import TYPE_CHECKING

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Copied, Inheritance, Lineage, Placed
from subfleet.elastic.network import Network
from subfleet.methods.run_networks import BeginContext, Evolution, EvolutionContext, Networks, StandingContext
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.model_state import ModelState

__all__ = ["Succession", "Unions", "place_in_front"]

_MOST_PARAMETERS = 150_000_000
"""Of all unions in use together, 0.6 GB in float32: what clients claim to have takes no more of the server's memory,
which holds a model some five times while it aggregates."""
_MOST_OF_ONE = _MOST_PARAMETERS // 3
"""Of a network that a client brings: one alone leaves room for others."""
_COMPARED = 4
"""Networks of a family that have a median; of fewer none is told to be far larger than the others."""
_MOST_UNIONS = 8
"""In use at once: a round trains and evaluates each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """A union in whose place a larger one steps.

    Attributes:
        parent: the declaration of the union as it was.
        network: that of its successor.
        state: the model of the union as it was.
        stream: for what is drawn.
        seed: of the run, for first weights.
        sizes: of each of the parent's members, by its id as a size of that, what it is as a size of the successor.
    """

    parent: Network
    network: Network
    state: ModelState
    stream: random.Random
    seed: int
    sizes: Mapping[str, Architecture]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unions:
    """How a method joins networks.

    Attributes:
        holds: whether a network can be a client's as a size of a union, beyond that it is one.
        succeed: with what a successor begins, and how that is called.
        most_times: how many times the parameters of the median network of its family a network may have, where what a
            client is given depends on how large the union is; above 1.
    """

    holds: Callable[[Network, Architecture], bool]
    succeed: Callable[[Succession], tuple[Inheritance, ModelState]]
    most_times: float = math.inf

    def networks(self) -> Networks:
        """The networks of a method with clients that declare networks of their own."""
        return Networks(begin=partial(_begin, self), evolve=partial(_evolve, self), standing=_own_network)

    def usual(self, brought: Iterable[AnyFamily], others: Sequence[AnyFamily]) -> Iterator[AnyFamily]:
        """The networks that are not far larger than the median of others of their family."""
        for one in brought:
            sizes = sorted(_parameters(other) for other in others if other.TYPE == one.TYPE)
            if len(sizes) < _COMPARED or _parameters(one) <= self.most_times * median_low(sizes):
                yield one

    def joined(self, members: Sequence[AnyFamily], most_parameters: int = _MOST_PARAMETERS) -> AnyFamily | None:
        """The settings of the union of some networks; None where they have none, or it would be too large."""
        from subfleet.elastic.building import network_of
        from subfleet.elastic.replication import size_in
        from subfleet.elastic.unions import unite_families

        try:
            # Of each by itself first: indices of what a network would share are as long as it is wide.
            if any(_parameters(one) > min(_MOST_OF_ONE, most_parameters) for one in members):
                return None
            config: AnyFamily = unite_families(members)
            if _parameters(config) > most_parameters:
                return None
            network = network_of(config)
            held = all(self.holds(network, size_in(network, network_of(one))) for one in members)
        except ConfigError:
            return None
        return config if held else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Networks that have a union, and the lineage that has had some of them so far."""

    config: AnyFamily
    members: tuple[AnyFamily, ...]
    before: Lineage | None = None

    @property
    def parameters(self) -> int:
        """Of the union."""
        return _parameters(self.config)


def place_in_front(succession: Succession) -> tuple[Inheritance, ModelState]:
    """A successor in which every client's slice is what it was: shared tensors and copies lie in front of every axis.

    Moments of a server optimiser begin anew, as nothing is known of what is new.
    """
    from subfleet.elastic.building import init_state
    from subfleet.elastic.inheriting import embed_weights

    state, network, parent = succession.state, succession.network, succession.parent
    like = next(iter(state.shared.values()))
    first = {name: one.to(like) for name, one in init_state(network, succession.seed).items()}
    copies = {
        key: embed_weights(network, parent, own, {name: first[name] for name in own})
        for key, own in state.copies.items()
    }
    sizes = [succession.sizes[one.architecture_id] for one in state.sizes if one.architecture_id in succession.sizes]
    grown = replace(
        state,
        shared=embed_weights(network, parent, state.shared, first),
        copies=copies,
        moments={},
        kept={},
        sizes=tuple(sorted(sizes)),
        untrained=_still_untrained(succession),
        model=_in_successor(succession),
    )
    return Copied() if network.config == parent.config else Placed(), grown


def _still_untrained(succession: Succession) -> dict[str, Tensor]:
    """What nobody has trained of a successor: what is new in it, and what nobody has trained of its parent."""
    import torch

    from subfleet.elastic.inheriting import embed_weights

    state, network = succession.state, succession.network
    like = next(iter(state.shared.values())).device
    before = {
        name: state.untrained[name] if name in state.untrained else torch.zeros_like(one, dtype=torch.bool)
        for name, one in state.shared.items()
    }
    new = {name: torch.ones(one.shape, dtype=torch.bool, device=like) for name, one in network.tensors.items()}
    return {name: mark for name, mark in embed_weights(network, succession.parent, before, new).items() if mark.any()}


def _in_successor(succession: Succession) -> Architecture | None:
    """What its parent's model is of a successor."""
    from subfleet.elastic.replication import size_in

    model, parent = succession.state.model, succession.parent
    if model is None or model.architecture_id == parent.full_architecture().architecture_id:
        return None if model is None else size_in(succession.network, parent)
    return succession.sizes.get(model.architecture_id)


def _begin(unions: Unions, context: BeginContext) -> tuple[Lineage, ...]:
    brought = tuple(context.brought.values())
    groups = _grouped(unions, (), unions.usual(brought, brought))
    return tuple(_lineage(group, place, 0) for place, group in enumerate(groups, start=1))


def _evolve(unions: Unions, context: EvolutionContext) -> Evolution:
    if not context.brought:
        return Evolution(after=context.after)
    before = [
        _Group(config=one.config, members=one.members, before=one)
        for one in context.lineages
        if one.living and one.members
    ]
    members = tuple(member for group in before for member in group.members)
    groups = [
        group for group in _grouped(unions, before, unions.usual(context.brought, members)) if group not in before
    ]
    born, states = list[Lineage](), dict[str, "ModelState"]()
    for place, group in enumerate(groups, start=len(context.lineages)):
        lineage = _lineage(group, place, context.round)
        if group.before is not None:
            how, states[lineage.id] = unions.succeed(_succession(context, group.before, lineage))
            lineage = replace(lineage, parent=group.before.id, map=how)
        born.append(lineage)
    retired = tuple(group.before.id for group in groups if group.before is not None)
    return Evolution(after=context.after, born=tuple(born), states=states, retired=retired)


@lru_cache(maxsize=2**10)
def _parameters(config: AnyFamily) -> int:
    from subfleet.elastic.building import network_of

    network = network_of(config)
    return network.parameter_count(network.full_architecture())


def _grouped(unions: Unions, groups: Sequence[_Group], brought: Iterable[AnyFamily]) -> list[_Group]:
    """The groups with networks added: each to the first that it can be joined with, and else to one of its own."""
    found = list(groups)
    new = [one for one in dict.fromkeys(brought) if not any(one in group.members for group in found)]
    for kind in dict.fromkeys(one.TYPE for one in new):
        # Mostly all of a family go together, which is found at once.
        together = tuple(one for one in new if kind == one.TYPE)
        if not _added(unions, found, together):
            for family in sorted(together, key=_parameters):  # a large one takes no room from the others
                _added(unions, found, (family,))
    return found


def _added(unions: Unions, groups: list[_Group], families: tuple[AnyFamily, ...]) -> bool:
    """Add networks of one family to the first group that they can be joined with, or to one of their own."""
    left = _MOST_PARAMETERS - sum(group.parameters for group in groups)
    left -= left // 2 ** len(families)  # each takes half of the room at most, so that some is left for whoever comes
    for place, group in enumerate(groups):
        if group.config.TYPE != families[0].TYPE:
            continue
        config = unions.joined((*group.members, *families), left + group.parameters)
        if config is not None:
            groups[place] = replace(group, config=config, members=(*group.members, *families))
            return True
    config = unions.joined(families, left) if len(groups) < _MOST_UNIONS else None
    if config is not None:
        groups.append(_Group(config=config, members=families))
    return config is not None


def _lineage(group: _Group, place: int, born_round: int) -> Lineage:
    more = len(group.members) - (0 if group.before is None else len(group.before.members))
    added = "networks" if group.before is None else "more networks"
    return Lineage(
        id=f"union{place}",
        config=group.config,
        born_round=born_round,
        reason=f"clients bring {more} {added if more > 1 else added[:-1]} of family {group.config.TYPE}",
        members=group.members,
    )


def _succession(context: EvolutionContext, before: Lineage, lineage: Lineage) -> Succession:
    from subfleet.elastic.building import network_of
    from subfleet.elastic.replication import size_in

    parent, network = context.networks[before.id], replace(network_of(lineage.config), id=lineage.id)
    own = [network_of(one) for one in before.members]
    return Succession(
        parent=parent,
        network=network,
        state=context.after.of(before.id),
        stream=context.stream(f"succession/{lineage.id}"),
        seed=context.seed,
        sizes={size_in(parent, one).architecture_id: size_in(network, one) for one in own},
    )


def _own_network(context: StandingContext) -> Architecture:
    """A client's own network, of the union that has it context."""
    return context.declared or context.client.architecture
