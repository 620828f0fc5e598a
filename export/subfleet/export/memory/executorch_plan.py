"""The memory plan of a training program in ExecuTorch, from the program's own plan and a count of the rest.

weights and states   twice: a step reads one set and writes the other
activations          the program's planned buffers, and what its first step keeps (XNNPACK's workspace), or takes
                     while that grows
workspace            kernels' scratch memory
runtime              structures and operators, counted in the C library's heap; the program; in a training a constant

The runtime's structures, XNNPACK's packed operators and its workspace come from the C library's heap, and stay there
from step to step. So the program is loaded and run once, and the heap is counted before and after.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from subfleet.device_profiles import detect_packing_width
from subfleet.export.memory.first_step import measure_first_step
from subfleet.export.memory.heap import heap_bytes, measure_passing_bytes
from subfleet.export.memory.step_bytes import fed_bytes, optimiser_bytes, read_bytes, round_up_count, weights_bytes
from subfleet.export.steps.step import Step
from subfleet.protocol.memory_plan import USUAL_WIDTH, MemoryPlan, Packing, PackingWidth
from subfleet.protocol.programs import ValueInfo

_Array = npt.NDArray[np.generic]
_METHOD = "forward"
_SUSPECTED_BYTES = 2_500_000
"""Growth of less than that needs no closer look: up to 2 MB are pages that an exporter's heap has left over."""
_NUMPY: Mapping[str, type[np.generic]] = MappingProxyType({"F32": np.float32, "F64": np.float64, "I64": np.int64})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapGrowth:
    """Heap memory of a program, without its planned buffers and the caller's arrays.

    Attributes:
        load_bytes: structures and operators after loading.
        step_bytes: taken and kept by the first step: XNNPACK's workspace, in which delegated regions keep tensors.
        scratch_bytes: the most scratch memory that kernels used at once.
        passing_bytes: the most that the first step took beyond what the process holds after it, without scratch memory:
            XNNPACK's workspace grows by a larger copy beside the smaller one. 0 if the kernel does not tell, or without
            the native binding.
    """

    load_bytes: int
    step_bytes: int
    scratch_bytes: int
    passing_bytes: int = 0


def heap_growth(
    body: bytes, inputs: Sequence[ValueInfo], outputs: Sequence[ValueInfo], *, arena_bytes: int
) -> HeapGrowth | None:
    """Load a program, run it once on zeros, and count its heap memory.

    Args:
        body: the program.
        inputs: its inputs.
        outputs: its outputs.
        arena_bytes: bytes of its planned buffers, according to the program.

    Returns:
        The heap memory; None if the C library does not count its heap.
    """
    input_arrays = [np.zeros(value.shape, _NUMPY[value.dtype]) for value in inputs]
    output_arrays = [np.zeros(value.shape, _NUMPY[value.dtype]) for value in outputs]
    native = _native()
    return (
        _native_growth(native, body, input_arrays, output_arrays, read_bytes(inputs))
        if native
        else _python_growth(body, input_arrays, output_arrays, arena_bytes)
    )


def _native_growth(
    native: ModuleType, body: bytes, inputs: Sequence[_Array], outputs: Sequence[_Array], weights_read_bytes: int
) -> HeapGrowth | None:
    native.set_thread_count(1)
    before = heap_bytes()
    # A workspace that another program of this process has already grown would not grow, and not be counted.
    method = native.Program(body).load_method(_METHOD, own_workspace=True)
    loaded = heap_bytes()
    passing_bytes = measure_passing_bytes(lambda: method.execute(inputs, outputs))
    after = heap_bytes()
    if passing_bytes > _SUSPECTED_BYTES:
        shapes = ([(array.shape, array.dtype.name) for array in arrays] for arrays in (inputs, outputs))
        alone_bytes = measure_first_step(body, *shapes, freed_bytes=weights_read_bytes)
        passing_bytes = passing_bytes if alone_bytes is None else alone_bytes
    else:
        passing_bytes = 0
    if before is None or loaded is None or after is None:
        return None
    return HeapGrowth(
        load_bytes=max(loaded - before, 0),
        step_bytes=max(after - loaded, 0),
        scratch_bytes=int(method.scratch_peak_bytes),
        passing_bytes=max(passing_bytes - int(method.scratch_peak_bytes), 0),
    )


def _native() -> ModuleType | None:
    """Return the runtime that devices use, if it is installed beside the exporter."""
    try:
        return importlib.import_module("subfleet_executorch")
    except ImportError:
        return None


def _python_growth(
    body: bytes, inputs: Sequence[_Array], outputs: Sequence[_Array], arena_bytes: int
) -> HeapGrowth | None:
    """Count with ExecuTorch's own bindings, which also take planned buffers and outputs from the heap."""
    import torch
    from executorch.runtime import Runtime

    tensors = [torch.from_numpy(array) for array in inputs]
    before = heap_bytes()
    program: Any = Runtime.get().load_program(body)  # keeps alive what its method reads
    method = program.load_method(_METHOD)
    loaded = heap_bytes()
    # As the trainer does (`subfleet.trainers.executorch_bindings`), which lets the outputs not be copied.
    method._method(tensors, clone_outputs=False)  # noqa: SLF001 - as it does
    after = heap_bytes()
    if before is None or loaded is None or after is None:
        return None
    held_bytes = sum(array.nbytes for array in outputs)
    return HeapGrowth(
        load_bytes=max(loaded - before - arena_bytes, 0),
        step_bytes=max(after - loaded - held_bytes, 0),
        scratch_bytes=0,
    )


PROGRAM_COPIES = 3
"""The program as it was read, its copy where the runtime may read it, and about as much in gaps that loading leaves."""
BASE_BYTES = 300_000
"""Memory that any training takes on a device, for Python's objects."""
GROWTH_LINES = ((1 + 1 / 8 + 1 / 100, 0), (1 + 1 / 100, 1_050_000))
"""XNNPACK's workspace with what it takes besides while it grows a little in the first step, as factors and constants:
an eighth of it up to that size, and a hundredth of it. Measured: up to 2.5 MB of 100 MB."""
_GROWING_BYTES = 1_000_000
"""Larger growth is measured, not counted, and rounded to multiples of this: the kernel's figures vary by half of it."""
_STRUCTURE_BYTES_PER_PROGRAM_BYTE = 7
"""Per byte of a program, for C libraries that do not count their heap. Measured without delegates: 6.9 to 7.1."""


def find_base_bytes(step: Step) -> int:
    """Return the constant part of a step's plan, which evaluations do without."""
    return 0 if any(value.role == "logits" for value in step.outputs) else BASE_BYTES


def plan_executorch(step: Step, *, body: bytes, arena_bytes: int, packed: Sequence[tuple[int, int]]) -> MemoryPlan:
    """Plan a program by loading it and running it once.

    Args:
        step: the step that was written.
        body: the written program.
        arena_bytes: bytes of the program's planned buffers.
        packed: rows and columns of the constant factors of XNNPACK's products.
    """
    widths: tuple[PackingWidth, ...] = get_args(PackingWidth)
    bytes_by_width = {
        width: sum(4 * rows * -(-columns // width) * width for rows, columns in packed) for width in widths
    }
    own_bytes, usual_bytes = bytes_by_width[detect_packing_width()], bytes_by_width.pop(USUAL_WIDTH)
    growth = heap_growth(body, step.inputs, step.outputs, arena_bytes=arena_bytes)
    if growth is None:
        structures = _STRUCTURE_BYTES_PER_PROGRAM_BYTE * len(body)
        growth = HeapGrowth(load_bytes=structures + own_bytes, step_bytes=0, scratch_bytes=0)
    growing_bytes = max(round(growth.passing_bytes / _GROWING_BYTES) - 1, 0) * _GROWING_BYTES
    growing_bytes += int(min(factor * growth.step_bytes + more for factor, more in GROWTH_LINES)) - growth.step_bytes
    return MemoryPlan(
        weights_bytes=weights_bytes(step),
        optimiser_bytes=optimiser_bytes(step),
        fed_bytes=fed_bytes(step),  # freed before the next batch is made
        activation_bytes=arena_bytes + round_up_count(growth.step_bytes) + growing_bytes,
        workspace_bytes=growth.scratch_bytes,
        runtime_bytes=round_up_count(max(growth.load_bytes - own_bytes, 0) + usual_bytes)
        + PROGRAM_COPIES * len(body)
        + find_base_bytes(step),
        packings=tuple(
            Packing(width=at, more_bytes=size - usual_bytes) for at, size in bytes_by_width.items() if packed
        ),
    )
