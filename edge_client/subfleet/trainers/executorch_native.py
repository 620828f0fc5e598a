"""ExecuTorch through our native binding: no PyTorch, nothing copied or allocated between steps.

Two sets of buffers take turns as what a step reads and what it writes. Where the program leaves its outputs unplanned,
kernels write straight into them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

import subfleet_executorch
from subfleet.arrays import numpy_dtype
from subfleet.protocol.errors import TrainingError
from subfleet.protocol.programs import Program, ValueInfo
from subfleet.trainers.chain_programs import LoadPiece, opened
from subfleet.trainers.executorch_runtime import KERNELS, MAX_NOTE_BYTES, METHOD, MethodShapes, check_note, misfit
from subfleet.trainers.library_pages import map_library
from subfleet.trainers.sessions import Array, RunProgram, SessionLayout
from subfleet_executorch import Arena, ExecutorchError, Method

__all__ = ["NativeRuntime"]

_Result = TypeVar("_Result")
_READABLE_BEYOND = 128
"""Bytes that the runtime's kernels may read behind a tensor; an array without them may have to be copied first."""


class NativeRuntime:
    """See `ExecutorchRuntime`."""

    def __init__(self) -> None:
        map_library(Path(subfleet_executorch.__file__).parent, without=KERNELS)

    @property
    def name(self) -> str:
        """See `ExecutorchRuntime.name`."""
        return f"ExecuTorch {subfleet_executorch.EXECUTORCH_VERSION}"

    def open_session(self, program: Program, layout: SessionLayout, threads: int) -> "NativeSession":
        """See `ExecutorchRuntime.open_session`."""
        return NativeSession(_load_step(program, threads), program.manifest.inputs, program.manifest.outputs, layout)

    def open_pieces(self, threads: int) -> "NativePieces":
        """See `ExecutorchRuntime.open_pieces`."""
        return NativePieces(threads)

    def open_model(self, body: bytes, threads: int) -> "NativeModel":
        """See `ExecutorchRuntime.open_model`."""
        return NativeModel(*_load(body, threads, None, f"{self.name} refused the model"))


class NativePieces:
    """See `PieceRuntime`. Their planned memory is one: the runtime keeps none of it from run to run."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._arena: Arena | None = None

    def open(self, chain: Program) -> LoadPiece:
        """See `PieceRuntime.open`."""
        program = opened(chain)
        return lambda name: self._load(program(name))

    def _load(self, program: Program) -> RunProgram:
        # All programs of a chain are planned with the most that one of them takes.
        self._arena = self._arena or Arena(program.manifest.planned_peak_bytes)
        # Bytes of its own: those of the whole chain would be held with them.
        method = _load_step(replace(program, body=bytes(program.body)), self._threads, self._arena)
        inputs, outputs = program.manifest.inputs, program.manifest.outputs

        def run(values: Mapping[str, Array]) -> Mapping[str, Array]:
            given = {value.name: _buffer(value) for value in outputs}
            arrays = [np.require(values[value.name], requirements="C") for value in inputs]
            _guarded(lambda: method.execute(arrays, list(given.values())))
            return given

        return run

    def rest(self) -> None:
        """See `PieceRuntime.rest`."""
        if self._arena is not None:
            self._arena.release()


class NativeModel:
    """See `Model`."""

    def __init__(self, program: subfleet_executorch.Program, method: Method) -> None:
        self._program = program
        self._method = method
        self._outputs: list[Array] = [np.empty(info.shape, info.dtype) for info in method.outputs]

    @property
    def shapes(self) -> MethodShapes:
        """See `Model.shapes`."""
        return _shapes(self._method)

    def infer(self, samples: Array) -> Array:
        """See `Model.infer`."""
        _guarded(lambda: self._method.execute([np.require(samples, requirements="C")], self._outputs))
        return np.array(self._outputs[0])

    def note(self, name: str) -> str:
        """See `Model.note`."""
        if name not in self._program.method_names:
            return ""
        method = _guarded(lambda: self._program.load_method(name, memory_limit_bytes=MAX_NOTE_BYTES))
        check_note(name, _shapes(method))
        text = np.empty(method.outputs[0].shape, np.uint8)
        _guarded(lambda: method.execute([], [text]))
        return text.tobytes().decode(errors="replace")


class NativeSession:
    """See `StepSession`."""

    def __init__(
        self, method: Method, inputs: tuple[ValueInfo, ...], outputs: tuple[ValueInfo, ...], layout: SessionLayout
    ) -> None:
        self._method = method
        self._inputs = [value.name for value in inputs]
        self._outputs = [value.name for value in outputs]
        self._layout = layout
        given_back = set(layout.carried.values())
        self._read = tuple(value for value in outputs if value.name not in given_back)
        self._sets: list[dict[str, Array]] = []
        self._results: dict[str, Array] = {}
        self._constants: Mapping[str, Array] = {}

    def begin(self, stored: Mapping[str, Array], constants: Mapping[str, Array]) -> None:
        """See `StepSession.begin`."""
        carried = (*self._layout.stored, *self._layout.zeroed)
        first, second = ({value.name: _buffer(value) for value in carried} for _ in range(2))
        for name, array in stored.items():
            first[name][...] = array
        for value in self._layout.zeroed:
            first[value.name][...] = 0
        self._sets = [first, second]
        self._results = {value.name: _buffer(value) for value in self._read}
        self._constants = constants

    def step(self, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
        """See `StepSession.step`."""
        del last
        before, after = self._sets
        given = {**self._constants, **before, **fed}
        inputs = [given[name] if given[name].flags.c_contiguous else given[name].copy() for name in self._inputs]
        written = {**self._results, **{new: after[old] for old, new in self._layout.carried.items()}}
        outputs = [written[name] for name in self._outputs]
        _guarded(lambda: self._method.execute(inputs, outputs))
        self._sets = [after, before]
        return {name: self._results[name] for name in self._layout.read}

    def gradients(self) -> Mapping[str, Array]:
        """See `StepSession.gradients`."""
        return {value.tensor: np.array(self._sets[0][value.name]) for value in self._layout.gradients}

    def finish(self) -> Mapping[str, Array]:
        """See `StepSession.finish`."""
        newest = self._sets[0]
        self._sets, self._results, self._constants = [], {}, {}
        return {value.name: newest[value.name] for value in self._layout.stored}


def _shapes(method: Method) -> MethodShapes:
    return MethodShapes(
        inputs=tuple((info.dtype, info.shape) for info in method.inputs),
        outputs=tuple((info.dtype, info.shape) for info in method.outputs),
    )


def _load_step(program: Program, threads: int, arena: Arena | None = None) -> Method:
    writers = ", ".join(f"{tool} {version}" for tool, version in sorted(program.manifest.versions.items()))
    runtime = f"ExecuTorch {subfleet_executorch.EXECUTORCH_VERSION}"
    what = f"{runtime} refused the program{f' that {writers} wrote' if writers else ''}"
    # The agent compared what was planned with what is free; the buffers may take no more than the manifest says.
    _, method = _load(program.body, threads, program.manifest.planned_peak_bytes, what, arena)
    wrong = misfit(program.manifest, _shapes(method))
    if wrong:
        raise TrainingError(f"{wrong}; it must be exported again")
    return method


def _load(
    body: bytes | memoryview, threads: int, memory_limit_bytes: int | None, what: str, arena: Arena | None = None
) -> tuple[subfleet_executorch.Program, Method]:
    def load() -> tuple[subfleet_executorch.Program, Method]:
        # It fails while another session is loaded that runs on another number of threads: they share one pool.
        subfleet_executorch.set_thread_count(threads)
        program = subfleet_executorch.Program(body)
        return program, program.load_method(METHOD, memory_limit_bytes=memory_limit_bytes, arena=arena)

    return _guarded(load, what)


def _guarded(call: Callable[[], _Result], what: str = "ExecuTorch refused the program") -> _Result:
    try:
        return call()
    except ExecutorchError as error:
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"{what} ({error.code}: {reason:.300}); it must be exported again") from error


def _buffer(value: ValueInfo) -> Array:
    """Memory for a value, with some more behind it."""
    dtype = numpy_dtype(value.dtype)
    size_bytes = int(np.prod(value.shape)) * dtype.itemsize
    padded = np.empty(size_bytes + _READABLE_BEYOND, np.uint8)
    return padded[:size_bytes].view(dtype).reshape(value.shape)
