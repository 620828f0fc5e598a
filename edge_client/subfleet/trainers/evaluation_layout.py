"""The layout of an evaluation program: inputs to feed, and outputs to read."""

from dataclasses import dataclass

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramManifest, Role, ValueInfo
from subfleet.trainers.program_values import check_tensors, check_values, get_one, select_values

__all__ = ["EvaluationLayout", "read_evaluation_layout"]

_FED: frozenset[Role] = frozenset({"input", "label", "sample_mask", "parameter", "buffer"})
_GIVEN: frozenset[Role] = frozenset({"loss", "correct", "count", "logits"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLayout:
    """The values of an evaluation by purpose; see `Role`.

    Attributes:
        batch_size: samples that the program takes at once.
        input: the samples.
        label: their classes or targets.
        sample_mask: which of them are real.
        weights: parameters and buffers, as inputs: they are alike in every step.
        loss: name of the output, as are correct, count and logits.
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
    label, logits = get_one(manifest.inputs, "label"), get_one(manifest.outputs, "logits")
    _check_logits(logits, label)
    return EvaluationLayout(
        batch_size=manifest.batch_size,
        input=get_one(manifest.inputs, "input"),
        label=label,
        sample_mask=get_one(manifest.inputs, "sample_mask"),
        weights=weights,
        loss=get_one(manifest.outputs, "loss").name,
        correct=get_one(manifest.outputs, "correct").name,
        count=get_one(manifest.outputs, "count").name,
        logits=logits.name,
    )


def _check_roles(manifest: ProgramManifest) -> None:
    for values, known, does in ((manifest.inputs, _FED, "takes"), (manifest.outputs, _GIVEN, "gives")):
        odd = next((value for value in values if value.role not in known), None)
        if odd is not None:
            raise ProtocolError(
                f"the program {does} {odd.name!r:.80} of role {odd.role!r}, which no evaluation has; export it again"
            )


def _check_logits(logits: ValueInfo, label: ValueInfo) -> None:
    expected = (*label.shape, label.limit) if label.dtype == "I64" else label.shape
    if logits.dtype != "F32" or logits.shape != expected:
        raise ProtocolError(
            f"the program's logits are {logits.dtype} of shape {logits.shape}, but its labels need F32 of {expected}"
        )
