"""Notes in an inference model, as texts by name: its classes, its objective, and its transform.

ONNX models carry them as metadata, ExecuTorch models as methods that return the texts as bytes.
"""

from subfleet.protocol.class_names import CLASS_NAMES, format_class_names
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.task_kinds import TASK_KINDS, Objective
from subfleet.protocol.transform import DATA_TRANSFORM, DataTransform, format_transform

OBJECTIVE = "objective"
"""The key of the objective's name in a model file."""


def list_notes(
    classes: tuple[str, ...], objective: Objective, transform: DataTransform | None = None
) -> dict[str, str]:
    """List the notes of a model, without unnamed classes, the default objective, and no transform.

    Args:
        classes: class names, in the model's order.
        objective: of its training.
        transform: of its training samples.
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
            objective: Objective = name  # type: ignore[assignment]  # the table has exactly the objectives
            return objective
    raise ProtocolError(
        f"a model's objective is {text!r:.80}, but must be one of {sorted(TASK_KINDS)}; deploy it again"
    )
