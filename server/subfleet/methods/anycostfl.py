"""AnycostFL: the most important channels first, so that every prefix holds what matters most.

Li et al., "AnycostFL: Efficient On-Demand Federated Learning over Heterogeneous Edge Devices", INFOCOM 2023.

Client half: train the given submodel with the given objective; send the largest of the changes, rounded to a few
levels.
Server half: after each round the channels of every axis are sorted by their L2 norm, with one order for all tensors
that are tied to the axis, so that the model computes the same as before. A client gets the largest of a fine ladder of
widths that fits, with its update compressed as far as it may be; then its update is compressed no further than its link
asks for. Changes are averaged element by element, weighted by samples.

The order is that of the weights that all clients share, and moments and copies follow it. So where each size has norms
of its own, the whole model computes the same as before for each of them. What a size has learned of a channel goes
where the channel goes; of a channel that comes to its front for the first time, it begins with the shared norm.

The paper tunes width and compression together, to the gain that it expects of both; here width comes first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import AggregationContext, Aggregator
from subfleet.methods.assigner import Assigner
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.local_training import LocalTraining, UpdateBytes
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import whole_depth
from subfleet.methods.techniques import Techniques
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.update_codecs import AnyUpdateCodec, TopK, TopKQsgd, Uncompressed

if TYPE_CHECKING:
    from subfleet.elastic.model_state import ModelState

__all__ = ["AnycostFL"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class AnycostFL:
    """Parameters of AnycostFL.

    Attributes:
        steps: of the ladder of widths: 1/steps, 2/steps and so on up to 1.
        codec: of updates. Where it sends a fraction of the changes, that is the least; each client sends as large a
            fraction as its link carries. None sends updates as they are.
    """

    TYPE: ClassVar[str] = "anycostfl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="AnycostFL",
        paper="Li et al., AnycostFL: Efficient On-Demand Federated Learning over Heterogeneous Edge Devices, INFOCOM "
        "2023",
        varies=("width",),
        judges=("update_codec",),
        published={"steps": None, "codec": Published(value=TopKQsgd(), told=None)},
    )
    steps: Annotated[int, Range(least=1, most=1000)] = 16
    codec: AnyUpdateCodec | None = field(default_factory=TopKQsgd)

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        codec = setting.techniques.update_codec or self.codec
        return (
            "width is maximised first, then the density of updates, where the paper optimises both together",
            "updates are weighted by samples, not by optimised coefficients",
            *those_true(
                {
                    "updates are not compressed": codec in (None, Uncompressed()),
                    "all updates are compressed equally, whatever the link (update_codec)": setting.compressed,
                }
            ),
        )

    def roles(self) -> Roles:
        """Sorted prefixes."""
        return Roles(
            assigner=Assigner(space=self._space),
            training=LocalTraining(fit_codec=densest_codec),
            aggregator=Aggregator(after_round=sort_model),
            techniques=Techniques(update_codec=self.codec),
        )

    def _space(self, network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
        return whole_depth(network, [step / self.steps for step in range(1, self.steps + 1)])


def densest_codec(codec: AnyUpdateCodec, update_bytes: UpdateBytes, budget: Budget) -> AnyUpdateCodec:
    """The codec with the largest fraction, in whole percents above its own, whose update fits the uplink."""
    if not isinstance(codec, TopK | TopKQsgd):
        return codec
    fractions = [codec.fraction, *(percent / 100 for percent in range(1, 101) if percent / 100 > codec.fraction)]
    codecs = [replace(codec, fraction=fraction) for fraction in fractions]
    # With all of them there are no positions to tell, so that sending more may take less.
    if budget.uplink_bytes is None or update_bytes(codecs[-1]) <= budget.uplink_bytes:
        return codecs[-1]
    return codecs[max(0, bisect_right(codecs, budget.uplink_bytes, key=update_bytes) - 1)]


def sort_model(context: AggregationContext) -> ModelState:
    """The model with the most important channels of every axis first; copies, moments and what is untrained follow."""
    from subfleet.elastic.permuting import permute, rank_indices  # with PyTorch, which settings do without

    order = rank_indices(context.network, context.after.shared)
    after = context.after.map_tensors(lambda tensors: permute(context.network, tensors, order))
    return replace(after, untrained=permute(context.network, after.untrained, order))
