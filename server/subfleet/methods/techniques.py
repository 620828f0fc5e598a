"""Techniques that go with any method: norms, robust aggregation, server optimisers, update codecs, distillation."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from subfleet.elastic.robust_aggregation import AnyRobustAggregation
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed

__all__ = ["Techniques"]

NormPolicy = Literal["averaged", "bank", "recalibrated", "calibrated"]
"""How norms are shared. "averaged": gains, biases and running statistics are averaged like weights. "bank": each size
has its own norms, averaged among its clients alone. "recalibrated": averaged, and running statistics are measured again
for every submodel that is evaluated or deployed (HeteroFL's static batch norm, section 3.3). "calibrated": averaged,
and in separate rounds each device measures the running statistics of its submodel on its own data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Techniques:
    """A choice of techniques, by a method, or by a run in place of its method's; None is no choice.

    Attributes:
        norms: how norms are shared; the run's choice always counts.
        robust_aggregation: a robust rule in place of the weighted mean, applied to the single updates.
        server_optimiser: takes the mean change as a gradient; without one it is added to the model.
        update_codec: how devices write their updates; sizes are estimated with it. With the run's codec, every device
            writes the same way, whatever its link.
        distillation: how the full model teaches its submodels after each round.
    """

    norms: NormPolicy = "averaged"
    robust_aggregation: AnyRobustAggregation | None = None
    server_optimiser: AnyServerOptimiser | None = None
    update_codec: AnyUpdateCodec | None = None
    distillation: DistillationSettings | None = None

    @property
    def codec(self) -> AnyUpdateCodec:
        """The update codec; without one, updates are not compressed."""
        return self.update_codec or Uncompressed()

    @property
    def teaches(self) -> bool:
        """Whether the full model teaches its submodels."""
        return self.distillation is not None and self.distillation.iterations > 0

    def complete_from(self, own: "Techniques") -> "Techniques":
        """A run's choice, completed by its method's."""
        chosen = {choice.name: value for choice in fields(self) if (value := getattr(self, choice.name)) is not None}
        return replace(own, **chosen)
