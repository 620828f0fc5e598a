"""ExecuTorch through our native binding: no PyTorch, nothing copied between steps.

If a program leaves its outputs unplanned, kernels write directly into the session's buffers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

import subfleet_executorch
from subfleet.arrays import numpy_dtype
from subfleet.protocol.errors import TrainingError
from subfleet.protocol.programs import Program
from subfleet.trainers.executorch_methods import (
    MAX_NOTE_BYTES,
    METHOD,
    MethodShapes,
    check_manifest,
    check_note,
    make_model,
)
from subfleet.trainers.prediction import Model
from subfleet.trainers.runtime import Array, Operands, RunProgram, make_buffer, unpack
from subfleet_executorch import Arena, ExecutorchError, Method

_Result = TypeVar("_Result")
_NAME = f"ExecuTorch {subfleet_executorch.EXECUTORCH_VERSION}"


class NativeRuntime:
    """See `Runtime`."""

    @property
    def name(self) -> str:
        """See `Runtime.name`."""
        return _NAME

    def programs(self, threads: int) -> "_NativePrograms":
        """See `Runtime.programs`."""
        return _NativePrograms(threads)

    def open_model(self, path: Path, body: bytes, threads: int) -> Model:
        """See `Runtime.open_model`."""
        program, method = _load(body, threads, None, f"{_NAME} refused the model")
        outputs: list[Array] = [np.empty(info.shape, info.dtype) for info in method.outputs]

        def infer(samples: Array) -> Array:
            _call_guarded(lambda: method.execute([np.require(samples, requirements="C")], outputs))
            return np.array(outputs[0])

        return make_model(path, _read_shapes(method), note=lambda name: _read_note(program, name), infer=infer)


class _NativePrograms:
    """See `Programs`. The programs of a chain share their planned memory: nothing in it is kept between runs."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._arena: Arena | None = None

    def open(self, package: Program) -> Callable[[str], RunProgram]:
        """See `Programs.open`."""
        program = unpack(package)
        return lambda name: self._load(program(name), chained=package.manifest.chain is not None)

    def hold(self, array: Array) -> Array:
        """See `Programs.hold`."""
        return array

    def twin(self, value: Array) -> Array:
        """See `Programs.twin`."""
        return make_buffer(value.shape, value.dtype)

    def array(self, value: Array) -> Array:
        """See `Programs.array`."""
        return value

    def _load(self, program: Program, *, chained: bool) -> RunProgram:
        if chained:
            # All programs of a chain are planned with the memory of the largest.
            self._arena = self._arena or Arena(program.manifest.planned_peak_bytes)
            # A copy, since a view would keep the whole chain's bytes.
            program = replace(program, body=bytes(program.body))
        arena = self._arena
        method = _load_step(program, self._threads, arena)
        inputs = [value.name for value in program.manifest.inputs]
        outputs = [(value.name, value.shape, numpy_dtype(value.dtype)) for value in program.manifest.outputs]

        def run(operands: Operands, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
            values, spare = {**operands.values, **fed}, operands.spare
            buffers = {
                name: spare[name] if name in spare else make_buffer(shape, dtype) for name, shape, dtype in outputs
            }
            arrays = [values[name] if values[name].flags.c_contiguous else values[name].copy() for name in inputs]
            _call_guarded(lambda: method.execute(arrays, list(buffers.values())))
            if last and arena is not None:
                arena.release()
            return buffers

        return run


def _read_note(program: subfleet_executorch.Program, name: str) -> str:
    if name not in program.method_names:
        return ""
    method = _call_guarded(lambda: program.load_method(name, memory_limit_bytes=MAX_NOTE_BYTES))
    check_note(name, _read_shapes(method))
    text = np.empty(method.outputs[0].shape, np.uint8)
    _call_guarded(lambda: method.execute([], [text]))
    return text.tobytes().decode(errors="replace")


def _read_shapes(method: Method) -> MethodShapes:
    return MethodShapes(
        inputs=tuple((info.dtype, info.shape) for info in method.inputs),
        outputs=tuple((info.dtype, info.shape) for info in method.outputs),
    )


def _load_step(program: Program, threads: int, arena: Arena | None) -> Method:
    writers = ", ".join(f"{tool} {version}" for tool, version in sorted(program.manifest.versions.items()))
    failure = f"{_NAME} refused the program{f' that {writers} wrote' if writers else ''}"
    # The agent checked the plan against free memory, so the buffers may not exceed the manifest's plan.
    _, method = _load(program.body, threads, program.manifest.planned_peak_bytes, failure, arena)
    check_manifest(program.manifest, _read_shapes(method))
    return method


def _load(
    body: bytes | memoryview, threads: int, memory_limit_bytes: int | None, failure: str, arena: Arena | None = None
) -> tuple[subfleet_executorch.Program, Method]:
    def load() -> tuple[subfleet_executorch.Program, Method]:
        # It fails while a session with another number of threads is loaded: they share one pool.
        subfleet_executorch.set_thread_count(threads)
        program = subfleet_executorch.Program(body)
        return program, program.load_method(METHOD, memory_limit_bytes=memory_limit_bytes, arena=arena)

    return _call_guarded(load, failure)


def _call_guarded(call: Callable[[], _Result], failure: str = "ExecuTorch refused the program") -> _Result:
    try:
        return call()
    except ExecutorchError as error:
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"{failure} ({error.code}: {reason:.300}); it must be exported again") from error
