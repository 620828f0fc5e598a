"""AnycostFL: the most important channels first, so that every prefix holds what matters most.

Li et al., "AnycostFL: Efficient On-Demand Federated Learning over Heterogeneous Edge Devices", INFOCOM 2023.

Client half: train the given submodel with the given objective; send the largest of the changes, rounded to a few
levels.
Server half: after each round the channels of every axis are sorted by their L2 norm, with one order for all tensors
that are tied to the axis, so that the model computes the same as before. A client gets the largest of a fine ladder of
widths that fits with the strongest compression; then its update is compressed no more than its link requires. Changes
are averaged element by element, weighted by samples.

The order is that of the shared weights, and moments and copies follow it. So if each size has its own norms, the whole
model still computes the same for each of them. What a size has learned about a channel moves with the channel; for a
channel that enters its prefix for the first time, it begins with the shared norm.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from subfleet.methods.aggregator import AggregationContext, Aggregator, ModelState
from subfleet.methods.assigner import Assigner
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import LocalTraining, Roles, UpdateBytes
from subfleet.methods.sizes import list_widths
from subfleet.methods.techniques import Techniques
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.readings import Budget
from subfleet.protocol.update_codecs import AnyUpdateCodec, TopK, TopKQsgd, Uncompressed


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class AnycostFL:
    """Parameters of AnycostFL.

    Attributes:
        steps: widths of the ladder: 1/steps, 2/steps and so on up to 1.
        codec: of updates. If it sends a fraction of the changes, that is the least; each client sends as large a
            fraction as its link carries. None sends whole updates.
    """

    TYPE: ClassVar[str] = "anycostfl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="AnycostFL",
        paper="Li et al., AnycostFL: Efficient On-Demand Federated Learning over Heterogeneous Edge Devices, INFOCOM "
        "2023",
        varies=("width",),
        judges=("update_codec",),
        departures={
            "width is maximised first, then the density of updates, where the paper optimises both together": always,
            "updates are weighted by samples, not by optimised coefficients": always,
            "updates are not compressed": (
                lambda method, setting: (setting.techniques.update_codec or method.codec) in (None, Uncompressed())
            ),
            "all updates are compressed equally, whatever the link (update_codec)": (
                lambda method, setting: setting.compressed
            ),
        },
    )
    steps: Annotated[int, Range(least=1, most=1000)] = 16
    codec: AnyUpdateCodec | None = parameter(TopKQsgd(), otherwise=None)

    def roles(self) -> Roles:
        """Sorted prefixes."""
        widths = [step / self.steps for step in range(1, self.steps + 1)]
        return Roles(
            assigner=Assigner(space=lambda network, rates: list_widths(network, widths)),
            training=LocalTraining(fit_codec=_fit_codec),
            aggregator=Aggregator(after_round=_sort_model),
            techniques=Techniques(update_codec=self.codec),
        )


def _fit_codec(codec: AnyUpdateCodec, update_bytes: UpdateBytes, budget: Budget) -> AnyUpdateCodec:
    """The codec with the largest fraction, in whole percents above its own, with which an update fits the uplink."""
    if not isinstance(codec, TopK | TopKQsgd):
        return codec
    fractions = [codec.fraction, *(percent / 100 for percent in range(1, 101) if percent / 100 > codec.fraction)]
    codecs = [replace(codec, fraction=fraction) for fraction in fractions]
    # With all changes there are no positions to send, so that sending more may take fewer bytes.
    if budget.uplink_bytes is None or update_bytes(codecs[-1]) <= budget.uplink_bytes:
        return codecs[-1]
    return codecs[max(0, bisect_right(codecs, budget.uplink_bytes, key=update_bytes) - 1)]


def _sort_model(context: AggregationContext) -> ModelState:
    """Sort the channels of every axis by importance, in copies, moments and untrained marks too."""
    from subfleet.elastic.permuting import permute, rank_indices  # with PyTorch, which settings do without

    order = rank_indices(context.network, context.after.shared)
    after = context.after.map_tensors(lambda tensors: permute(context.network, tensors, order))
    return replace(after, untrained=permute(context.network, after.untrained, order))
