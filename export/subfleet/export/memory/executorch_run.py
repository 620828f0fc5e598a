"""What ExecuTorch takes for a program beside the buffers that the program itself plans: counted, not guessed.

The runtime's structures, XNNPACK's packed operators and its workspace all come from the C library's heap, and stay
there from step to step. So the program is loaded and run once, and the heap is counted before and after.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.export.memory.heap import heap_bytes
from subfleet.protocol.programs import ValueInfo

__all__ = ["HeapGrowth", "heap_growth"]

_Array = npt.NDArray[np.generic]
_METHOD = "forward"
_NUMPY: Mapping[str, type[np.generic]] = MappingProxyType({"F32": np.float32, "F64": np.float64, "I64": np.int64})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapGrowth:
    """What a program holds of the heap, without its planned buffers and the caller's arrays.

    Attributes:
        load_bytes: structures and operators, once it is loaded.
        step_bytes: what its first step takes and keeps: XNNPACK's workspace, in which delegated parts keep tensors.
        scratch_bytes: the most that kernels took at once and gave back.
    """

    load_bytes: int
    step_bytes: int
    scratch_bytes: int


def heap_growth(
    body: bytes, inputs: Sequence[ValueInfo], outputs: Sequence[ValueInfo], *, arena_bytes: int
) -> HeapGrowth | None:
    """Load a program, run it once on zeros, and count.

    Args:
        body: of the program.
        inputs: that it takes.
        outputs: that it gives.
        arena_bytes: of its planned buffers, as the program itself says.

    Returns:
        What it holds; None where the C library does not count its heap.
    """
    given = [np.zeros(value.shape, _NUMPY[value.dtype]) for value in inputs]
    taken = [np.zeros(value.shape, _NUMPY[value.dtype]) for value in outputs]
    native = _native()
    return _native_growth(native, body, given, taken) if native else _python_growth(body, given, taken, arena_bytes)


def _native_growth(
    native: ModuleType, body: bytes, given: Sequence[_Array], taken: Sequence[_Array]
) -> HeapGrowth | None:
    native.set_thread_count(1)
    before = heap_bytes()
    method = native.Program(body).load_method(_METHOD)
    loaded = heap_bytes()
    method.execute(given, taken)
    after = heap_bytes()
    if before is None or loaded is None or after is None:
        return None
    return HeapGrowth(
        load_bytes=max(loaded - before, 0),
        step_bytes=max(after - loaded, 0),
        scratch_bytes=int(method.scratch_peak_bytes),
    )


def _native() -> ModuleType | None:
    """The runtime that devices use, where it is installed beside the exporter."""
    try:
        return importlib.import_module("subfleet_executorch")
    except ImportError:
        return None


def _python_growth(
    body: bytes, given: Sequence[_Array], taken: Sequence[_Array], arena_bytes: int
) -> HeapGrowth | None:
    """The same with ExecuTorch's own bindings, which take planned buffers and outputs from the heap as well."""
    import torch
    from executorch.runtime import Runtime

    tensors = [torch.from_numpy(array) for array in given]
    before = heap_bytes()
    program: Any = Runtime.get().load_program(body)  # it owns what its method reads
    method = program.load_method(_METHOD)
    loaded = heap_bytes()
    # As the trainer does (`subfleet.trainers.executorch_bindings`), which has no copies of the outputs made.
    method._method(tensors, clone_outputs=False)  # noqa: SLF001 - as it does
    after = heap_bytes()
    if before is None or loaded is None or after is None:
        return None
    held_bytes = sum(array.nbytes for array in taken)
    return HeapGrowth(
        load_bytes=max(loaded - before - arena_bytes, 0),
        step_bytes=max(after - loaded - held_bytes, 0),
        scratch_bytes=0,
    )
