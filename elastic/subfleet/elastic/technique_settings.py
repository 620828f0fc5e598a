"""Settings of in-place distillation and of weight norms, read where there is no PyTorch.

`subfleet.elastic.distillation` and `subfleet.elastic.scaling` compute them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Amount, Count, PositiveAmount

WeightNorm = Literal["l2", "rms", "common"]
"""How the size of a layer's weights is measured: "l2" is the root of the sum of squares; "rms" the root of the mean
square; "common" the L2 norm of the elements that every client holds, so that clients without training agree exactly."""

NORMS: Mapping[Literal["paper", "fixed"], WeightNorm] = MappingProxyType({"paper": "l2", "fixed": "common"})
"""The norm of each fidelity to the paper."""

Central = Literal["absolute", "below", "between"]
"""Which weights are the paper's inner 95 %: "absolute" has |w| up to the 95th percentile of |w| (our reading); "below"
has w up to the 95th percentile of w (section 4.3); "between" has w from the 2.5th to the 97.5th (appendix E)."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class DistillationSettings:
    """How the full model teaches its submodels.

    Attributes:
        mode: "shared" trains the slices of the full model's own weights, as in algorithm 1, so the teacher moves too;
            "anchored" does the same with the teacher as it was before; "copies" trains a copy of each student and
            averages the copies with the full model, as in the text of section 3.3. A moving teacher and its students
            may agree on one answer to everything, and forget what clients learned.
        iterations: number of steps.
        batch_size: noise samples of a step, at least 2.
        learning_rate: learning rate of Adam, at least 0.
        temperature: divisor of the logits, above 0; the divergence is multiplied by its square (Hinton et al. 2015,
            section 2).
    """

    mode: Literal["shared", "anchored", "copies"] = "shared"
    iterations: Count = 100
    batch_size: Annotated[int, Range(least=2)] = 64
    learning_rate: Amount = 1e-3
    temperature: PositiveAmount = 1.0
