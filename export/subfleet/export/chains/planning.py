"""The memory that a chain takes on a device, told link by link: see `subfleet.protocol.chains`.

    whatever is drawn    the runtime, what the manifest says, and one batch
    of each piece        the runtime's objects for its programs, and these programs
    of each operator     its weights and states, once: an update gives new ones in the place of the old
    of a path            what each link reads, until its gradient is told, and the gradients of all parameters
    at any moment        one program: all share the runtime's memory for a program's own tensors

While a program on the way back runs, links behind it keep what they read no more; so what a program reads and gives
counts as far as it is more than that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.export.chains.writing import WrittenStep
from subfleet.export.memory import executorch_plan, onnx_plan
from subfleet.export.memory.values import value_bytes
from subfleet.export.steps import Step
from subfleet.export.targets import torch as torch_target
from subfleet.protocol.chains import Chain
from subfleet.protocol.memory import MemoryPlan, Packing
from subfleet.protocol.programs import ValueInfo

__all__ = ["LinkBytes", "add_gaps", "base_bytes", "memory_of", "peak_bytes", "reading_bytes", "runtime_bytes"]

_BASE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "onnx": onnx_plan.FIRST_SESSION_BYTES + onnx_plan.TRAINING_BYTES,
        "executorch": executorch_plan.BASE_BYTES,
        "torch": torch_target.BASE_BYTES,
    }
)


_READ_BYTES = 4.5
"""For each byte of a manifest: its text, its objects, and what reading it leaves behind. Measured: 4.0 to 5.0."""
_CHAINED_BYTES = 2_500_000
"""What chaining takes beside: the file as it was read, draws, and the values of each program. Measured: 2 to 4 MB."""


_GAPS = 1.12
"""Features and gradients of links are blocks of the C library's heap, which fits other ones into what becomes free.
Measured: 1.00 (CNN-S) to 1.11 (CNN-L), and more with ExecuTorch, whose own tensors are there, too."""


def reading_bytes(manifest_bytes: int) -> int:
    """What a device takes to read a manifest of this length, and to chain what it says."""
    return _CHAINED_BYTES + round(_READ_BYTES * manifest_bytes)


def add_gaps(size_bytes: int) -> int:
    """What blocks of so many bytes in all take, where others of other sizes come and go between them."""
    return round(_GAPS * size_bytes)


def base_bytes(target: str) -> int:
    """What a device takes whatever the program."""
    return _BASE_BYTES[target]


def runtime_bytes(target: str, written: Sequence[WrittenStep]) -> int:
    """What the runtime takes for a piece's programs."""
    return sum(step.program.memory.runtime_bytes - _BASE_BYTES[target] for step in written)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """What lies around a link.

    Attributes:
        trains: whether anything is kept for the way back.
        later_links: that links behind it keep at least of what they read.
        all_links: that all links do.
        summed: whether gradients are summed over micro-batches.
    """

    trains: bool
    later_links: int
    all_links: int
    summed: bool


def peak_bytes(written: Mapping[str, WrittenStep], around: LinkBytes) -> int:
    """The most that one program of a link takes beside what its path keeps."""
    return max((_program_bytes(kind, step, around) for kind, step in written.items()), default=0)


def _program_bytes(kind: str, step: WrittenStep, around: LinkBytes) -> int:
    memory, passing = step.program.memory, _transient_values(step.step, around)
    no_more = around.all_links if kind == "update" else around.later_links
    return memory.activation_bytes + memory.workspace_bytes + max(value_bytes(passing) - no_more, 0)


def _transient_values(step: Step, around: LinkBytes) -> list[ValueInfo]:
    """What is there only as long as a program runs."""
    if not around.trains:
        return [*(value for value in step.inputs if value.role == "features"), *step.outputs]
    # What a link reads is kept, what it gives the next one keeps; so are gradients, where they are not added to others.
    kept_roles = {"features"} if around.summed else {"features", "gradient"}
    back = (value for value in step.inputs if value.role == "features_gradient")
    return [*back, *(value for value in step.outputs if value.role not in kept_roles)]


def memory_of(chain: Chain, batch: Sequence[ValueInfo], packings: Sequence[Packing]) -> MemoryPlan:
    """The plan of the largest path with all operators held; its peak is what `ChainRoom.largest_peak_bytes` tells."""
    operators = [operator for link in chain.links for operator in link.operators]
    weights, states = (
        sum(operator.weight_bytes for operator in operators),
        sum(operator.state_bytes for operator in operators),
    )
    room = chain.room(chain.links)
    fed_bytes, peak = value_bytes(batch), max(operator.peak_bytes for operator in operators)
    kept_bytes = room.largest_peak_bytes - room.held_bytes - peak
    return MemoryPlan(
        weights_bytes=weights,
        optimiser_bytes=states,
        fed_bytes=fed_bytes,
        activation_bytes=kept_bytes,
        workspace_bytes=peak,
        runtime_bytes=room.held_bytes - weights - states - fed_bytes,
        packings=_merge_packings(packings),
    )


def _merge_packings(packings: Sequence[Packing]) -> tuple[Packing, ...]:
    more: dict[int, Packing] = {}
    for packing in packings:
        before = more[packing.width].more_bytes if packing.width in more else 0
        more[packing.width] = Packing(width=packing.width, more_bytes=before + packing.more_bytes)
    return tuple(more.values())
