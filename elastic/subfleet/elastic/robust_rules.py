"""Robust means over the clients that share an element, computed from all updates side by side.

Updates are read tensor by tensor, so memory is that of the largest tensor of each client, not of whole models. The
result does not depend on the order of clients, except for ties that multi-Krum breaks. The settings are in
`subfleet.elastic.robust_aggregation`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.robust_aggregation import (
    AnyRobustAggregation,
    CoordinateMedian,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.submodel import Architecture

ReadChanges = Callable[[str], Sequence[Tensor | None]]
"""Returns every member's change of a tensor, in the order of the members; None if its submodel lacks the tensor."""

_CHUNK = 2**16
"""Elements that are reduced at once, to bound the memory beside the stack."""

_Reduce = Callable[[Tensor, Tensor], Tensor]
"""One float64 value for each element, from values in ascending order along the clients and the number that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How the change of an element is computed.

    Attributes:
        reduce: computes the change if enough clients share an element; None always takes the weighted mean.
        least_clients: clients that are enough.
        stay: with fewer clients the element stays as it is instead of taking the weighted mean.
    """

    reduce: _Reduce | None = None
    least_clients: int = 1
    stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMember:
    """A client of the round.

    Attributes:
        architecture: the submodel that it trained.
        weight: its weight in a mean, above 0.
        counted: by tensor name, a bool mask of the elements that count as held; it broadcasts against the local tensor,
            such as (classes, 1) for the rows of a head. All elements of unnamed tensors count.
    """

    architecture: Architecture
    weight: float
    counted: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def mask(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """int8 of this shape: 1 where the local tensor counts, else 0."""
        ones = torch.ones(shape, dtype=torch.int8, device=device)
        return ones * self.counted[name].to(device) if name in self.counted else ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The updates of a round.

    Attributes:
        network: the network.
        state: the model that the round started from, or some of its tensors; only these are aggregated.
        members: the clients, sorted by their ids.
        read: reads their changes; it may be called several times for a tensor.
    """

    network: Network
    state: Mapping[str, Tensor]
    members: Sequence[StackMember]
    read: ReadChanges

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Yield for each tensor its name, values and held mask (holders, elements), and the weights of the holders.

        Raises:
            ProtocolError: a change has another shape than its submodel's tensor, or is not finite.
        """
        network = self.network
        architectures = [member.architecture for member in self.members]
        local = [(tensor_maps(network, architecture), network.shapes(architecture)) for architecture in architectures]
        for name in self.state:
            shape = network.tensors[name].shape
            updates = zip(self.members, local, self.read(name), strict=True)
            holders = [
                (member, maps, shapes, change) for member, (maps, shapes), change in updates if change is not None
            ]
            device = holders[0][3].device if holders else torch.device("cpu")
            values = torch.zeros((len(holders), *shape), device=device)
            held = torch.zeros((len(holders), *shape), dtype=torch.int8, device=device)
            for row, (member, maps, shapes, change) in enumerate(holders):
                if name not in maps or tuple(change.shape) != shapes[name] or not bool(torch.isfinite(change).all()):
                    raise ProtocolError(
                        f"tensor {name!r} of an update has the shape {tuple(change.shape)}, but must be finite and "
                        f"have the shape {shapes.get(name)} of its submodel"
                    )
                maps[name].scatter(change, values[row])
                maps[name].scatter(member.mask(name, shapes[name], device), held[row])
            weights = torch.tensor([member.weight for member, *_ in holders], dtype=torch.float64, device=device)
            flat = (len(holders), math.prod(shape))
            yield name, values.reshape(flat), held.reshape(flat).bool(), weights

    def apply(self, rule: _Rule) -> dict[str, Tensor]:
        """The new model by a rule."""
        new = {}
        for name, values, held, weights in self.tensors():
            old = self.state[name]
            if not len(values):
                new[name] = old.clone()
                continue
            flat_old, pieces = old.reshape(-1), []
            for start in range(0, flat_old.numel(), _CHUNK):
                chunk = slice(start, start + _CHUNK)
                counts = held[:, chunk].sum(dim=0)
                change = _reduce_chunk(values[:, chunk], held[:, chunk], weights, counts, rule)
                moved = (flat_old[chunk].to(torch.float64) + change).to(old.dtype)
                # A change of exactly 0 moves nothing: -0.0 + 0.0 would not be -0.0.
                pieces.append(torch.where((counts > 0) & (change != 0), moved, flat_old[chunk]))
            new[name] = torch.cat(pieces).reshape(old.shape)
        return new


def aggregate_robustly(settings: AnyRobustAggregation, stack: Stack) -> dict[str, Tensor]:
    """The new model; elements that no member holds keep their bits.

    Raises:
        ProtocolError: a change is missing, has another shape than its submodel's tensor, or is not finite.
    """
    return _AGGREGATE[type(settings)](settings, stack)


def choose_by_krum(settings: MultiKrum, stack: Stack) -> list[int]:
    """Indices of the members that multi-Krum averages, ascending; of equal scores the earlier member is better."""
    count = len(stack.members)
    malicious = max(0, min(settings.malicious_count, (count - 3) // 2))
    squares = torch.zeros(count, count, dtype=torch.float64)
    for _, values, held, _ in stack.tensors():
        common = values[:, held.all(dim=0)].to(torch.float64)
        if len(common) == count and common.numel():
            # Not by matrix products, whose difference loses the digits of close neighbours.
            distances = torch.cdist(common, common, compute_mode="donot_use_mm_for_euclid_dist")
            squares += distances.square().cpu()
    squares.fill_diagonal_(math.inf)
    neighbours = max(1, count - malicious - 2)
    scores = squares.sort(dim=1).values[:, :neighbours].sum(dim=1).tolist()
    best = sorted(range(count), key=lambda member: (scores[member], member))
    return sorted(best[: max(1, count - malicious)])


def find_held_elements(
    network: Network, state: Mapping[str, Tensor], members: Sequence[StackMember]
) -> dict[str, Tensor]:
    """Bool masks of the elements of some tensors of the model that any member holds."""
    held = {name: torch.zeros(tensor.shape, dtype=torch.int32, device=tensor.device) for name, tensor in state.items()}
    for member in members:
        shapes = network.shapes(member.architecture)
        for name, tensor_map in tensor_maps(network, member.architecture).items():
            if name in held:
                tensor_map.scatter(member.mask(name, shapes[name], held[name].device).int(), held[name])
    return {name: count > 0 for name, count in held.items()}


def _average_clipped(settings: NormClipping, stack: Stack) -> dict[str, Tensor]:
    squares = [0.0] * len(stack.members)
    for name in stack.state:
        for member, tensor in enumerate(stack.read(name)):
            squares[member] += 0.0 if tensor is None else float(tensor.to(torch.float64).square().sum())
    if not all(square < math.inf for square in squares):
        raise ProtocolError("an update holds a change that is not finite, so its norm cannot be clipped")
    scales = [min(1.0, settings.max_norm / math.sqrt(square)) if square else 1.0 for square in squares]

    def read_clipped(name: str) -> list[Tensor | None]:
        pairs = zip(stack.read(name), scales, strict=True)
        return [None if tensor is None else tensor * scale for tensor, scale in pairs]

    return replace(stack, read=read_clipped).apply(_Rule())


def _take_median(settings: CoordinateMedian, stack: Stack) -> dict[str, Tensor]:
    stay = settings.otherwise == "stay"
    return stack.apply(_Rule(reduce=_median, least_clients=settings.least_clients, stay=stay))


def _average_trimmed(settings: TrimmedMean, stack: Stack) -> dict[str, Tensor]:
    stay, reduce = settings.otherwise == "stay", partial(_trim, settings.fraction)
    return stack.apply(_Rule(reduce=reduce, least_clients=settings.least_clients, stay=stay))


def _average_chosen(settings: MultiKrum, stack: Stack) -> dict[str, Tensor]:
    chosen = choose_by_krum(settings, stack)

    def read_chosen(name: str) -> list[Tensor | None]:
        changes = stack.read(name)
        return [changes[member] for member in chosen]

    return replace(stack, members=[stack.members[member] for member in chosen], read=read_chosen).apply(_Rule())


_AGGREGATE: Mapping[type, Callable[[Any, Stack], dict[str, Tensor]]] = MappingProxyType(
    {
        NormClipping: _average_clipped,
        CoordinateMedian: _take_median,
        TrimmedMean: _average_trimmed,
        MultiKrum: _average_chosen,
    }
)


def _reduce_chunk(values: Tensor, held: Tensor, weights: Tensor, counts: Tensor, rule: _Rule) -> Tensor:
    """The change of each element of a chunk, in float64."""
    if rule.reduce is None:
        return _weighted_mean(values, held, weights)
    ordered = values.masked_fill(~held, math.inf).sort(dim=0).values
    reduced = rule.reduce(ordered, counts)
    shared = counts >= rule.least_clients
    if bool(shared.all()):
        return reduced
    return torch.where(shared, reduced, 0.0 if rule.stay else _weighted_mean(values, held, weights))


def _weighted_mean(values: Tensor, held: Tensor, weights: Tensor) -> Tensor:
    """The mean over the holders; sorted before it is summed, so that the order of clients does not matter."""
    shares = torch.where(held, weights.unsqueeze(1), 0.0)
    products = torch.where(held, values, 0).to(torch.float64) * shares
    total = shares.sort(dim=0).values.sum(dim=0)
    return products.sort(dim=0).values.sum(dim=0) / torch.where(total > 0, total, 1.0)


def _median(ordered: Tensor, counts: Tensor) -> Tensor:
    low = torch.div(counts - 1, 2, rounding_mode="floor").clamp(min=0).unsqueeze(0)
    high = torch.div(counts, 2, rounding_mode="floor").clamp(max=len(ordered) - 1).unsqueeze(0)
    middle = ordered.gather(0, low).to(torch.float64) + ordered.gather(0, high).to(torch.float64)
    return middle[0] / 2


def _trim(fraction: float, ordered: Tensor, counts: Tensor) -> Tensor:
    most = torch.div(counts - 1, 2, rounding_mode="floor").clamp(min=0)
    cut = torch.minimum((counts * fraction).ceil().to(torch.int64), most)
    ranks = torch.arange(len(ordered), device=ordered.device).unsqueeze(1)
    inner = (ranks >= cut) & (ranks < counts - cut)
    # Values of clients without the element are infinite, and infinity times 0 is not a number.
    total = torch.where(inner, ordered, 0).sum(dim=0, dtype=torch.float64)
    return total / (counts - 2 * cut).clamp(min=1)
