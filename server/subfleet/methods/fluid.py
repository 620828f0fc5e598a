"""FLuID: the slowest clients leave out the neurons that hardly change.

Wang et al., "FLuID: Mitigating Stragglers in Federated Learning using Invariant Dropout", NeurIPS 2023, section 4.
What the paper leaves open is a parameter, with the value of its authors' public code.

Client half: train the given submodel with the given objective.
Server half: a neuron is an index of an axis with all weights that are tied to it, or a group of an axis that keeps
whole groups. It is invariant if no weight of it changed by more than a threshold, relative to the weight, at enough of
the clients that trained the whole model. The slowest clients leave out invariant neurons, first the ones that they left
out in the round before, then others at random; how many depends on how much slower they are than the rest. The
threshold of an axis is the smallest change of a neuron in the first rounds, and grows until enough neurons are
invariant. A mean by samples over the clients that hold an element.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from subfleet.elastic.axes import Axis
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.methods.aggregator import ClientUpdate, Tensor
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, Draw, assign_largest
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.oort import EXPECTED, Durations, duration_s
from subfleet.methods.roles import ClosedRound, Memory, Roles, RoundUpdates
from subfleet.methods.selector import Selection, SelectionContext, Selector, select_at_random
from subfleet.methods.sizes import keep_groups, list_widths, place_axes
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Amount, Positive, PositiveFraction
from subfleet.protocol.submodel import Architecture, Explicit, Prefix

_FRACTIONS: tuple[tuple[float, float], ...] = ((0.9, 0.95), (0.8, 0.85), (0.7, 0.75), (0.6, 0.65), (0.0, 0.5))
"""From the duration of the slowest other client over a straggler's, the fraction of neurons that this one keeps."""
_LARGEST_CHANGE = 1e9
"""Stands for any change of a weight that was 0, because plain data cannot hold infinity."""
Changes = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidMemory:
    """The memory of FLuID.

    Attributes:
        whole_s: by client, its duration in a round when it last trained the whole model.
        shares: by straggler of the open round, the fraction of each axis that it keeps.
        changes: by axis, the smallest threshold with which each neuron was invariant in the last round.
        thresholds: by axis, the current threshold.
        shared_indices: by axis, the indices that all stragglers of the last round had; empty without stragglers.
    """

    whole_s: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    changes: Changes = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    shared_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FLuID:
    """Parameters of FLuID.

    Attributes:
        stragglers: how many of a round's clients are stragglers, 1 or more; one in the authors' code.
        agreeing: fraction of the clients with the whole model at which a neuron must be invariant, above 0 and at most
            1.
        growing_from: the round from which thresholds grow in every second round, while too few neurons are invariant.
        increment: by how much they grow, 0 or more; 0.2 for images in the authors' code.
        durations: as in Oort, see `subfleet.methods.oort.Durations`.
    """

    TYPE: ClassVar[str] = "fluid"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FLuID",
        paper="Wang et al., FLuID: Mitigating Stragglers in Federated Learning using Invariant Dropout, NeurIPS 2023",
        varies=("width",),
        departures={
            "a client without room for the whole model trains a submodel, like a straggler": always,
            "channels of a norm group are left out together": lambda method, setting: setting.norm == "group",
        },
    )
    stragglers: Positive = 1
    agreeing: PositiveFraction = 0.75
    growing_from: Positive = 10
    increment: Amount = 0.2
    durations: Durations = parameter("measured", otherwise=EXPECTED)

    def roles(self) -> Roles:
        """Invariant dropout."""
        return Roles(
            selector=Selector(select=self._select),
            memory=Memory(initial=FluidMemory(), observe=self._observe, remember=self._remember),
            assigner=Assigner(space=_list_sizes, assign=_assign, place=_place),
        )

    def _select(self, context: SelectionContext) -> Selection:
        memory: FluidMemory = context.memory
        selected = select_at_random(context).clients
        trained = [client for client in context.clients if client.past is not None and not client.past.size.axes]
        whole_s = {**memory.whole_s, **{client.client_id: duration_s(client, self.durations) for client in trained}}
        known = sorted(
            (name for name in selected if whole_s.get(name, 0.0) > 0), key=lambda name: (-whole_s[name], name)
        )
        slow, others = known[: self.stragglers], known[self.stragglers :]
        shares = {
            name: next(fraction for least, fraction in _FRACTIONS if whole_s[others[0]] / whole_s[name] >= least)
            for name in (slow if others else ())
        }
        return Selection(clients=selected, memory=replace(memory, whole_s=whole_s, shares=shares))

    def _observe(self, updates: RoundUpdates) -> Changes:
        """By axis, the smallest threshold with which each neuron is invariant at enough clients."""
        import torch

        whole = [update for update in updates.clients if not update.client.size.axes]
        if not whole:
            return {}
        enough = math.ceil(self.agreeing * len(whole))
        by_client = [_find_largest_changes(updates.networks[update.client.size.network], update) for update in whole]
        stacks = {name: torch.stack([changes[name] for changes in by_client]) for name in by_client[0]}
        return {name: tuple(stack.kthvalue(enough, dim=0).values.tolist()) for name, stack in stacks.items()}

    def _remember(self, memory: FluidMemory, closed: ClosedRound) -> FluidMemory:
        changes: Changes = closed.observation or memory.changes
        slow = [update.architecture for name, update in sorted(closed.clients.items()) if name in memory.shares]
        return FluidMemory(
            whole_s=memory.whole_s,
            changes=changes,
            thresholds={name: self._adapt(memory, name, neurons, closed.round) for name, neurons in changes.items()},
            shared_indices=_intersect(slow),
        )

    def _adapt(self, memory: FluidMemory, axis: str, changes: Sequence[float], round_number: int) -> float:
        """The threshold of an axis after a round."""
        smallest, before = min(changes), memory.thresholds.get(axis)
        if before is None or round_number <= 2:
            return smallest
        if round_number == 3:
            return (before + smallest) / 2
        fraction = min(memory.shares.values(), default=1.0)
        needed = len(changes) - math.ceil(fraction * len(changes))
        few = sum(change <= before for change in changes) < needed
        grows = few and round_number >= self.growing_from and (round_number - self.growing_from) % 2 == 0
        return before + self.increment if grows else before


def _list_sizes(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """The widths of stragglers; configured rates below them are for clients that cannot carry these."""
    widths = {fraction for _, fraction in _FRACTIONS} | {1.0} | {rate for rate in rates if rate < _FRACTIONS[-1][1]}
    return list_widths(network, sorted(widths))


def _assign(context: AssignmentContext) -> Assignment:
    """Assign the whole model, or the width that a straggler's pace allows; if it does not fit, the largest below it."""
    fraction = context.draw.memory.shares.get(context.draw.client_id, 1.0)
    most = context.estimate(list_widths(context.networks[""], (fraction,))[-1]).order
    # Two rates that are rounded to the same size give it different names, so equal sizes compare by "not larger".
    candidates = tuple(candidate for candidate in context.candidates if not most < candidate.order)
    return assign_largest(replace(context, candidates=candidates))


def _place(network: Network, size: Architecture, draw: Draw) -> Architecture:
    """Leave out invariant neurons, as far as there are enough of them."""
    memory: FluidMemory = draw.memory

    def choose(axis: Axis, prefix: Prefix) -> Explicit:
        step = axis.granularity
        neurons = [*range(axis.size // step)]
        draw.stream(f"axis {axis.name}").shuffle(neurons)
        changes = memory.changes.get(axis.name, ())
        threshold, before = memory.thresholds.get(axis.name, -1.0), memory.shared_indices.get(axis.name)
        invariant = {neuron for neuron, change in enumerate(changes) if change <= threshold}
        neurons.sort(key=lambda neuron: (neuron not in invariant, before is None or neuron * step in before))
        return keep_groups(axis, neurons[len(neurons) - prefix.size // step :])

    return place_axes(network, size, choose)


def _intersect(architectures: Sequence[Architecture]) -> dict[str, tuple[int, ...]]:
    """By narrowed axis, the indices that all of these submodels keep."""
    common: dict[str, set[int]] = {}
    for architecture in architectures:
        for name, kept in architecture.axes:
            if isinstance(kept, Explicit):
                common[name] = common.get(name, set(kept.indices)) & set(kept.indices)
    return {name: tuple(sorted(indices)) for name, indices in sorted(common.items())}


def _find_largest_changes(network: Network, update: ClientUpdate) -> "dict[str, Tensor]":
    """The largest relative change of a weight of each neuron, for every axis that may be narrowed."""
    import torch

    from subfleet.elastic.maps import reduce_to_axes

    axes = {name: axis for name, axis in network.axes.items() if axis.kind not in ("class", "kernel")}
    largest = {name: torch.zeros(axis.size, dtype=torch.float64) for name, axis in axes.items()}
    for name, change in update.change.items():
        decl = network.tensors[name]
        if decl.role in BUFFER_ROLES:
            continue
        old = update.received[name].double().abs().cpu()
        relative = (change.double().abs().cpu() / old).nan_to_num(nan=0.0, posinf=_LARGEST_CHANGE)
        relative = relative.clamp(max=_LARGEST_CHANGE)
        for axis, own in reduce_to_axes(network, decl, relative, partial(torch.amax, dim=1)):
            if axis in largest:
                largest[axis] = torch.maximum(largest[axis], own)
    return {name: changes.reshape(-1, axes[name].granularity).amax(dim=1) for name, changes in largest.items()}
