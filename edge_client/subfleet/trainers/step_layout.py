"""How the values of a training program fit together: what is fed, what is carried from step to step, what is read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramManifest, Role, ValueInfo

__all__ = ["COEFFICIENTS", "StepLayout", "step_layout"]

COEFFICIENTS = ("proximal_mu", "distillation_weight")
"""Fields of `TrainingSettings` that a program may take as scalars of the same name."""

_CARRIED: tuple[Role, ...] = ("parameter", "buffer", "optimiser_state", "gradient")
_STORED: tuple[Role, ...] = ("parameter", "buffer")
_SCALARS: tuple[Role, ...] = ("learning_rate", "coefficient", "batch_weight", "apply")
_SUMS: tuple[Role, ...] = ("loss", "correct", "count", "squares")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The values of a training step by what they are for; see `Role` for their meaning.

    Attributes:
        batch_size: samples that the program takes at once.
        input: the samples.
        label: their classes or targets.
        sample_mask: which of them are real.
        learning_rate: a scalar.
        random: fresh numbers for each step.
        coefficients: scalars, by the names in `COEFFICIENTS`.
        class_mask: which classes the client holds; None where the program asks for none.
        anchors: the first weights once more.
        batch_weight: a scalar of a program that sums gradients over parts of a batch; None in others.
        apply: as `batch_weight`.
        stored: parameters and buffers, as inputs: what weights and updates consist of. Each has a tensor name of its
            own.
        zeroed: optimiser states and gradients, as inputs, which start at zero.
        carried: name of each stored and zeroed value's input to the name of the output that holds it after the step.
        loss: name of the output.
        correct: name of the output.
        count: name of the output; empty where the program has none, and all labels of real samples count.
        squares: name of the output; empty where the program has none.
    """

    batch_size: int
    input: ValueInfo
    label: ValueInfo
    sample_mask: ValueInfo
    learning_rate: ValueInfo
    random: tuple[ValueInfo, ...]
    coefficients: tuple[ValueInfo, ...]
    class_mask: ValueInfo | None
    anchors: tuple[ValueInfo, ...]
    batch_weight: ValueInfo | None
    apply: ValueInfo | None
    stored: tuple[ValueInfo, ...]
    zeroed: tuple[ValueInfo, ...]
    carried: Mapping[str, str]
    loss: str
    correct: str
    count: str
    squares: str

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the outputs that are read after every step."""
        return tuple(name for name in (self.loss, self.correct, self.count, self.squares) if name)

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the stored tensors that are no weights."""
        return frozenset(value.tensor for value in self.stored if value.role == "buffer")

    @property
    def gradients(self) -> tuple[ValueInfo, ...]:
        """Gradients that are summed over the parts of a batch, as inputs; none in programs that sum none."""
        return tuple(value for value in self.zeroed if value.role == "gradient")

    @property
    def accumulates(self) -> bool:
        """Whether the program sums gradients over the parts of a batch."""
        return self.apply is not None


def step_layout(manifest: ProgramManifest) -> StepLayout:
    """Read the layout of a training program from its manifest.

    Raises:
        ProtocolError: it is not for training, or its values do not make a step that can be repeated.
    """
    if manifest.purpose != "train" or manifest.batch_size < 1:
        raise ProtocolError(
            f"program {manifest.program_id!r:.80} is to {manifest.purpose!r:.20} with batches of "
            f"{manifest.batch_size}, but must be to 'train' with batches of 1 or more"
        )
    _check_names(manifest)
    for value in manifest.inputs:
        _check_fed(value, manifest.batch_size)
    for value in manifest.outputs:
        _check_read(value)
    batch_weight, apply = _optional(manifest.inputs, "batch_weight"), _optional(manifest.inputs, "apply")
    if (batch_weight is None) != (apply is None):
        raise ProtocolError("a program that sums gradients must take both 'batch_weight' and 'apply', but lacks one")
    stored = _of(manifest.inputs, lambda value: value.role in _STORED)
    _check_tensors(stored, _of(manifest.inputs, lambda value: value.role == "anchor"))
    count, squares = _optional(manifest.outputs, "count"), _optional(manifest.outputs, "squares")
    return StepLayout(
        batch_size=manifest.batch_size,
        input=_only(manifest.inputs, "input"),
        label=_only(manifest.inputs, "label"),
        sample_mask=_only(manifest.inputs, "sample_mask"),
        learning_rate=_only(manifest.inputs, "learning_rate"),
        random=_of(manifest.inputs, lambda value: value.role == "random"),
        coefficients=_of(manifest.inputs, lambda value: value.role == "coefficient"),
        class_mask=_optional(manifest.inputs, "class_mask"),
        anchors=_of(manifest.inputs, lambda value: value.role == "anchor"),
        batch_weight=batch_weight,
        apply=apply,
        stored=stored,
        zeroed=_of(manifest.inputs, lambda value: value.role in _CARRIED and value.role not in _STORED),
        carried=_carried(manifest),
        loss=_only(manifest.outputs, "loss").name,
        correct=_only(manifest.outputs, "correct").name,
        count="" if count is None else count.name,
        squares="" if squares is None else squares.name,
    )


def _of(values: Iterable[ValueInfo], wanted: Callable[[ValueInfo], bool]) -> tuple[ValueInfo, ...]:
    return tuple(value for value in values if wanted(value))


def _only(values: Iterable[ValueInfo], role: str) -> ValueInfo:
    found = _optional(values, role)
    if found is None:
        raise ProtocolError(f"a training program has no value of role {role!r}, but must have 1")
    return found


def _optional(values: Iterable[ValueInfo], role: str) -> ValueInfo | None:
    found = _of(values, lambda value: value.role == role)
    if len(found) > 1:
        raise ProtocolError(f"a training program has {len(found)} values of role {role!r}, but may have 1")
    return found[0] if found else None


def _check_names(manifest: ProgramManifest) -> None:
    for kind, values in (("input", manifest.inputs), ("output", manifest.outputs)):
        names = [value.name for value in values]
        if len(set(names)) != len(names):
            raise ProtocolError(f"a training program names an {kind} twice, but each must have a name of its own")


def _check_fed(value: ValueInfo, batch_size: int) -> None:
    types = _DTYPES.get(value.role)
    fits = types is None or value.dtype in types
    if value.role in (*_SCALARS, *_SUMS):
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


def _check_tensors(stored: Iterable[ValueInfo], anchors: Iterable[ValueInfo]) -> None:
    parameters = {value.tensor: value for value in stored if value.role == "parameter"}
    names = [value.tensor for value in stored]
    if not parameters or "" in names or len(set(names)) != len(names):
        raise ProtocolError("a training program must have one parameter or more, each of a tensor of its own")
    for anchor in anchors:
        own = parameters.get(anchor.tensor)
        if own is None or (own.dtype, own.shape) != (anchor.dtype, anchor.shape):
            raise ProtocolError(
                f"the program's anchor {anchor.name!r:.80} of shape {anchor.shape} must be of a parameter's shape"
            )


def _carried(manifest: ProgramManifest) -> Mapping[str, str]:
    before = _sorted_carried(manifest.inputs)
    after = _sorted_carried(manifest.outputs)
    if [_kind(value) for value in before] != [_kind(value) for value in after]:
        raise ProtocolError(
            "a training program must give back every parameter, buffer, optimiser state and gradient that it takes, "
            "as it took it"
        )
    return MappingProxyType({old.name: new.name for old, new in zip(before, after, strict=True)})


def _sorted_carried(values: Iterable[ValueInfo]) -> list[ValueInfo]:
    # The sort is stable: where an optimiser keeps two states of a tensor, the first goes to the first.
    return sorted((value for value in values if value.role in _CARRIED), key=lambda value: (value.role, value.tensor))


def _kind(value: ValueInfo) -> tuple[str, str, str, tuple[int, ...]]:
    return value.role, value.tensor, value.dtype, value.shape
