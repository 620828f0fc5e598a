"""The seam to a runtime: it loads programs, and runs them one at a time on values by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from subfleet.arrays import numpy_dtype
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import Program, ValueInfo
from subfleet.protocol.tensors import decode_container
from subfleet.trainers.prediction import Model

Array = npt.NDArray[np.generic]

Value = Any
"""An array, or the runtime's form of it: a tensor on another device, or an array that it has registered."""

_READABLE_BEYOND = 128
"""Bytes that ExecuTorch's kernels may read after a tensor; an array without them may have to be copied first."""


@dataclass(slots=True, kw_only=True, eq=False)
class Operands:
    """The inputs of a program that are not fed.

    Attributes:
        values: inputs by name.
        spare: by names of outputs, the memory to write them into, made by `Programs.twin`.
        prepared: the runtime's form of them, for the next run with the same operands.
    """

    values: Mapping[str, Value]
    spare: Mapping[str, Value]
    prepared: Any = None


class RunProgram(Protocol):
    """A loaded program."""

    def __call__(self, operands: Operands, fed: Mapping[str, Value], *, last: bool = False) -> Mapping[str, Value]:
        """Run it once.

        Args:
            operands: inputs by name, which may be used in later runs.
            fed: all other inputs by name.
            last: whether it is the job's last run, after which memory for runs may be released.

        Returns:
            Its outputs by name. Those in `spare` are its values; all others are valid until the program runs with the
            same operands again.

        Raises:
            TrainingError: the runtime failed.
            MemoryError: the system refused memory.
        """
        ...


class Programs(Protocol):
    """The loaded programs of one package (a plain program or a chain), and their values."""

    def open(self, package: Program) -> Callable[[str], RunProgram]:
        """Return a function that loads single programs of the package by name; see `unpack`.

        Raises:
            TrainingError: the runtime refuses the package, or in a call the program.
            ProtocolError: the package's body does not match its manifest.
        """
        ...

    def hold(self, array: Array) -> Value:
        """Hand an array to the runtime as an input of programs. The runtime owns it and may change it in place."""
        ...

    def twin(self, value: Value) -> Value | None:
        """Make memory for the next state of a held value.

        That is a second buffer, the value itself if outputs are copied, or None if outputs are new values.
        """
        ...

    def array(self, value: Value) -> Array:
        """Return a held value or an output as an array, which may share its memory."""
        ...


class Runtime(Protocol):
    """A loaded runtime, which runs programs and models."""

    @property
    def name(self) -> str:
        """Name, version and provider, for messages."""
        ...

    def programs(self, threads: int) -> Programs:
        """Make the container for the programs of one package, which run on this number of threads."""
        ...

    def open_model(self, path: Path, body: bytes, threads: int) -> Model:
        """Load an inference model.

        Args:
            path: its file, for messages.
            body: content of the file.
            threads: number of threads.

        Raises:
            TrainingError: the runtime refuses it, or it is not an inference model.
            MemoryError: the system refused memory.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeKind:
    """A loadable runtime.

    Attributes:
        target: the kind of program that it runs.
        suffix: file ending of its inference models.
        providers: its providers, the usual one first.
        load: imports the runtime and triggers all loading that does not depend on programs. Takes the provider; raises
            MissingExtraError if the runtime is not installed, BrokenError if it cannot be loaded, and ConfigError if
            it lacks the provider.
        reloads: whether it is loaded again for each job, if that takes no time, so that code pages that the system
            dropped meanwhile do not count for the job.
    """

    target: str
    suffix: str
    providers: tuple[str, ...]
    load: Callable[[str], Runtime]
    reloads: bool = False


def unpack(package: Program) -> Callable[[str], Program]:
    """Return a function that gets the programs of a package by name; a plain program has any name.

    Each program of a chain is planned with the memory of the largest one.

    Raises:
        ProtocolError: the chain's body is not a container, or in a call lacks the program.
    """
    chain = package.manifest.chain
    if chain is None:
        return lambda _: package
    bodies = decode_container(package.body).tensors
    pieces = {piece.name: piece for piece in package.manifest.pieces}
    memory = MemoryPlan(
        activation_bytes=max(operator.peak_bytes for link in chain.links for operator in link.operators)
    )

    def program(name: str) -> Program:
        if name not in bodies:
            raise ProtocolError(f"the chain's body has no program {name!r:.120}; it must be exported again")
        inputs, outputs = pieces[name].inputs, pieces[name].outputs
        manifest = replace(package.manifest, inputs=inputs, outputs=outputs, memory=memory, chain=None, pieces=())
        return Program(manifest=manifest, body=bodies[name].data)

    return program


RunArrays = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Runs a program on arrays; the outputs are valid until it runs again. Raises TrainingError."""

LoadProgram = Callable[[Program, int], RunArrays]
"""Loads a program for a number of threads; raises TrainingError if the runtime refuses it."""


class CopiedPrograms:
    """See `Programs`, for a runtime that can only run programs on arrays."""

    def __init__(self, load: LoadProgram, threads: int) -> None:
        self._load = load
        self._threads = threads

    def open(self, package: Program) -> Callable[[str], RunProgram]:
        """See `Programs.open`."""
        program = unpack(package)
        return lambda name: self._make_copying(self._load(program(name), self._threads))

    def hold(self, array: Array) -> Array:
        """See `Programs.hold`."""
        return array

    def twin(self, value: Array) -> Array:
        """See `Programs.twin`."""
        return value

    def array(self, value: Array) -> Array:
        """See `Programs.array`."""
        return value

    def _make_copying(self, run: RunArrays) -> RunProgram:
        def copy(operands: Operands, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
            del last
            spare, outputs = operands.spare, run({**operands.values, **fed})
            for name, array in spare.items():
                array[...] = outputs[name]
            return {name: spare[name] if name in spare else np.array(array) for name, array in outputs.items()}

        return copy


def make_buffer(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Make an uninitialised array, followed by some readable memory."""
    return _make_padded(np.empty, shape, np.dtype(dtype))


def make_zeros(value: ValueInfo) -> Array:
    """Make a buffer of zeros for a value; the system allocates its memory only on the first write."""
    return _make_padded(np.zeros, value.shape, numpy_dtype(value.dtype))


def copy_array(array: Array) -> Array:
    """Copy an array to a new buffer."""
    own = make_buffer(array.shape, array.dtype)
    own[...] = array
    return own


def _make_padded(make: Callable[..., npt.NDArray[np.uint8]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size_bytes = prod(shape) * dtype.itemsize
    padded = make(size_bytes + _READABLE_BEYOND, np.uint8)
    return padded[:size_bytes].view(dtype).reshape(shape)
