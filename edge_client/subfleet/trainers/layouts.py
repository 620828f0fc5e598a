"""The values of training and evaluation programs by purpose: inputs to feed, values to carry, outputs to read."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramManifest, Role, ValueInfo

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
"""Types of fed values; carried values may have any type."""


def select_values(values: Iterable[ValueInfo], accepts: Callable[[ValueInfo], bool]) -> tuple[ValueInfo, ...]:
    """Select values in order."""
    return tuple(value for value in values if accepts(value))


def get_required(values: Iterable[ValueInfo], role: Role) -> ValueInfo:
    """Get the only value of a role; raises ProtocolError if there is none or more than one."""
    value = get_optional(values, role)
    if value is None:
        raise ProtocolError(f"the program has no value of role {role!r}, but must have 1")
    return value


def get_optional(values: Iterable[ValueInfo], role: Role) -> ValueInfo | None:
    """Get the only value of a role, or None; raises ProtocolError if there are several."""
    selected = select_values(values, lambda value: value.role == role)
    if len(selected) > 1:
        raise ProtocolError(f"the program has {len(selected)} values of role {role!r}, but may have 1")
    return selected[0] if selected else None


def check_values(manifest: ProgramManifest, purpose: str) -> None:
    """Check the purpose of a program, and that each of its values can be fed or read.

    Raises:
        ProtocolError: a value cannot.
    """
    if manifest.purpose != purpose or manifest.batch_size < 1:
        raise ProtocolError(
            f"program {manifest.program_id!r:.80} has purpose {manifest.purpose!r:.20} and batch size "
            f"{manifest.batch_size}, but must have purpose {purpose!r} and batch size 1 or more"
        )
    _check_names(manifest)
    for value in manifest.inputs:
        _check_fed(value, manifest.batch_size)
    for value in manifest.outputs:
        _check_read(value)


def check_tensors(weights: Iterable[ValueInfo]) -> None:
    """Check that no two parameters or buffers share a tensor; raises ProtocolError."""
    stored = list(weights)
    names = [value.tensor for value in stored]
    if not any(value.role == "parameter" for value in stored) or "" in names or len(set(names)) != len(names):
        raise ProtocolError("a program must have at least one parameter, and each must have its own tensor")


def _check_names(manifest: ProgramManifest) -> None:
    for kind, values in (("input", manifest.inputs), ("output", manifest.outputs)):
        names = [value.name for value in values]
        if len(set(names)) != len(names):
            raise ProtocolError(f"the program names an {kind} twice, but names must be unique")


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
            f"which cannot be fed with batches of {batch_size}"
        )


def _check_read(value: ValueInfo) -> None:
    if value.role in _SUMS and (value.dtype != "F32" or value.shape):
        raise ProtocolError(
            f"the program's {value.role} is {value.dtype} of shape {value.shape}, but must be a scalar of type F32"
        )


_CARRIED: tuple[Role, ...] = ("parameter", "buffer", "optimiser_state", "gradient")
_STORED: tuple[Role, ...] = ("parameter", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The values of a training step by purpose; see `Role`.

    Attributes:
        batch_size: samples that the program takes at once.
        input: the samples.
        label: their classes or targets.
        sample_mask: which samples are real.
        learning_rate: a scalar.
        random: fresh numbers for each step.
        coefficients: scalars, by the names in `COEFFICIENTS`.
        class_mask: which classes the client holds; None if the program does not take it.
        anchors: the first weights again, as separate inputs.
        batch_weight: a scalar of a program that sums gradients over parts of a batch; None in others.
        apply: whether the optimiser takes its step; see `batch_weight`.
        stored: parameters and buffers, as inputs; updates consist of them. Each has its own tensor name.
        frozen: weights that do not change, as inputs; not part of updates.
        zeroed: optimiser states and gradients, as inputs, which start at zero.
        carried: name of each stored and zeroed value's input to the name of the output that holds it after the step.
        loss: name of the output.
        correct: name of the output.
        count: name of the output; empty if the program has none, then all labels of real samples count.
        squares: name of the output; empty if the program has none.
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
    frozen: tuple[ValueInfo, ...]
    zeroed: tuple[ValueInfo, ...]
    carried: Mapping[str, str]
    loss: str
    correct: str
    count: str
    squares: str

    @property
    def weights(self) -> tuple[ValueInfo, ...]:
        """Parameters, buffers and frozen weights, as inputs."""
        return (*self.stored, *self.frozen)

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the stored tensors that are not weights."""
        return frozenset(value.tensor for value in self.stored if value.role == "buffer")

    @property
    def accumulates(self) -> bool:
        """Whether the program sums gradients over the parts of a batch."""
        return self.apply is not None


def read_step_layout(manifest: ProgramManifest) -> StepLayout:
    """Read the layout of a training program from its manifest.

    Raises:
        ProtocolError: it is not for training, or its values do not make a step that can be repeated.
    """
    check_values(manifest, "train")
    batch_weight, apply = get_optional(manifest.inputs, "batch_weight"), get_optional(manifest.inputs, "apply")
    if (batch_weight is None) != (apply is None):
        raise ProtocolError("a program that sums gradients must take both 'batch_weight' and 'apply', but lacks one")
    stored = select_values(manifest.inputs, lambda value: value.role in _STORED)
    frozen = select_values(manifest.inputs, lambda value: value.role == "frozen")
    check_tensors((*stored, *frozen))
    anchors = select_values(manifest.inputs, lambda value: value.role == "anchor")
    _check_anchors({value.tensor: value for value in stored if value.role == "parameter"}, anchors)
    count, squares = get_optional(manifest.outputs, "count"), get_optional(manifest.outputs, "squares")
    return StepLayout(
        batch_size=manifest.batch_size,
        input=get_required(manifest.inputs, "input"),
        label=get_required(manifest.inputs, "label"),
        sample_mask=get_required(manifest.inputs, "sample_mask"),
        learning_rate=get_required(manifest.inputs, "learning_rate"),
        random=select_values(manifest.inputs, lambda value: value.role == "random"),
        coefficients=select_values(manifest.inputs, lambda value: value.role == "coefficient"),
        class_mask=get_optional(manifest.inputs, "class_mask"),
        anchors=anchors,
        batch_weight=batch_weight,
        apply=apply,
        stored=stored,
        frozen=frozen,
        zeroed=select_values(manifest.inputs, lambda value: value.role in _CARRIED and value.role not in _STORED),
        carried=match_carried(manifest.inputs, manifest.outputs),
        loss=get_required(manifest.outputs, "loss").name,
        correct=get_required(manifest.outputs, "correct").name,
        count="" if count is None else count.name,
        squares="" if squares is None else squares.name,
    )


def _check_anchors(parameters: Mapping[str, ValueInfo], anchors: Iterable[ValueInfo]) -> None:
    for anchor in anchors:
        own = parameters.get(anchor.tensor)
        if own is None or (own.dtype, own.shape) != (anchor.dtype, anchor.shape):
            raise ProtocolError(
                f"the program's anchor {anchor.name!r:.80} of shape {anchor.shape} must be of a parameter's shape"
            )


def match_carried(
    inputs: Iterable[ValueInfo], outputs: Iterable[ValueInfo], roles: Collection[Role] = _CARRIED
) -> Mapping[str, str]:
    """Map each input of some roles to the output with its next value.

    Raises:
        ProtocolError: an input has no matching output.
    """
    before, after = _sort(inputs, roles), _sort(outputs, roles)
    if [_describe(value) for value in before] != [_describe(value) for value in after]:
        raise ProtocolError(
            "a training program must return every parameter, buffer, optimiser state and gradient that it takes, "
            "with the same type and shape"
        )
    return MappingProxyType({old.name: new.name for old, new in zip(before, after, strict=True)})


def _sort(values: Iterable[ValueInfo], roles: Collection[Role]) -> list[ValueInfo]:
    # The sort is stable: the states of an optimiser for one tensor keep their order.
    return sorted((value for value in values if value.role in roles), key=lambda value: (value.role, value.tensor))


def _describe(value: ValueInfo) -> tuple[str, str, str, tuple[int, ...]]:
    return value.role, value.tensor, value.dtype, value.shape


_FED: frozenset[Role] = frozenset({"input", "label", "sample_mask", "parameter", "buffer"})
_GIVEN: frozenset[Role] = frozenset({"loss", "correct", "count", "logits"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLayout:
    """The values of an evaluation by purpose; see `Role`.

    Attributes:
        batch_size: samples that the program takes at once.
        input: the samples.
        label: their classes or targets.
        sample_mask: which samples are real.
        weights: parameters and buffers, as inputs; they are the same in every step.
        loss: name of the output; likewise correct, count and logits.
    """

    batch_size: int
    input: ValueInfo
    label: ValueInfo
    sample_mask: ValueInfo
    weights: tuple[ValueInfo, ...]
    loss: str
    correct: str
    count: str
    logits: str


def read_evaluation_layout(manifest: ProgramManifest) -> EvaluationLayout:
    """Read the layout of an evaluation program from its manifest.

    Raises:
        ProtocolError: it is not for evaluation, or its values do not make an evaluation.
    """
    check_values(manifest, "evaluate")
    _check_roles(manifest)
    weights = select_values(manifest.inputs, lambda value: value.role in ("parameter", "buffer"))
    check_tensors(weights)
    label, logits = get_required(manifest.inputs, "label"), get_required(manifest.outputs, "logits")
    _check_logits(logits, label)
    return EvaluationLayout(
        batch_size=manifest.batch_size,
        input=get_required(manifest.inputs, "input"),
        label=label,
        sample_mask=get_required(manifest.inputs, "sample_mask"),
        weights=weights,
        loss=get_required(manifest.outputs, "loss").name,
        correct=get_required(manifest.outputs, "correct").name,
        count=get_required(manifest.outputs, "count").name,
        logits=logits.name,
    )


def _check_roles(manifest: ProgramManifest) -> None:
    for values, known, does in ((manifest.inputs, _FED, "takes"), (manifest.outputs, _GIVEN, "returns")):
        odd = next((value for value in values if value.role not in known), None)
        if odd is not None:
            raise ProtocolError(
                f"the program {does} {odd.name!r:.80} of role {odd.role!r}, which evaluation lacks; export it again"
            )


def _check_logits(logits: ValueInfo, label: ValueInfo) -> None:
    expected = (*label.shape, label.limit) if label.dtype == "I64" else label.shape
    if logits.dtype != "F32" or logits.shape != expected:
        raise ProtocolError(
            f"the program's logits are {logits.dtype} of shape {logits.shape}, but its labels need F32 of {expected}"
        )
