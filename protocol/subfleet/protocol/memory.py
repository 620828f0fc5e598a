"""The memory that a program is planned to take on a device, by what it is for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.schema import ADDED_LATER

__all__ = ["USUAL_WIDTH", "MemoryPlan", "Packing", "PackingWidth", "planned_for"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
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

    weights_bytes: int = 0
    optimiser_bytes: int = 0
    fed_bytes: int = 0
    activation_bytes: int = 0
    workspace_bytes: int = 0
    runtime_bytes: int = 0
    packings: tuple[Packing, ...] = field(default=(), metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self) if one.name != "packings"):
            size_bytes = getattr(self, name)
            if size_bytes < 0:
                raise ProtocolError(f"a memory plan's {name} is {size_bytes}, but must be 0 or more")
        widths = [one.width for one in self.packings]
        if len({USUAL_WIDTH, *widths}) <= len(widths):
            raise ProtocolError(
                f"a memory plan's packings have the widths {widths}, but each once, without {USUAL_WIDTH}"
            )
        if any(self.peak_bytes + one.more_bytes < 0 for one in self.packings):
            raise ProtocolError("a memory plan's packings must leave 0 bytes or more")

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
