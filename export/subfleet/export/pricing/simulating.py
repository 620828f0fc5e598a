"""What a runtime's memory comes to, from what a program asks of it in order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.export.memory.liveness import GIVEN_BACK
from subfleet.export.memory.onnx_arena import Arena
from subfleet.export.pricing.library import Request

__all__ = ["SIMULATIONS", "Simulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How a runtime's memory is told from the requests.

    Attributes:
        peak_bytes: of activations and workspace, where all goes well.
        least_factor: of the plan over that, as far as is known beforehand.
        slack_bytes: by how much a plan may be larger than told.
    """

    peak_bytes: Callable[[Sequence[Request]], int]
    least_factor: float = 1.0
    slack_bytes: int = 0


def _live(requests: Sequence[Request]) -> int:
    """The most bytes that are taken at once."""
    sizes: dict[int, int] = {}
    alive = peak = 0
    for block, size in requests:
        if size == GIVEN_BACK:
            alive -= sizes[block]
            continue
        sizes[block] = size
        alive += size
        peak = max(peak, alive)
    return peak


def _arena(requests: Sequence[Request]) -> int:
    """ONNX Runtime's arena after a step."""
    arena = Arena()
    addresses: dict[int, int] = {}
    for block, size in requests:
        if size == GIVEN_BACK:
            arena.give(addresses.pop(block))
        else:
            addresses[block] = arena.take(size)
    return arena.resident_bytes


SIMULATIONS: Mapping[str, Simulation] = MappingProxyType(
    {
        "onnx": Simulation(peak_bytes=_arena),
        # XNNPACK packs blocks by size, with holes between them. Measured: 1.004 to 1.036 times what is taken at once.
        "executorch": Simulation(peak_bytes=_live, least_factor=1.03, slack_bytes=2**16),
        # Eager PyTorch's plan is a bound: its share of activations once more, and this.
        "torch": Simulation(peak_bytes=_live, least_factor=1.75),
    }
)
"""By target."""
