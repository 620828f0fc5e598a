"""Finds values of a program by role, and checks that a trainer can feed and read them."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramManifest, Role, ValueInfo

__all__ = ["COEFFICIENTS", "check_tensors", "check_values", "get_one", "get_optional", "select_values"]

COEFFICIENTS = ("proximal_mu", "distillation_weight")
"""Fields of `TrainingSettings` that a program may take as scalars of the same name."""

_SUMS: tuple[Role, ...] = ("loss", "correct", "count", "squares")
_SCALARS: tuple[Role, ...] = ("learning_rate", "coefficient", "batch_weight", "apply", *_SUMS)
_NUMBERS = ("F32",)
_NUMBERS_OR_INDICES = ("F32", "I64")
_DTYPES: Mapping[Role, tuple[str, ...]] = MappingProxyType(
    {
        "input": _NUMBERS_OR_INDICES,
        "label": _NUMBERS_OR_INDICES,
        "sample_mask": _NUMBERS,
        "learning_rate": _NUMBERS,
        "random": _NUMBERS,
        "class_mask": _NUMBERS,
        "coefficient": _NUMBERS,
        "batch_weight": _NUMBERS,
        "apply": _NUMBERS,
    }
)
"""Types of what is fed; what is carried may be of any type."""


def select_values(values: Iterable[ValueInfo], wanted: Callable[[ValueInfo], bool]) -> tuple[ValueInfo, ...]:
    """Select values in order."""
    return tuple(value for value in values if wanted(value))


def get_one(values: Iterable[ValueInfo], role: Role) -> ValueInfo:
    """Get the only value of a role; raises ProtocolError if there is none or more than one."""
    found = get_optional(values, role)
    if found is None:
        raise ProtocolError(f"the program has no value of role {role!r}, but must have 1")
    return found


def get_optional(values: Iterable[ValueInfo], role: Role) -> ValueInfo | None:
    """Get the only value of a role, or None; raises ProtocolError if there are several."""
    found = select_values(values, lambda value: value.role == role)
    if len(found) > 1:
        raise ProtocolError(f"the program has {len(found)} values of role {role!r}, but may have 1")
    return found[0] if found else None


def check_values(manifest: ProgramManifest, purpose: str) -> None:
    """Check the purpose of a program, and that each of its values can be fed or read.

    Raises:
        ProtocolError: one cannot.
    """
    if manifest.purpose != purpose or manifest.batch_size < 1:
        raise ProtocolError(
            f"program {manifest.program_id!r:.80} is to {manifest.purpose!r:.20} with batches of "
            f"{manifest.batch_size}, but must be to {purpose!r} with batches of 1 or more"
        )
    _check_names(manifest)
    for value in manifest.inputs:
        _check_fed(value, manifest.batch_size)
    for value in manifest.outputs:
        _check_read(value)


def check_tensors(weights: Iterable[ValueInfo]) -> None:
    """Check that no two parameters or buffers share a tensor; raises ProtocolError."""
    found = list(weights)
    names = [value.tensor for value in found]
    if not any(value.role == "parameter" for value in found) or "" in names or len(set(names)) != len(names):
        raise ProtocolError("a program must have one parameter or more, each of a tensor of its own")


def _check_names(manifest: ProgramManifest) -> None:
    for kind, values in (("input", manifest.inputs), ("output", manifest.outputs)):
        names = [value.name for value in values]
        if len(set(names)) != len(names):
            raise ProtocolError(f"the program names an {kind} twice, but each must have a name of its own")


def _check_fed(value: ValueInfo, batch_size: int) -> None:
    types = _DTYPES.get(value.role)
    fits = types is None or value.dtype in types
    if value.role in _SCALARS:
        fits = fits and value.shape == ()
    if value.role in ("input", "label", "sample_mask"):
        fits = fits and value.shape[:1] == (batch_size,)
    if value.role in ("sample_mask", "class_mask"):
        fits = fits and len(value.shape) == 1
    if value.role == "coefficient":
        fits = fits and value.name in COEFFICIENTS
    if not fits or value.role in (*_SUMS, "logits"):
        raise ProtocolError(
            f"the program's input {value.name!r:.80} is {value.role} of type {value.dtype} and shape {value.shape}, "
            f"which nobody can feed with batches of {batch_size}"
        )


def _check_read(value: ValueInfo) -> None:
    if value.role in _SUMS and (value.dtype != "F32" or value.shape):
        raise ProtocolError(
            f"the program's {value.role} is {value.dtype} of shape {value.shape}, but must be a scalar of type F32"
        )
