"""The planned memory of a program on a device, by purpose."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal

from subfleet.protocol.bounds import Each, checked
from subfleet.protocol.limits import Count
from subfleet.protocol.schema import ADDED_LATER

PackingWidth = Literal[4, 8, 16, 32, 64]
"""Outputs that matrix kernels compute at once: 8 on Arm and with SSE, 16 with AVX, 32 with AVX-512."""
USUAL_WIDTH: PackingWidth = 16
"""The width that plans assume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The change of a plan on a device with another packing width; negative if it shrinks.

    Kernels copy constant factors into their own order, padded to whole widths.
    """

    width: PackingWidth
    more_bytes: int


def compute_peak_bytes(peak_bytes: int, packings: Sequence[Packing], width: PackingWidth | None) -> int:
    """Compute the planned peak on a device.

    Args:
        peak_bytes: of the plan, for the usual width.
        packings: of the plan.
        width: of the device's kernels; None means the usual one.
    """
    return peak_bytes + sum(packing.more_bytes for packing in packings if packing.width == width)


def _check_packings(record: "MemoryPlan") -> Iterator[str]:
    if any(packing.width == USUAL_WIDTH for packing in record.packings):
        yield f"packings have the width {USUAL_WIDTH}, but the plan itself assumes it"
    if any(record.peak_bytes + packing.more_bytes < 0 for packing in record.packings):
        yield "packings leave less than 0 bytes, but must leave 0 or more"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_packings)
class MemoryPlan:
    """The growth of a trainer's process at its peak, from loading a program to the end of training.

    Attributes:
        weights_bytes: parameters and buffers, before and after a step, and the anchors of a proximal term.
        optimiser_bytes: optimiser states and summed gradients, before and after a step.
        fed_bytes: one batch and all other inputs, and the outputs that are read after a step.
        activation_bytes: peak of a step's own tensors.
        workspace_bytes: scratch memory of kernels, and fragmentation of the runtime's allocator.
        runtime_bytes: the program, the runtime's objects for it, and what the first step maps.
        packings: differences between processors; empty if there are none.
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
        """Sum of all parts."""
        return (
            self.weights_bytes
            + self.optimiser_bytes
            + self.fed_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.runtime_bytes
        )
