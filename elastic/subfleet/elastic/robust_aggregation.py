"""Settings of the robust rules, which read each update on its own; `subfleet.elastic.robust_rules` applies them."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Count, Positive, PositiveAmount


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class NormClipping:
    """The weighted mean of updates, each scaled down to a largest length.

    Sun et al., "Can You Really Backdoor Federated Learning?", 2019, section 4. An update is one vector of all of its
    tensors.

    Attributes:
        max_norm: largest L2 norm of an update, above 0.
    """

    TYPE: ClassVar[str] = "norm_clipping"
    max_norm: PositiveAmount


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class CoordinateMedian:
    """The median of each element over the clients that hold it, without weights.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, definition 1. Of
    an even number of values it is the mean of the middle two.

    Attributes:
        least_clients: number of clients that must hold an element for its median to be taken.
        otherwise: what happens to elements that fewer clients hold: "mean" takes the weighted mean, so that the widest
            parts of the model still learn; "stay" leaves them as they were.
    """

    TYPE: ClassVar[str] = "coordinate_median"
    least_clients: Positive = 3
    otherwise: Literal["mean", "stay"] = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class TrimmedMean:
    """The mean of each element over the clients that hold it, less its largest and smallest values; without weights.

    Yin et al., ICML 2018, definition 2.

    Attributes:
        fraction: fraction of the values that is left out at either end, rounded up; from 0 to below a half. At least
            one value is always kept.
        least_clients: as in `CoordinateMedian`.
        otherwise: as in `CoordinateMedian`.
    """

    TYPE: ClassVar[str] = "trimmed_mean"
    fraction: Annotated[float, Range(least=0, below=0.5)] = 0.1
    least_clients: Positive = 3
    otherwise: Literal["mean", "stay"] = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class MultiKrum:
    """The weighted mean of the clients whose updates lie closest to their neighbours.

    Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017, section 4.
    Distances are taken on the elements that all clients hold. A client's score is the sum of its n - f - 2 smallest
    squared distances, and the n - f clients with the smallest scores are averaged, each wherever it holds an element.
    Elements outside the common part are only as robust as this choice.

    Attributes:
        malicious_count: f, the number of clients that may be malicious, 0 or more. Krum needs n of 2 f + 3 or more;
            with fewer clients, f is the largest number that they allow.
    """

    TYPE: ClassVar[str] = "multi_krum"
    malicious_count: Count = 1


AnyRobustAggregation = NormClipping | CoordinateMedian | TrimmedMean | MultiKrum
"""Every robust rule, as a configuration's `type` chooses one."""

ROBUST_AGGREGATIONS: Mapping[str, type[AnyRobustAggregation]] = MappingProxyType(
    {kind.TYPE: kind for kind in typing.get_args(AnyRobustAggregation)}
)
