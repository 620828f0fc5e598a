"""What is minimised, by PyTorch's own functions: sums over the labels that count."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.protocol.training import ObjectiveSettings

__all__ = ["correct_count", "counted_labels", "divergence", "loss_squares", "mutual_divergence", "own_loss"]

_NOT_COUNTED = -100
"""PyTorch's own `ignore_index`."""


def counted_labels(settings: ObjectiveSettings, labels: Tensor) -> Tensor:
    """Whether each label counts."""
    return labels >= 0 if settings.over_classes else torch.ones_like(labels, dtype=torch.bool)


def own_loss(settings: ObjectiveSettings, logits: Tensor, labels: Tensor) -> Tensor:
    """The objective itself."""
    return _LOSSES[settings.name](settings, logits, labels, "sum")


def loss_squares(settings: ObjectiveSettings, logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the squares of the labels' own losses."""
    return _LOSSES[settings.name](settings, logits, labels, "none").square().sum()


def correct_count(settings: ObjectiveSettings, logits: Tensor, labels: Tensor) -> Tensor:
    """How many labels that count are predicted."""
    hits = logits.argmax(-1) == labels if settings.over_classes else (logits > 0) == (labels > 0.5)
    return (hits & counted_labels(settings, labels)).sum() * (settings.name != "mean_squared_error")


def divergence(settings: ObjectiveSettings, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
    """Of the student's classes from the fixed teacher's, with the factor T squared of Hinton et al. 2015, section 2."""
    elementwise = functional.kl_div(
        functional.log_softmax(student / settings.temperature, dim=-1),
        functional.softmax(teacher.detach() / settings.temperature, dim=-1),
        reduction="none",
    )
    return elementwise.sum(dim=-1)[counted_labels(settings, labels)].sum() * settings.temperature**2


def mutual_divergence(settings: ObjectiveSettings, exits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Of every exit from all others, in the mean over those (DepthFL, Kim et al. 2023, section 3.2)."""
    pairs = [(teacher, student) for student in exits for teacher in exits if teacher is not student]
    terms = [divergence(settings, teacher, student, labels) for teacher, student in pairs]
    return torch.stack(terms).sum() / (len(exits) - 1)


def _class_loss(settings: ObjectiveSettings, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten().masked_fill(labels.flatten() < 0, _NOT_COUNTED),
        ignore_index=_NOT_COUNTED,
        label_smoothing=settings.label_smoothing,
        reduction=reduction,
    )


def _binary_loss(_settings: ObjectiveSettings, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction=reduction)


def _squared_loss(_settings: ObjectiveSettings, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction=reduction)


_LOSSES: Mapping[str, Callable[[ObjectiveSettings, Tensor, Tensor, str], Tensor]] = MappingProxyType(
    {
        "cross_entropy": _class_loss,
        "next_token": _class_loss,
        "dense_cross_entropy": _class_loss,
        "binary_cross_entropy": _binary_loss,
        "mean_squared_error": _squared_loss,
    }
)
