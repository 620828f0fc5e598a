"""The memory plan of a training program in ExecuTorch, from the program's own plan and a count of the rest.

weights and states   twice: a step reads one set and writes the other
activations          the program's planned buffers, and what its first step keeps (XNNPACK's workspace)
workspace            kernels' scratch memory
runtime              structures and operators, counted in the C library's heap; the program; a constant
"""

from collections.abc import Sequence
from typing import get_args

from subfleet.device_profiles import own_packing_width
from subfleet.export.memory.executorch_run import HeapGrowth, heap_growth
from subfleet.export.memory.values import fed_bytes, optimiser_bytes, round_up_count, weights_bytes
from subfleet.export.steps.values import Step
from subfleet.protocol.memory import USUAL_WIDTH, MemoryPlan, Packing, PackingWidth

__all__ = ["BASE_BYTES", "PROGRAM_COPIES", "plan_executorch"]

PROGRAM_COPIES = 3
"""As it was read, moved to where the runtime may read it, and about as much that loading leaves between its blocks."""
_TRAINING_BYTES = 600_000
"""Python's objects of a training, the data set's next batch, and pages of libraries that the first step maps."""
_KERNEL_PAGES_BYTES = 1_400_000
"""Pages of the kernels' library, which trainers do not map beforehand, since most programs need little of it.
Measured: 0.4 to 3.1 MB, by the program and the state of the system's page cache; 1.2 to 1.3 MB for small programs."""
BASE_BYTES = _KERNEL_PAGES_BYTES + _TRAINING_BYTES
"""What a device takes whatever the program."""
_STRUCTURE_BYTES_PER_PROGRAM_BYTE = 7
"""Where the C library does not count its heap. Measured without delegates: 6.9 to 7.1."""


def plan_executorch(step: Step, *, body: bytes, arena_bytes: int, packed: Sequence[tuple[int, int]]) -> MemoryPlan:
    """Plan a program by loading it and running it once.

    Args:
        step: that was written.
        body: of the written program.
        arena_bytes: of the program's planned buffers.
        packed: rows and columns of the constant factors of XNNPACK's products.
    """
    widths: tuple[PackingWidth, ...] = get_args(PackingWidth)
    bytes_by_width = {
        width: sum(4 * rows * -(-columns // width) * width for rows, columns in packed) for width in widths
    }
    own_bytes, usual_bytes = bytes_by_width[own_packing_width()], bytes_by_width.pop(USUAL_WIDTH)
    growth = heap_growth(body, step.inputs, step.outputs, arena_bytes=arena_bytes)
    if growth is None:
        structures = _STRUCTURE_BYTES_PER_PROGRAM_BYTE * len(body)
        growth = HeapGrowth(load_bytes=structures + own_bytes, step_bytes=0, scratch_bytes=0)
    return MemoryPlan(
        weights_bytes=weights_bytes(step),
        optimiser_bytes=optimiser_bytes(step),
        fed_bytes=fed_bytes(step),
        activation_bytes=arena_bytes + round_up_count(growth.step_bytes),
        workspace_bytes=growth.scratch_bytes,
        runtime_bytes=round_up_count(max(growth.load_bytes - own_bytes, 0) + usual_bytes)
        + PROGRAM_COPIES * len(body)
        + BASE_BYTES,
        packings=tuple(
            Packing(width=at, more_bytes=size - usual_bytes) for at, size in bytes_by_width.items() if packed
        ),
    )
