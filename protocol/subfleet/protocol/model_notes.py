"""Notes in an inference model, as texts by name: its classes, its objective, and its transform.

ONNX models carry them as metadata, ExecuTorch's as methods that give their texts in bytes.
"""

from subfleet.protocol.class_names import CLASS_NAMES, format_class_names
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.task_kinds import TASK_KINDS, Objective
from subfleet.protocol.transform import DATA_TRANSFORM, DataTransform, format_transform

OBJECTIVE = "objective"
"""Under which a model file carries the objective's name."""


def list_notes(
    classes: tuple[str, ...], objective: Objective, transform: DataTransform | None = None
) -> dict[str, str]:
    """The notes of a model; none of classes without names, of the usual objective (a class of each sample), of nothing.

    Args:
        classes: names of its classes, in its order.
        objective: that it was trained by.
        transform: what was done to the samples that it was trained on.
    """
    named = {CLASS_NAMES: format_class_names(classes)} if classes else {}
    meant = {} if objective == "cross_entropy" else {OBJECTIVE: objective}
    return named | meant | ({} if transform is None else {DATA_TRANSFORM: format_transform(transform)})


def parse_objective(text: str) -> Objective:
    """Parse the objective from a model file's note.

    Raises:
        ProtocolError: there is no such objective.
    """
    for name in TASK_KINDS:
        if name == text:
            found: Objective = name  # type: ignore[assignment]  # the table has all of them, and no other
            return found
    raise ProtocolError(
        f"a model's objective is {text!r:.80}, but must be one of {sorted(TASK_KINDS)}; deploy it again"
    )
