"""The memory that a program is planned to take on a device, by what it is for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal

from subfleet.protocol.bounds import Each, checked
from subfleet.protocol.limits import Count
from subfleet.protocol.schema import ADDED_LATER

PackingWidth = Literal[4, 8, 16, 32, 64]
"""How many outputs kernels for products take at once: 8 on Arm and with SSE, 16 with AVX, 32 with AVX-512."""
USUAL_WIDTH: PackingWidth = 16
"""The one that plans are told for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """By how much a plan changes on a device whose kernels take `width` outputs at once; below 0 where it shrinks.

    Kernels hold constant factors in an order of their own, filled up to whole widths.
    """

    width: PackingWidth
    more_bytes: int


def planned_for(peak_bytes: int, packings: Sequence[Packing], width: PackingWidth | None) -> int:
    """A plan for a device.

    Args:
        peak_bytes: as the plan tells it.
        packings: of the plan.
        width: of the device's kernels; None is the usual one.
    """
    return peak_bytes + sum(one.more_bytes for one in packings if one.width == width)


def _check_packings(record: "MemoryPlan") -> Iterator[str]:
    if any(one.width == USUAL_WIDTH for one in record.packings):
        yield f"packings have the width {USUAL_WIDTH}, but that is the one that the plan itself is told for"
    if any(record.peak_bytes + one.more_bytes < 0 for one in record.packings):
        yield "packings leave less than 0 bytes, but must leave 0 or more"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_packings)
class MemoryPlan:
    """By how much a trainer's process grows while it loads a program and trains with it, at the moment of its peak.

    Every part is counted in bytes and is 0 or more.

    Attributes:
        weights_bytes: parameters and buffers, before and after a step, and the anchors of a proximal term.
        optimiser_bytes: optimiser states and summed gradients, before and after a step.
        fed_bytes: one batch and all else that is fed with it, and what is read after a step.
        activation_bytes: most bytes of one step's own tensors that are alive at once.
        workspace_bytes: kernels' scratch memory, and what the runtime's allocator loses between blocks.
        runtime_bytes: the program, the runtime's own objects for it, and what the first step maps.
        packings: what of that differs between processors; empty where nothing does.

    Raises:
        ProtocolError: a part is below 0.
    """

    weights_bytes: Count = 0
    optimiser_bytes: Count = 0
    fed_bytes: Count = 0
    activation_bytes: Count = 0
    workspace_bytes: Count = 0
    runtime_bytes: Count = 0
    packings: Annotated[tuple[Packing, ...], Each(key=attrgetter("width"))] = field(default=(), metadata=ADDED_LATER)

    @property
    def peak_bytes(self) -> int:
        """The whole: all parts are there at once."""
        return (
            self.weights_bytes
            + self.optimiser_bytes
            + self.fed_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.runtime_bytes
        )
