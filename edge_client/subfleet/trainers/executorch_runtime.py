"""The seam to ExecuTorch: our native binding, or its own Python bindings with PyTorch.

Both run the same programs with the same kernels. The native one (`edge_client/native`, the distribution
`subfleet-executorch`) needs no PyTorch, so a client's process takes a fraction of the memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from subfleet.protocol.class_names import MAX_NAMES_BYTES
from subfleet.protocol.errors import TrainingError
from subfleet.protocol.programs import Program, ProgramManifest
from subfleet.trainers.chain_programs import PieceRuntime
from subfleet.trainers.sessions import Array, SessionLayout, StepSession

__all__ = ["KERNELS", "MAX_NOTE_BYTES", "METHOD", "ExecutorchRuntime", "MethodShapes", "Model", "check_note", "misfit"]

# Most programs run in XNNPACK. Measured on the small CNN: 72 MB resident with all kernels mapped, 65 MB without.
KERNELS = "kernels"
"""Part of the name of the libraries of which a program needs little."""
METHOD = "forward"
"""The method of every program and model; a model has one more for each text that it carries."""
MAX_NOTE_BYTES = MAX_NAMES_BYTES
"""Of such a text: names of classes are the longest."""

_DTYPES: Mapping[str, str] = {"F32": "float32", "I64": "int64", "F64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodShapes:
    """NumPy's type name and the shape of everything that a method takes and gives, in order."""

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


class Model(Protocol):
    """A loaded method that is run for its first output."""

    @property
    def shapes(self) -> MethodShapes:
        """What it takes and gives."""
        ...

    def infer(self, samples: Array) -> Array:
        """Run once with one input; the output is the caller's.

        Raises:
            TrainingError: the runtime failed.
        """
        ...

    def note(self, name: str) -> str:
        """The text that a method of this name gives, a tensor of bytes; empty where there is no such method.

        Raises:
            TrainingError: the runtime failed, or the method gives something else.
        """
        ...


class ExecutorchRuntime(Protocol):
    """One way to run ExecuTorch programs. The pool of threads belongs to the process: what was opened last sets it."""

    @property
    def name(self) -> str:
        """What runs, for people."""
        ...

    def open_session(self, program: Program, layout: SessionLayout, threads: int) -> StepSession:
        """Load a training program.

        Raises:
            TrainingError: the runtime refuses it, or cannot set the number of threads.
            MemoryError: the system gave no memory.
        """
        ...

    def open_pieces(self, threads: int) -> PieceRuntime:
        """What runs the programs of chains."""
        ...

    def open_model(self, body: bytes, threads: int) -> Model:
        """Load an inference model; raises as `open_session`."""
        ...


def check_note(name: str, shapes: MethodShapes) -> None:
    """Look at what a method that gives a text takes and gives, before anything is held for it.

    Raises:
        TrainingError: it takes something, or gives something else than a text of limited length.
    """
    gives = [(dtype, math.prod(shape) <= MAX_NOTE_BYTES) for dtype, shape in shapes.outputs]
    if shapes.inputs or gives != [("uint8", True)]:
        raise TrainingError(
            f"the model's method {name!r} must take nothing and give at most {MAX_NOTE_BYTES} bytes; deploy it again"
        )


def misfit(manifest: ProgramManifest, shapes: MethodShapes) -> str:
    """The first value of a manifest that is not as the program's method has it, in words; empty where all are."""
    for kind, named, found in (
        ("inputs", manifest.inputs, shapes.inputs),
        ("outputs", manifest.outputs, shapes.outputs),
    ):
        if len(named) != len(found):
            return f"the program has {len(found)} {kind}, but its manifest names {len(named)}"
        for value, (dtype, shape) in zip(named, found, strict=True):
            if (_DTYPES.get(value.dtype, value.dtype), value.shape) != (dtype, shape):
                return (
                    f"the program's {value.name!r:.80} is {dtype} of shape {shape}, but its manifest says "
                    f"{value.dtype} of shape {value.shape}"
                )
    return ""
