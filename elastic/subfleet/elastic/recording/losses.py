"""Records losses of users' own like networks; they are computed for each label, so that padding can be left out."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.recording.inputs import InputPart, count_numbers
from subfleet.elastic.recording.record import NetworkRecord
from subfleet.elastic.recording.recorder import record_module
from subfleet.elastic.recording.replaying import replay_whole
from subfleet.protocol.errors import ConfigError, SubfleetError

LossFunction = Callable[[Tensor, Tensor], Any]


def record_loss(function: LossFunction, record: NetworkRecord, input_shape: tuple[int, ...]) -> NetworkRecord:
    """Record a loss for the outputs of a recorded network.

    Args:
        function: maps the network's outputs and labels to the loss of each label. Labels are class indices, in the
            shape of the outputs without their classes; or, if it takes no indices, numbers in the outputs' shape.
        record: the network.
        input_shape: of one sample.

    Returns:
        The record of the loss; its `symbols` are the classes of its labels, 0 if these are numbers.

    Raises:
        ConfigError: it fails, does not return one loss for each label, or cannot be recorded.
    """
    shape = _find_output_shape(record, input_shape)
    classes = len(shape) - 1 if record.predicts == "token" else 0
    of_labels = {"classes": (*shape[:classes], *shape[classes + 1 :]), "numbers": shape}
    problems = dict[str, str]()
    for labels, symbols in (("classes", record.class_count), ("numbers", 0)):
        if symbols == 1:  # with one class every prediction is correct
            continue
        module = _PerLabel(function, of_labels[labels])
        parts = {
            "outputs": InputPart(shape=shape),
            "labels": InputPart(shape=of_labels[labels] or (1,), symbols=symbols),
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of labels that are not of the outputs' shape
                recorded = record_module(module, (count_numbers(parts),), inputs=parts)
            return replace(recorded, symbols=symbols)
        except ConfigError as error:
            problems[labels] = str(error)
    reasons = "; ".join(f"with {labels} as labels, {problem}" for labels, problem in problems.items())
    raise ConfigError(f"the loss cannot be recorded: {reasons}")


def _find_output_shape(record: NetworkRecord, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the recorded module's outputs for one sample."""
    with torch.device("meta"):
        inputs = torch.zeros((1, *input_shape), dtype=torch.int64 if record.symbols else torch.float32)
        shape = tuple(replay_whole(record).eval()(inputs).shape[1:])
    return (shape[-1], *shape[:-1]) if record.predicts == "pixel" else shape


class _PerLabel(nn.Module):
    """Calls a loss; its result has a row for each sample, as a network's has."""

    def __init__(self, function: LossFunction, label_shape: tuple[int, ...]) -> None:
        super().__init__()
        self._called = (function,)  # in a tuple: what a loss holds are constants and no state of a network
        self._label_shape = label_shape

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        labels = labels if self._label_shape else labels.squeeze(1)
        try:
            losses = self._called[0](outputs, labels)
        except SubfleetError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(f"it fails: {error}") from error
        if not isinstance(losses, Tensor) or losses.shape != labels.shape:
            what = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"it returns {what} for labels of shape {tuple(labels.shape)}, but must return the loss of each label; "
                "use reduction='none'"
            )
        return losses.flatten(1) if self._label_shape else losses.unsqueeze(1)
