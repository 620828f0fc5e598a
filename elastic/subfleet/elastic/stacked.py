"""Merges that need every single update: robust means over the clients that share an element.

They read the changes of all clients tensor by tensor, so that their memory is that of the largest tensor for each
client and not of whole models. Nothing in them depends on the order in which clients are given, but for ties between
clients that multi-Krum chooses from.
"""

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from subfleet.elastic.network import Network
from subfleet.elastic.stacking import (
    Member,
    ReadChanges,
    Rule,
    largest_tensor,
    merged,
    square_sum,
    stack_bytes,
    stacks,
)
from subfleet.protocol.errors import ConfigError, ProtocolError

__all__ = [
    "STACKED_MERGES",
    "AnyStackedMerge",
    "CoordinateMedian",
    "MultiKrum",
    "NormClipping",
    "StackedMerge",
    "TrimmedMean",
]


class StackedMerge(Protocol):
    """Settings of a merge.

    Attributes:
        TYPE: its name in a configuration.
    """

    TYPE: ClassVar[str]

    def merge(
        self, network: Network, state: Mapping[str, Tensor], members: Sequence[Member], read: ReadChanges
    ) -> dict[str, Tensor]:
        """The new model; elements that no member holds keep their bits.

        Args:
            network: the declaration.
            state: the model that the round started from, or some of its tensors; only these are merged.
            members: the clients, sorted by their ids.
            read: gives their changes; it may be called several times for a tensor.

        Raises:
            ProtocolError: a change is missing, has another shape than its subnet's tensor, or is not finite.
        """
        ...

    def memory_bytes(self, network: Network, client_count: int) -> int:
        """Most memory that `merge` takes beside the two models, with float32 changes as `read` gives them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NormClipping:
    """The weighted mean of updates, each scaled down to a largest length.

    Sun et al., "Can You Really Backdoor Federated Learning?", 2019, section 4. An update is one vector of all of its
    tensors. Updates can be clipped one by one as well, before an `Accumulator` adds them.

    Attributes:
        max_norm: largest L2 norm of an update, above 0.
    """

    TYPE: ClassVar[str] = "norm_clipping"
    max_norm: float

    def __post_init__(self) -> None:
        if not 0 < self.max_norm < math.inf:
            raise ConfigError(f"max_norm is {self.max_norm}, but must be a number above 0")

    def clip(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One client's update, scaled down where it is too long; the same tensors where it is not."""
        scale = self._scale(sum(square_sum(tensor) for tensor in change.values()))
        return {name: tensor if scale == 1 else tensor * scale for name, tensor in change.items()}

    def merge(
        self, network: Network, state: Mapping[str, Tensor], members: Sequence[Member], read: ReadChanges
    ) -> dict[str, Tensor]:
        """As `StackedMerge.merge`."""
        squares = [0.0] * len(members)
        for name in state:
            for place, tensor in enumerate(read(name)):
                squares[place] += 0.0 if tensor is None else square_sum(tensor)
        scales = [self._scale(square) for square in squares]

        def clipped(name: str) -> list[Tensor | None]:
            return [
                None if tensor is None else tensor * scale for tensor, scale in zip(read(name), scales, strict=True)
            ]

        return merged(network, state, members, clipped, Rule())

    def memory_bytes(self, network: Network, client_count: int) -> int:
        """As `StackedMerge.memory_bytes`; clipped copies count."""
        return stack_bytes(network, client_count) + 4 * client_count * largest_tensor(network)

    def _scale(self, square: float) -> float:
        if not square < math.inf:
            raise ProtocolError("an update holds a change that is not finite, so that its norm cannot be clipped")
        return min(1.0, self.max_norm / math.sqrt(square)) if square else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedian:
    """The median of each element over the clients that hold it, without weights.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, definition 1. Of
    an even number of values it is the mean of the middle two.

    Attributes:
        least_clients: elements that fewer clients hold have no median that withstands anybody.
        otherwise: what becomes of these: "mean", the weighted mean, so that the widest parts of the model still learn;
            or "stay" as they were.
    """

    TYPE: ClassVar[str] = "coordinate_median"
    least_clients: int = 3
    otherwise: Literal["mean", "stay"] = "mean"

    def __post_init__(self) -> None:
        _check_least_clients(self.least_clients)

    def merge(
        self, network: Network, state: Mapping[str, Tensor], members: Sequence[Member], read: ReadChanges
    ) -> dict[str, Tensor]:
        """As `StackedMerge.merge`."""
        rule = Rule(reduce=_median, least_clients=self.least_clients, stay=self.otherwise == "stay")
        return merged(network, state, members, read, rule)

    def memory_bytes(self, network: Network, client_count: int) -> int:
        """As `StackedMerge.memory_bytes`."""
        return stack_bytes(network, client_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean:
    """The mean of each element over the clients that hold it, less its largest and smallest values; without weights.

    Yin et al., ICML 2018, definition 2.

    Attributes:
        fraction: share of the values that is left out at either end, rounded up; from 0 to below a half. At least one
            value is always kept.
        least_clients: as in `CoordinateMedian`.
        otherwise: as in `CoordinateMedian`.
    """

    TYPE: ClassVar[str] = "trimmed_mean"
    fraction: float = 0.1
    least_clients: int = 3
    otherwise: Literal["mean", "stay"] = "mean"

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 0.5:
            raise ConfigError(f"fraction is {self.fraction}, but must be at least 0 and below a half")
        _check_least_clients(self.least_clients)

    def merge(
        self, network: Network, state: Mapping[str, Tensor], members: Sequence[Member], read: ReadChanges
    ) -> dict[str, Tensor]:
        """As `StackedMerge.merge`."""
        rule = Rule(reduce=self._trimmed, least_clients=self.least_clients, stay=self.otherwise == "stay")
        return merged(network, state, members, read, rule)

    def memory_bytes(self, network: Network, client_count: int) -> int:
        """As `StackedMerge.memory_bytes`."""
        return stack_bytes(network, client_count)

    def _trimmed(self, ordered: Tensor, counts: Tensor) -> Tensor:
        most = torch.div(counts - 1, 2, rounding_mode="floor").clamp(min=0)
        cut = torch.minimum((counts * self.fraction).ceil().to(torch.int64), most)
        ranks = torch.arange(len(ordered), device=ordered.device).unsqueeze(1)
        kept = (ranks >= cut) & (ranks < counts - cut)
        # Values of those who lack the element are infinite, and infinity times 0 is not a number.
        total = torch.where(kept, ordered, 0).sum(dim=0, dtype=torch.float64)
        return total / (counts - 2 * cut).clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum:
    """The weighted mean of the clients whose updates lie closest to their neighbours.

    Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017, section 4.
    Distances are taken on the elements that all clients hold. A client's score is the sum of its n - f - 2 smallest
    squared distances, and the n - f clients with the smallest scores are averaged, each wherever it holds an element:
    what lies outside the common part is only as safe as their choice.

    Attributes:
        malicious_count: f, how many clients may be malicious, 0 or more. Krum needs n of 2 f + 3 or more; with fewer
            clients, f is the most that they allow.
    """

    TYPE: ClassVar[str] = "multi_krum"
    malicious_count: int = 1

    def __post_init__(self) -> None:
        if self.malicious_count < 0:
            raise ConfigError(f"malicious_count is {self.malicious_count}, but must be 0 or more")

    def merge(
        self, network: Network, state: Mapping[str, Tensor], members: Sequence[Member], read: ReadChanges
    ) -> dict[str, Tensor]:
        """As `StackedMerge.merge`."""
        chosen = self.chosen(network, state, members, read)

        def read_chosen(name: str) -> list[Tensor | None]:
            changes = read(name)
            return [changes[place] for place in chosen]

        kept = [members[place] for place in chosen]
        return merged(network, state, kept, read_chosen, Rule())

    def chosen(
        self, network: Network, state: Mapping[str, Tensor], members: Sequence[Member], read: ReadChanges
    ) -> list[int]:
        """Places of the members that are averaged, ascending; of equal scores the earlier member counts as better."""
        count = len(members)
        malicious = max(0, min(self.malicious_count, (count - 3) // 2))
        squares = torch.zeros(count, count, dtype=torch.float64)
        for _, values, held, _ in stacks(network, state, members, read):
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

    def memory_bytes(self, network: Network, client_count: int) -> int:
        """As `StackedMerge.memory_bytes`; distances are taken in float64."""
        return stack_bytes(network, client_count) + 12 * client_count * largest_tensor(network) + 8 * client_count**2


AnyStackedMerge = NormClipping | CoordinateMedian | TrimmedMean | MultiKrum
"""Every merge, as a configuration's `type` chooses one."""

STACKED_MERGES: Mapping[str, type[AnyStackedMerge]] = MappingProxyType(
    {kind.TYPE: kind for kind in typing.get_args(AnyStackedMerge)}
)


def _median(ordered: Tensor, counts: Tensor) -> Tensor:
    low = torch.div(counts - 1, 2, rounding_mode="floor").clamp(min=0).unsqueeze(0)
    high = torch.div(counts, 2, rounding_mode="floor").clamp(max=len(ordered) - 1).unsqueeze(0)
    middle = ordered.gather(0, low).to(torch.float64) + ordered.gather(0, high).to(torch.float64)
    return middle[0] / 2


def _check_least_clients(least_clients: int) -> None:
    if least_clients < 1:
        raise ConfigError(f"least_clients is {least_clients}, but must be 1 or more")
