"""What a run's configuration says in place of its method: resolved once, into the policies of the run. Pure."""

from dataclasses import dataclass, replace

from subfleet.elastic.merges import AnyStackedMerge
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.teaching import DistillationSettings
from subfleet.methods.norms import NormPolicy, with_norms
from subfleet.methods.policies import Policies, as_priced
from subfleet.protocol.update_codecs import AnyUpdateCodec

__all__ = ["Overrides"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What a configuration may say of the steps of a round; None leaves a step to the method.

    Attributes:
        norms: how norms are shared.
        merge: of every single update, in place of the weighted mean.
        server_optimiser: takes the mean change for a gradient.
        distillation: what the full model teaches its subnets after each round.
        update_codec: how devices write their updates, whatever their links carry.
    """

    norms: NormPolicy = "averaged"
    merge: AnyStackedMerge | None = None
    server_optimiser: AnyServerOptimiser | None = None
    distillation: DistillationSettings | None = None
    update_codec: AnyUpdateCodec | None = None

    def applied(self, policies: Policies) -> Policies:
        """A method's policies with these in place of its own."""
        codec = self.update_codec
        return replace(
            with_norms(policies, self.norms),
            merge=self.merge or policies.merge,
            server_optimiser=self.server_optimiser or policies.server_optimiser,
            distillation=self.distillation or policies.distillation,
            update_codec=codec or policies.update_codec,
            fit_codec=policies.fit_codec if codec is None else as_priced,
        )
