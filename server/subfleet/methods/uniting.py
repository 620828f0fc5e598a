"""Unions of the networks that clients bring: the first unions of a run, and their successors.

Networks of one family that can be joined have one union, and each is a size of it. A client that joins later with
another network waits for the end of the round, when a larger union that includes its network succeeds the present one.
Unions of different families share nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median_low

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Copied, Inheritance, Lineage, Placed
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import ModelState, Tensor
from subfleet.methods.run_networks import BeginContext, Evolution, EvolutionContext, Networks
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

_MOST_PARAMETERS = 150_000_000
"""Of all unions in use, 0.6 GB in float32: a limit on the memory that clients' claims can take on the server, which
holds a model some five times while it aggregates."""
_MOST_OF_ONE = _MOST_PARAMETERS // 3
"""Of one client's network, so that there is room for others."""
_COMPARED = 4
"""Networks of a family from which their median counts; among fewer, none is too large."""
_MOST_UNIONS = 8
"""In use at the same time: a round trains and evaluates each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """A union that a larger one succeeds.

    Attributes:
        parent: the declaration of the union before.
        network: the declaration of its successor.
        state: the model of the union before.
        stream: for random choices.
        first: the first weights of the successor, on the device of `state`.
        sizes: by id of each member as a size of the parent, the member as a size of the successor.
    """

    parent: Network
    network: Network
    state: ModelState
    stream: random.Random
    first: Mapping[str, Tensor]
    sizes: Mapping[str, Architecture]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unions:
    """How a method joins networks.

    Attributes:
        holds: whether a size of a union can be a client's network.
        succeed: the first state of a successor, and the map that describes it.
        most_times: the most parameters of a network, as a multiple of its family's median, if a client's costs depend
            on the size of the union; above 1.
    """

    holds: Callable[[Network, Architecture], bool]
    succeed: Callable[[Succession], tuple[Inheritance, ModelState]]
    most_times: float = math.inf

    def networks(self) -> Networks:
        """The role of a method with clients that declare networks of their own."""
        return Networks(
            begin=self._begin,
            evolve=self._evolve,
            standing=lambda context: context.declared or context.client.architecture,  # as a size of its union
        )

    def filter_usual(self, brought: Iterable[AnyFamily], others: Sequence[AnyFamily]) -> Iterator[AnyFamily]:
        """The networks that are not far larger than the median of others of their family."""
        for family in brought:
            sizes = sorted(_count_parameters(other) for other in others if other.TYPE == family.TYPE)
            if len(sizes) < _COMPARED or _count_parameters(family) <= self.most_times * median_low(sizes):
                yield family

    def join(self, members: Sequence[AnyFamily], most_parameters: int = _MOST_PARAMETERS) -> AnyFamily | None:
        """The settings of the union of some networks; None if they have no union, or it would be too large."""
        from subfleet.elastic.building import network_of
        from subfleet.elastic.replication import size_in
        from subfleet.elastic.unions import unite_families

        try:
            # Each network first: recording a network takes memory and time in proportion to its size.
            if any(_count_parameters(member) > min(_MOST_OF_ONE, most_parameters) for member in members):
                return None
            config: AnyFamily = unite_families(members)
            if _count_parameters(config) > most_parameters:
                return None
            network = network_of(config)
            held = all(self.holds(network, size_in(network, network_of(member))) for member in members)
        except ConfigError:
            return None
        return config if held else None

    def add_to(self, groups: Sequence[MemberGroup], brought: Iterable[AnyFamily]) -> list[MemberGroup]:
        """Add networks to groups: each to the first that it can be joined with, else to a new one."""
        after = list(groups)
        new = [family for family in dict.fromkeys(brought) if not any(family in group.members for group in after)]
        for kind in dict.fromkeys(family.TYPE for family in new):
            # Usually all networks of a family can be joined, so try that first.
            together = tuple(family for family in new if kind == family.TYPE)
            if not self._add(after, together):
                # Small ones first, as large ones leave less room.
                for family in sorted(together, key=_count_parameters):
                    self._add(after, (family,))
        return after

    def _begin(self, context: BeginContext) -> tuple[Lineage, ...]:
        brought = tuple(context.brought.values())
        groups = self.add_to((), self.filter_usual(brought, brought))
        return tuple(_build_lineage(group, number, 0) for number, group in enumerate(groups, start=1))

    def _evolve(self, context: EvolutionContext) -> Evolution:
        if not context.brought:
            return Evolution(after=context.after)
        before = [
            MemberGroup(config=lineage.config, members=lineage.members, before=lineage)
            for lineage in context.lineages
            if lineage.living and lineage.members
        ]
        members = tuple(member for group in before for member in group.members)
        after = self.add_to(before, self.filter_usual(context.brought, members))
        groups = [group for group in after if group not in before]
        born, states = list[Lineage](), dict[str, ModelState]()
        for number, group in enumerate(groups, start=len(context.lineages)):
            lineage = _build_lineage(group, number, context.round)
            if group.before is not None:
                how, states[lineage.id] = self.succeed(_build_succession(context, group.before, lineage))
                lineage = replace(lineage, parent=group.before.id, map=how)
            born.append(lineage)
        retired = tuple(group.before.id for group in groups if group.before is not None)
        return Evolution(after=context.after, born=tuple(born), states=states, retired=retired)

    def _add(self, groups: list[MemberGroup], families: tuple[AnyFamily, ...]) -> bool:
        """Add networks of one family to the first group that they can be joined with, or to a new one."""
        left = _MOST_PARAMETERS - sum(_count_parameters(group.config) for group in groups)
        left -= left // 2 ** len(families)  # each takes at most half of the room, which leaves some for later ones
        for index, group in enumerate(groups):
            if group.members[0].TYPE != families[0].TYPE:
                continue
            config = self.join((*group.members, *families), left + _count_parameters(group.config))
            if config is not None:
                groups[index] = replace(group, config=config, members=(*group.members, *families))
                return True
        config = self.join(families, left) if len(groups) < _MOST_UNIONS else None
        if config is not None:
            groups.append(MemberGroup(config=config, members=families))
        return config is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGroup:
    """Networks with a common union, and the lineage of the union that some of them have now."""

    config: AnyFamily
    members: tuple[AnyFamily, ...]
    before: Lineage | None = None


def place_in_front(succession: Succession) -> tuple[Inheritance, ModelState]:
    """Make a successor that keeps every client's slice: the parent's tensors and copies lie in front of every axis.

    Moments of a server optimiser start again, as there are none for new elements.
    """
    from subfleet.elastic.inheriting import embed_weights

    state, network, parent = succession.state, succession.network, succession.parent
    first = succession.first
    copies = {
        key: embed_weights(network, parent, own, {name: first[name] for name in own})
        for key, own in state.copies.items()
    }
    sizes = [succession.sizes[size.architecture_id] for size in state.sizes if size.architecture_id in succession.sizes]
    grown = replace(
        state,
        shared=embed_weights(network, parent, state.shared, first),
        copies=copies,
        moments={},
        kept={},
        sizes=tuple(sorted(sizes)),
        untrained=_mark_untrained(succession),
        model=_find_model(succession),
    )
    return Copied() if network.config == parent.config else Placed(), grown


def _mark_untrained(succession: Succession) -> dict[str, Tensor]:
    """The untrained elements of a successor: new ones, and elements that were untrained in its parent."""
    import torch

    from subfleet.elastic.inheriting import embed_weights

    state, network = succession.state, succession.network
    like = next(iter(state.shared.values())).device
    before = {
        name: state.untrained[name] if name in state.untrained else torch.zeros_like(tensor, dtype=torch.bool)
        for name, tensor in state.shared.items()
    }
    new = {name: torch.ones(decl.shape, dtype=torch.bool, device=like) for name, decl in network.tensors.items()}
    return {name: mark for name, mark in embed_weights(network, succession.parent, before, new).items() if mark.any()}


def _find_model(succession: Succession) -> Architecture | None:
    """The model of the parent as a size of the successor."""
    from subfleet.elastic.replication import size_in

    model, parent = succession.state.model, succession.parent
    if model is None or model.architecture_id == parent.full_architecture().architecture_id:
        return None if model is None else size_in(succession.network, parent)
    return succession.sizes.get(model.architecture_id)


@lru_cache(maxsize=2**10)
def _count_parameters(config: AnyFamily) -> int:
    from subfleet.elastic.building import count_parameters

    return count_parameters(config)


def _build_lineage(group: MemberGroup, number: int, born_round: int) -> Lineage:
    more = len(group.members) - (0 if group.before is None else len(group.before.members))
    added = "networks" if group.before is None else "more networks"
    return Lineage(
        id=f"union{number}",
        config=group.config,
        born_round=born_round,
        reason=f"clients bring {more} {added if more > 1 else added[:-1]} of family {group.members[0].TYPE}",
        members=group.members,
    )


def _build_succession(context: EvolutionContext, before: Lineage, lineage: Lineage) -> Succession:
    from subfleet.elastic.building import init_state, network_of
    from subfleet.elastic.replication import size_in

    parent, network = context.networks[before.id], replace(network_of(lineage.config), id=lineage.id)
    own, state = [network_of(member) for member in before.members], context.after.of(before.id)
    like = next(iter(state.shared.values()))
    return Succession(
        parent=parent,
        network=network,
        state=state,
        stream=context.stream(f"succession/{lineage.id}"),
        first={name: tensor.to(like) for name, tensor in init_state(network, context.seed).items()},
        sizes={size_in(parent, member).architecture_id: size_in(network, member) for member in own},
    )
