"""Merges that need every single update: robust means over the clients that share an element.

They read the changes of all clients tensor by tensor, so that their memory is that of the largest tensor for each
client and not of whole models. Nothing in them depends on the order in which clients are given, but for ties between
clients that multi-Krum chooses from. Their settings are in `subfleet.elastic.robust_aggregation`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.elastic.network import Network
from subfleet.elastic.robust_aggregation import (
    AnyRobustAggregation,
    CoordinateMedian,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from subfleet.elastic.stacking import (
    ReadChanges,
    Rule,
    StackMember,
    merge_changes,
    stack_changes,
    sum_squares,
)
from subfleet.protocol.errors import ProtocolError

__all__ = ["Stack", "aggregate_robustly", "choose_by_krum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What is merged.

    Attributes:
        network: the declaration.
        state: the model that the round started from, or some of its tensors; only these are merged.
        members: the clients, sorted by their ids.
        read: gives their changes; it may be called several times for a tensor.
    """

    network: Network
    state: Mapping[str, Tensor]
    members: Sequence[StackMember]
    read: ReadChanges

    def apply(self, rule: Rule) -> dict[str, Tensor]:
        """By a rule for each element."""
        return merge_changes(self.network, self.state, self.members, self.read, rule)


def aggregate_robustly(settings: AnyRobustAggregation, stack: Stack) -> dict[str, Tensor]:
    """The new model; elements that no member holds keep their bits.

    Raises:
        ProtocolError: a change is missing, has another shape than its submodel's tensor, or is not finite.
    """
    return _MERGES[type(settings)](settings, stack)


def choose_by_krum(settings: MultiKrum, stack: Stack) -> list[int]:
    """Places of the members that are averaged, ascending; of equal scores the earlier member counts as better."""
    count = len(stack.members)
    malicious = max(0, min(settings.malicious_count, (count - 3) // 2))
    squares = torch.zeros(count, count, dtype=torch.float64)
    for _, values, held, _ in stack_changes(stack.network, stack.state, stack.members, stack.read):
        common = values[:, held.all(dim=0)].to(torch.float64)
        if len(common) == count and common.numel():
            # Not by way of the products, whose difference loses the digits of close neighbours.
            distances = torch.cdist(common, common, compute_mode="donot_use_mm_for_euclid_dist")
            squares += distances.square().cpu()
    squares.fill_diagonal_(math.inf)
    neighbours = max(1, count - malicious - 2)
    scores = squares.sort(dim=1).values[:, :neighbours].sum(dim=1).tolist()
    best = sorted(range(count), key=lambda place: (scores[place], place))
    return sorted(best[: max(1, count - malicious)])


def _clipped_mean(settings: NormClipping, stack: Stack) -> dict[str, Tensor]:
    squares = [0.0] * len(stack.members)
    for name in stack.state:
        for place, tensor in enumerate(stack.read(name)):
            squares[place] += 0.0 if tensor is None else sum_squares(tensor)
    scales = [_scale(settings, square) for square in squares]

    def clipped(name: str) -> list[Tensor | None]:
        pairs = zip(stack.read(name), scales, strict=True)
        return [None if tensor is None else tensor * scale for tensor, scale in pairs]

    return replace(stack, read=clipped).apply(Rule())


def _median_of_each(settings: CoordinateMedian, stack: Stack) -> dict[str, Tensor]:
    stay = settings.otherwise == "stay"
    return stack.apply(Rule(reduce=_median, least_clients=settings.least_clients, stay=stay))


def _trimmed_mean(settings: TrimmedMean, stack: Stack) -> dict[str, Tensor]:
    stay, reduce = settings.otherwise == "stay", partial(_trim, settings.fraction)
    return stack.apply(Rule(reduce=reduce, least_clients=settings.least_clients, stay=stay))


def _mean_of_chosen(settings: MultiKrum, stack: Stack) -> dict[str, Tensor]:
    chosen = choose_by_krum(settings, stack)

    def read_chosen(name: str) -> list[Tensor | None]:
        changes = stack.read(name)
        return [changes[place] for place in chosen]

    return replace(stack, members=[stack.members[place] for place in chosen], read=read_chosen).apply(Rule())


_MERGES: Mapping[type, Callable[[Any, Stack], dict[str, Tensor]]] = MappingProxyType(
    {
        NormClipping: _clipped_mean,
        CoordinateMedian: _median_of_each,
        TrimmedMean: _trimmed_mean,
        MultiKrum: _mean_of_chosen,
    }
)


def _scale(settings: NormClipping, square: float) -> float:
    if not square < math.inf:
        raise ProtocolError("an update holds a change that is not finite, so that its norm cannot be clipped")
    return min(1.0, settings.max_norm / math.sqrt(square)) if square else 1.0


def _median(ordered: Tensor, counts: Tensor) -> Tensor:
    low = torch.div(counts - 1, 2, rounding_mode="floor").clamp(min=0).unsqueeze(0)
    high = torch.div(counts, 2, rounding_mode="floor").clamp(max=len(ordered) - 1).unsqueeze(0)
    middle = ordered.gather(0, low).to(torch.float64) + ordered.gather(0, high).to(torch.float64)
    return middle[0] / 2


def _trim(fraction: float, ordered: Tensor, counts: Tensor) -> Tensor:
    most = torch.div(counts - 1, 2, rounding_mode="floor").clamp(min=0)
    cut = torch.minimum((counts * fraction).ceil().to(torch.int64), most)
    ranks = torch.arange(len(ordered), device=ordered.device).unsqueeze(1)
    kept = (ranks >= cut) & (ranks < counts - cut)
    # Values of those who lack the element are infinite, and infinity times 0 is not a number.
    total = torch.where(kept, ordered, 0).sum(dim=0, dtype=torch.float64)
    return total / (counts - 2 * cut).clamp(min=1)
