"""Methods of ExecuTorch programs: checks their values, and reads the texts in a model's file.

The runtime is used through our native binding or through its own Python bindings with PyTorch. Both run the same
programs with the same kernels. The native one (`edge_client/native`, the distribution `subfleet-executorch`) needs no
PyTorch, so a client's process takes a fraction of the memory. The thread pool belongs to the process: the last opened
program sets its size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from subfleet.protocol.class_names import MAX_NAMES_BYTES
from subfleet.protocol.errors import TrainingError
from subfleet.protocol.programs import ProgramManifest
from subfleet.trainers.prediction import Model, read_form
from subfleet.trainers.runtime import Array

METHOD = "forward"
"""The method of every program and model; a model has another one for each text in it."""
MAX_NOTE_BYTES = MAX_NAMES_BYTES
"""The largest text; names of classes are the longest."""

_DTYPES: Mapping[str, str] = {"F32": "float32", "I64": "int64", "F64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodShapes:
    """NumPy's type name and the shape of each input and output of a method, in order."""

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


def make_model(
    path: Path, shapes: MethodShapes, *, note: Callable[[str], str], infer: Callable[[Array], Array]
) -> Model:
    """Make an inference model.

    Args:
        path: its file, for messages.
        shapes: its method's inputs and outputs.
        note: returns the text of a method by name; empty if there is no such method.
        infer: runs its method on its only input.

    Raises:
        TrainingError: it is not an inference model, or a note is invalid.
    """
    inputs = shapes.inputs
    if len(inputs) != 1 or len(inputs[0][1]) < 2 or not shapes.outputs:
        raise TrainingError(f"model {str(path)!r} must have one input of shape (batch, *sample shape)")
    dtype, (batch_size, *sample_shape) = inputs[0]
    form = read_form(path, note, sample_shape=tuple(sample_shape), dtype=dtype)
    return Model(form=form, batch_size=batch_size, infer=infer)


def check_note(name: str, shapes: MethodShapes) -> None:
    """Check the inputs and outputs of a method that returns a text, before memory is allocated for it.

    Raises:
        TrainingError: it takes an input, or does not return a text of limited length.
    """
    gives = [(dtype, math.prod(shape) <= MAX_NOTE_BYTES) for dtype, shape in shapes.outputs]
    if shapes.inputs or gives != [("uint8", True)]:
        raise TrainingError(
            f"the model's method {name!r} must take no input and return at most {MAX_NOTE_BYTES} bytes; deploy it again"
        )


def check_manifest(manifest: ProgramManifest, shapes: MethodShapes) -> None:
    """Compare the inputs and outputs of a program's method with its manifest.

    Raises:
        TrainingError: they differ; the message names the first such value.
    """
    for kind, named, actual in (
        ("inputs", manifest.inputs, shapes.inputs),
        ("outputs", manifest.outputs, shapes.outputs),
    ):
        if len(named) != len(actual):
            raise TrainingError(
                f"the program has {len(actual)} {kind}, but its manifest names {len(named)}; it must be exported again"
            )
        for value, (dtype, shape) in zip(named, actual, strict=True):
            if (_DTYPES.get(value.dtype, value.dtype), value.shape) != (dtype, shape):
                raise TrainingError(
                    f"the program's {value.name!r:.80} is {dtype} of shape {shape}, but its manifest says "
                    f"{value.dtype} of shape {value.shape}; it must be exported again"
                )
