"""FLuID: the slowest clients leave out the neurons that hardly change.

Wang et al., "FLuID: Mitigating Stragglers in Federated Learning using Invariant Dropout", NeurIPS 2023, section 4.
Where the paper leaves something open, what its authors' public code does is a parameter.

Client half: train the given submodel with the given objective.
Server half: a neuron is an index of an axis with all weights that are tied to it, or a group of an axis that keeps
whole groups. It is invariant where no weight of it changed by more than a threshold of itself, at enough of the clients
that trained the whole model. The slowest clients leave out invariant neurons, those first that they left out in the
round before, then others at random; how many follows from how much slower they are than the rest. The threshold of an
axis is the smallest change of a neuron in the first rounds, and grows until enough are invariant. A mean by samples
over the clients that hold an element.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from subfleet.elastic.axes import Axis, factors_of
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.methods.aggregator import ClientUpdate
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, Draw
from subfleet.methods.describing import MethodInfo, Setting, those_true
from subfleet.methods.oort import MEASURED, Durations, duration_s
from subfleet.methods.roles import ClosedRound, Memory, Roles, RoundUpdates
from subfleet.methods.selector import Selection, SelectionContext, Selector, at_random
from subfleet.methods.sizes import whole_depth
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Amount, Positive, PositiveFraction
from subfleet.protocol.submodel import Architecture, Explicit, IndexSet, Prefix

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FLuID", "FluidMemory"]

_SHARES: tuple[tuple[float, float], ...] = ((0.9, 0.95), (0.8, 0.85), (0.7, 0.75), (0.6, 0.65), (0.0, 0.5))
"""Of a straggler, how long the slowest of the others takes as a fraction of its time, to the fraction of neurons it
keeps."""
_LARGEST_CHANGE = 1e9
"""Stands for any change of a weight that was 0: plain data hold no infinity."""
Changes = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidMemory:
    """What FLuID remembers.

    Attributes:
        whole_s: by client, how long a round took it when it last trained the whole model.
        shares: by straggler of the open round, the fraction of each axis that it keeps.
        changes: by axis, the smallest threshold with which each neuron was invariant in the last round.
        thresholds: by axis, as they are now.
        kept: by axis, the indices that all stragglers of the last round had; nothing where there were none.
    """

    whole_s: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    changes: Changes = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FLuID:
    """Parameters of FLuID.

    Attributes:
        stragglers: how many of a round's clients are, 1 or more; the authors' code takes the slowest one.
        agreeing: fraction of the clients with the whole model at which a neuron must be invariant, above 0 and at most
            1.
        growing_from: the round from which on thresholds grow in every second round, where too few are invariant.
        increment: by which they grow, 0 or more; the authors' code takes 0.2 for images.
        durations: as in Oort, see `subfleet.methods.oort.Durations`.
    """

    TYPE: ClassVar[str] = "fluid"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FLuID",
        paper="Wang et al., FLuID: Mitigating Stragglers in Federated Learning using Invariant Dropout, NeurIPS 2023",
        varies=("width",),
        published={
            "stragglers": None,
            "agreeing": None,
            "growing_from": None,
            "increment": None,
            "durations": MEASURED,
        },
    )
    stragglers: Positive = 1
    agreeing: PositiveFraction = 0.75
    growing_from: Positive = 10
    increment: Amount = 0.2
    durations: Durations = "measured"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return (
            "a client without room for the whole model trains a submodel, like a straggler",
            *those_true({"channels of a norm group are left out together": setting.norm == "group"}),
        )

    def roles(self) -> Roles:
        """Invariant dropout."""
        return Roles(
            selector=Selector(select=self._select),
            memory=Memory(initial=FluidMemory(), observe=self._observe, remember=self._remember),
            assigner=Assigner(space=_space, assign=_assign, place=_place),
        )

    def _select(self, context: SelectionContext) -> Selection:
        memory: FluidMemory = context.memory
        chosen = at_random(context).clients
        trained = [one for one in context.clients if one.past is not None and not one.past.size.axes]
        whole_s = {**memory.whole_s, **{one.client_id: duration_s(one, self.durations) for one in trained}}
        known = sorted((name for name in chosen if whole_s.get(name, 0.0) > 0), key=lambda name: (-whole_s[name], name))
        slow, others = known[: self.stragglers], known[self.stragglers :]
        shares = {name: _share(whole_s[others[0]] / whole_s[name]) for name in slow} if others else {}
        return Selection(clients=chosen, memory=replace(memory, whole_s=whole_s, shares=shares))

    def _observe(self, updates: RoundUpdates) -> Changes:
        """By axis, the smallest threshold with which each neuron is invariant at enough of those with everything."""
        import torch

        whole = [client for client in updates.clients if not client.client.size.axes]
        if not whole:
            return {}
        enough = math.ceil(self.agreeing * len(whole))
        of_each = [_largest_changes(updates.networks[client.client.size.network], client) for client in whole]
        found = {}
        for name in of_each[0]:
            each = torch.stack([one[name] for one in of_each])
            found[name] = tuple(float(one) for one in each.kthvalue(enough, dim=0).values)
        return found

    def _remember(self, memory: Any, closed: ClosedRound) -> FluidMemory:
        known: FluidMemory = memory
        changes: Changes = closed.observation or known.changes
        slow = [one.architecture for name, one in sorted(closed.clients.items()) if name in known.shares]
        return FluidMemory(
            whole_s=known.whole_s,
            changes=changes,
            thresholds={name: self._threshold(known, name, found, closed.round) for name, found in changes.items()},
            kept=_common(slow),
        )

    def _threshold(self, known: FluidMemory, axis: str, changes: Sequence[float], round_number: int) -> float:
        smallest, before = min(changes), known.thresholds.get(axis)
        if before is None or round_number <= 2:
            return smallest
        if round_number == 3:
            return (before + smallest) / 2
        share = min(known.shares.values(), default=1.0)
        wanted = len(changes) - math.ceil(share * len(changes))
        few = sum(change <= before for change in changes) < wanted
        grows = few and round_number >= self.growing_from and (round_number - self.growing_from) % 2 == 0
        return before + self.increment if grows else before


def _share(pace: float) -> float:
    return next(share for least, share in _SHARES if pace >= least)


def _space(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """The widths that stragglers may have; a configuration's rates below them are for those who carry less."""
    kept = {share for _, share in _SHARES} | {1.0} | {rate for rate in rates if rate < _SHARES[-1][1]}
    return whole_depth(network, sorted(kept))


def _assign(context: AssignmentContext) -> Assignment:
    """The whole model, or of a straggler what its pace allows; the largest below that where it does not fit."""
    share = context.draw.memory.shares.get(context.draw.client_id, 1.0)
    most = context.estimate(whole_depth(context.networks[""], (share,))[-1]).order
    # A rate that is rounded to the size of another gives it another name; submodels have no order but "before".
    fits = (one for one in reversed(context.candidates) if not most < one.order and context.allows(one))
    return Assignment(candidate=next(fits, None))


def _place(network: Network, size: Architecture, draw: Draw) -> Architecture:
    """The size without invariant neurons, as far as there are enough of them."""
    return replace(size, axes=tuple((name, _kept(network.axes[name], kept, draw)) for name, kept in size.axes))


def _kept(axis: Axis, kept: IndexSet, draw: Draw) -> IndexSet:
    if not isinstance(kept, Prefix):
        return kept
    memory: FluidMemory = draw.memory
    step, stream = axis.granularity, draw.stream(f"axis {axis.name}")
    neurons = [*range(axis.size // step)]
    stream.shuffle(neurons)
    changes = memory.changes.get(axis.name, ())
    threshold, before = memory.thresholds.get(axis.name, -1.0), memory.kept.get(axis.name)
    invariant = {place for place, change in enumerate(changes) if change <= threshold}
    neurons.sort(key=lambda one: (one not in invariant, before is None or one * step in before))
    stays = sorted(neurons[len(neurons) - kept.size // step :])
    return Explicit(indices=tuple(one * step + place for one in stays for place in range(step)))


def _common(architectures: Sequence[Architecture]) -> dict[str, tuple[int, ...]]:
    """By axis, the indices that all of these submodels keep, of those that they cut."""
    found: dict[str, set[int]] = {}
    for architecture in architectures:
        for name, kept in architecture.axes:
            if isinstance(kept, Explicit):
                found[name] = found.get(name, set(kept.indices)) & set(kept.indices)
    return {name: tuple(sorted(kept)) for name, kept in sorted(found.items())}


def _largest_changes(network: Network, client: ClientUpdate) -> "dict[str, Tensor]":
    """Of each neuron of every axis that may be cut, the largest change of a weight as a fraction of it."""
    import torch

    axes = {name: axis for name, axis in network.axes.items() if axis.kind not in ("class", "kernel")}
    found = {name: torch.zeros(axis.size, dtype=torch.float64) for name, axis in axes.items()}
    for name, change in client.change.items():
        decl = network.tensors[name]
        if decl.role in BUFFER_ROLES:
            continue
        old = client.received[name].double().abs().cpu()
        share = (change.double().abs().cpu() / old).nan_to_num(nan=0.0, posinf=_LARGEST_CHANGE)
        dims = zip(decl.axes, decl.shape, strict=True)
        factors = [factor for dim, size in dims for factor in factors_of(dim, size)]
        shape = [factor if isinstance(factor, int) else network.axes[factor].size for factor in factors]
        share = share.clamp(max=_LARGEST_CHANGE).reshape(shape)
        for place, factor in enumerate(factors):
            if factor in found:
                largest = share.movedim(place, 0).reshape(shape[place], -1).amax(dim=1)
                found[str(factor)] = torch.maximum(found[str(factor)], largest)
    return {name: one.reshape(-1, axes[name].granularity).amax(dim=1) for name, one in found.items()}
