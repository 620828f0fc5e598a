"""What is taken for the size of a client's weights, as settings name it; `subfleet.elastic.scaling` computes it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

__all__ = ["NORMS", "Central", "WeightNorm"]

WeightNorm = Literal["l2", "rms", "common"]
"""How large the weights of a layer are: "l2" is the root of their sum of squares; "rms" of their mean square; "common"
the L2 norm of the elements that every client holds, so that clients without training agree exactly."""

NORMS: Mapping[Literal["paper", "fixed"], WeightNorm] = MappingProxyType({"paper": "l2", "fixed": "common"})
"""The norm of each fidelity to the paper."""

Central = Literal["absolute", "below", "between"]
"""Which weights count as the paper's inner 95 %: those of |w| up to the 95th percentile of |w| (our reading); w up to
that of w (section 4.3); or w between the percentiles 2.5 and 97.5 (appendix E)."""
