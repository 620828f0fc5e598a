"""The layout of a training program: inputs to feed, values carried from step to step, outputs to read."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramManifest, Role, ValueInfo
from subfleet.trainers.program_values import (
    COEFFICIENTS,
    check_tensors,
    check_values,
    get_one,
    get_optional,
    select_values,
)

__all__ = ["COEFFICIENTS", "StepLayout", "match_carried", "read_step_layout"]

_CARRIED: tuple[Role, ...] = ("parameter", "buffer", "optimiser_state", "gradient")
_STORED: tuple[Role, ...] = ("parameter", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The values of a training step by purpose; see `Role`.

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
        stored: parameters and buffers, as inputs: what updates consist of. Each has a tensor name of its own.
        frozen: weights that are given and stay as they are, as inputs; no part of updates.
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
        """Names of the stored tensors that are no weights."""
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
        input=get_one(manifest.inputs, "input"),
        label=get_one(manifest.inputs, "label"),
        sample_mask=get_one(manifest.inputs, "sample_mask"),
        learning_rate=get_one(manifest.inputs, "learning_rate"),
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
        loss=get_one(manifest.outputs, "loss").name,
        correct=get_one(manifest.outputs, "correct").name,
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
        ProtocolError: not everything is given back as it was taken.
    """
    before, after = _sort(inputs, roles), _sort(outputs, roles)
    if [_describe(value) for value in before] != [_describe(value) for value in after]:
        raise ProtocolError(
            "a training program must give back every parameter, buffer, optimiser state and gradient that it takes, "
            "as it took it"
        )
    return MappingProxyType({old.name: new.name for old, new in zip(before, after, strict=True)})


def _sort(values: Iterable[ValueInfo], roles: Collection[Role]) -> list[ValueInfo]:
    # The sort is stable: where an optimiser keeps two states of a tensor, the first goes to the first.
    return sorted((value for value in values if value.role in roles), key=lambda value: (value.role, value.tensor))


def _describe(value: ValueInfo) -> tuple[str, str, str, tuple[int, ...]]:
    return value.role, value.tensor, value.dtype, value.shape
