"""The memory plan of a training program in ExecuTorch, from the runtime's own plan of the program."""

from subfleet.export.memory.values import fed_bytes, optimiser_bytes, weights_bytes
from subfleet.export.steps.values import Step
from subfleet.protocol.memory import MemoryPlan

__all__ = ["plan_executorch"]

_BASE_BYTES = 6_400_000
_BYTES_PER_PROGRAM_BYTE = 12
"""The program itself, and the method's table of values and operators."""
_SCRATCH_SHARE = 0.38
"""Of the arena: what kernels pack beside it."""


def plan_executorch(step: Step, *, arena_bytes: int, program_bytes: int) -> MemoryPlan:
    """Plan a program.

    Args:
        step: that was written.
        arena_bytes: of the program's planned buffers; they hold everything that lives inside.
        program_bytes: of the written program.
    """
    return MemoryPlan(
        weights_bytes=weights_bytes(step),
        optimiser_bytes=optimiser_bytes(step),
        fed_bytes=fed_bytes(step),
        activation_bytes=arena_bytes,
        workspace_bytes=int(_SCRATCH_SHARE * arena_bytes),
        runtime_bytes=_BASE_BYTES + _BYTES_PER_PROGRAM_BYTE * program_bytes,
    )
