"""The bytes that a trainer holds for a step's inputs and outputs, on any runtime."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.export.steps.step import Step
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.tensors import DTYPE_BYTES

_READ: frozenset[Role] = frozenset({"parameter", "frozen", "buffer"})
_WEIGHTS: frozenset[Role] = _READ | {"anchor"}
_OPTIMISER: frozenset[Role] = frozenset({"optimiser_state", "gradient"})


GAPS: Mapping[str, float] = MappingProxyType({"onnx": 0.02, "executorch": 0.0275})
"""Fractions of the rest of a plan. Measured: 0 to 1.4 % with ONNX Runtime, 0.1 to 2.6 % with ExecuTorch."""
COUNTED_STEP_BYTES = 2**16
"""A runtime's objects vary by some kilobytes from one load to the next."""


def round_up_count(found_bytes: int) -> int:
    """Round a counted size up, so that a program's plan is nearly always the same."""
    return -(-found_bytes // COUNTED_STEP_BYTES) * COUNTED_STEP_BYTES


def add_gaps(plan: MemoryPlan, target: str) -> MemoryPlan:
    """Add the gaps between blocks of the C library's heap to the plan of a program that runs alone."""
    gaps_bytes = round(GAPS.get(target, 0.0) * plan.peak_bytes)
    return replace(plan, runtime_bytes=plan.runtime_bytes + round_up_count(gaps_bytes))


def value_bytes(values: Iterable[ValueInfo]) -> int:
    """Return the bytes of some values."""
    return sum(math.prod(value.shape) * DTYPE_BYTES[value.dtype] for value in values)


def read_bytes(inputs: Iterable[ValueInfo]) -> int:
    """Return the bytes of the weights that a trainer reads from files."""
    return value_bytes(value for value in inputs if value.role in _READ)


def weights_bytes(step: Step) -> int:
    """Return the bytes of parameters and buffers before and after a step, and of anchors."""
    return _bytes_of(step, _WEIGHTS)


def optimiser_bytes(step: Step) -> int:
    """Return the bytes of states and summed gradients before and after a step."""
    return _bytes_of(step, _OPTIMISER)


def fed_bytes(step: Step) -> int:
    """Return the bytes of all other inputs and outputs."""
    return value_bytes((*step.inputs, *step.outputs)) - weights_bytes(step) - optimiser_bytes(step)


def _bytes_of(step: Step, roles: frozenset[Role]) -> int:
    return value_bytes(value for value in (*step.inputs, *step.outputs) if value.role in roles)
