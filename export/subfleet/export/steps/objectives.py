"""The objectives of a step, as sums over all counted labels, without a division, so that micro-batches add up.

Shapes: B samples, C classes, ... any other dimensions of a sample (tokens).
"""

# ruff: noqa: N803 - shapes in names

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveRule:
    """An objective.

    Attributes:
        label_dtype: type of its labels.
        label_shape: the labels' shape for a shape of logits; raises ExportError if they do not fit the objective.
        count_mask: (labels, sample mask) to 1 where a label counts and 0 elsewhere, in the labels' shape.
        losses: (settings, logits, labels) to the loss of each label.
        correct: (logits, labels) to 1 where the prediction is correct.
    """

    label_dtype: Literal["F32", "I64"]
    label_shape: Callable[[Shape], Shape]
    count_mask: Callable[[Tensor, Tensor], Tensor]
    losses: Callable[[ObjectiveSettings, Tensor, Tensor], Tensor]
    correct: Callable[[Tensor, Tensor], Tensor]


def _label_shape(ranks: Callable[[int], bool], needs: str) -> Callable[[Shape], Shape]:
    """Return a rule for labels that are one class of many."""

    def drop_classes(logits_shape: Shape) -> Shape:
        if not ranks(len(logits_shape)):
            raise ExportError(f"the network's output is of the shape {logits_shape}, but objective {needs}")
        if logits_shape[-1] < 2:
            raise ExportError(
                f"the network's output is of the shape {logits_shape}, but a single class is always correct; give it 2 "
                "classes or more, or use 'binary_cross_entropy'"
            )
        return logits_shape[:-1]

    return drop_classes


def total(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, by an operator that every target has."""
    return tensor.sum(dim=tuple(range(tensor.dim()))) if tensor.dim() else tensor


def _broadcast_mask(mask_B: Tensor, like: Tensor) -> Tensor:
    """Reshape the sample mask so that it multiplies a tensor of the shape (B, ...)."""
    return mask_B.reshape(-1, *[1] * (like.dim() - 1))


def _index_mask(labels: Tensor, mask_B: Tensor) -> Tensor:
    return (labels >= 0).to(mask_B.dtype) * _broadcast_mask(mask_B, labels)


def _number_mask(labels: Tensor, mask_B: Tensor) -> Tensor:
    return torch.ones_like(labels) * _broadcast_mask(mask_B, labels)


def _cross_entropies(settings: ObjectiveSettings, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of each label.

    It compares instead of gathering: every runtime has a comparison, and the backward of `gather` is a scatter.
    """
    class_count = logits.shape[-1]
    target = (labels.unsqueeze(-1) == torch.arange(class_count)).to(logits.dtype)
    if settings.label_smoothing:
        target = target * (1 - settings.label_smoothing) + settings.label_smoothing / class_count
    return -(target * torch.log_softmax(logits, dim=-1)).sum(dim=-1)


def _correct_class(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=-1) == labels).to(logits.dtype)


class _BinaryCrossEntropy(torch.autograd.Function):
    """Binary cross-entropy of logits and targets, stable for any logits; the gradient at a logit of 0 is exact too."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return torch.relu(logits) - logits * targets + torch.log(1 + torch.exp(-torch.abs(logits)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        return gradients[0] * (torch.sigmoid(logits) - targets), None


def _binary_cross_entropies(_settings: ObjectiveSettings, logits: Tensor, targets: Tensor) -> Tensor:
    """Compute `torch.nn.functional.binary_cross_entropy_with_logits` of each output."""
    losses: Tensor = _BinaryCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return losses


def _correct_side(logits: Tensor, targets: Tensor) -> Tensor:
    return ((logits > 0) == (targets > 0.5)).to(logits.dtype)


def _squared_errors(_settings: ObjectiveSettings, outputs: Tensor, targets: Tensor) -> Tensor:
    difference = outputs - targets
    return difference * difference


def _none_correct(outputs: Tensor, _targets: Tensor) -> Tensor:
    return torch.zeros_like(outputs)


_CROSS_ENTROPY = ObjectiveRule(
    label_dtype="I64",
    label_shape=_label_shape(
        lambda rank: rank == 2,
        "'cross_entropy' needs logits (batch, classes); use 'next_token' for logits of tokens and "
        "'dense_cross_entropy' for logits of pixels",
    ),
    count_mask=_index_mask,
    losses=_cross_entropies,
    correct=_correct_class,
)
_SQUARED_ERROR = ObjectiveRule(
    label_dtype="F32",
    label_shape=tuple,
    count_mask=_number_mask,
    losses=_squared_errors,
    correct=_none_correct,
)
_SEQUENCES = "'next_token' needs logits (batch, tokens, classes); 'cross_entropy' is for one class per sample"
_PIXELS = (
    "'dense_cross_entropy' needs logits (batch, height, width, classes); 'cross_entropy' is for one class per sample"
)
OBJECTIVES: Mapping[str, ObjectiveRule] = MappingProxyType(
    {
        "cross_entropy": _CROSS_ENTROPY,
        "next_token": replace(_CROSS_ENTROPY, label_shape=_label_shape(lambda rank: rank == 3, _SEQUENCES)),
        "dense_cross_entropy": replace(_CROSS_ENTROPY, label_shape=_label_shape(lambda rank: rank >= 4, _PIXELS)),
        "binary_cross_entropy": replace(_SQUARED_ERROR, losses=_binary_cross_entropies, correct=_correct_side),
        "mean_squared_error": _SQUARED_ERROR,
    }
)


def losses_of(module: nn.Module, settings: ObjectiveSettings) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what maps logits and labels to the loss of each label: the module's `own_loss`, or the objective's."""
    own: Callable[[Tensor, Tensor], Tensor] | None = getattr(module, "own_loss", None)
    return partial(OBJECTIVES[settings.name].losses, settings) if own is None else own


def label_metrics(
    settings: ObjectiveSettings, logits: Tensor, labels: Tensor, losses: Tensor, counted: Tensor
) -> tuple[Tensor, ...]:
    """Return the number of correct predictions, of labels that count, and with `squares` the sum of squared losses.

    Args:
        settings: the objective.
        logits: of the prediction.
        labels: as the objective takes them.
        losses: of the prediction, in the labels' shape.
        counted: 1 where a label counts.
    """
    own = losses.detach()
    correct = total(OBJECTIVES[settings.name].correct(logits.detach(), labels) * counted)
    return correct, total(counted), *((total(own * own * counted),) if settings.squares else ())


def _divergences(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Compute KL(softmax(teacher / T) || softmax(student / T)) times T squared, over the last dimension.

    The factor keeps the gradient's size independent of T (Hinton et al. 2015, section 2). The teacher gets no gradient.
    """
    teacher = torch.log_softmax(teacher.detach() / temperature, dim=-1)
    student = torch.log_softmax(student / temperature, dim=-1)
    return (torch.exp(teacher) * (teacher - student)).sum(dim=-1) * temperature**2


def self_distillation(teacher: Tensor, student: Tensor, settings: ObjectiveSettings) -> Tensor:
    """Compute FjORD's term for each label: the distance of the nested student from the network, whose logits are fixed.

    With weight a, the student's loss is (1 - a) * its own cross-entropy + a * this term; the network's own
    cross-entropy is added in full. a = 1 is the paper's choice, a = 0 is FjORD without distillation.

    Source: FjORD (Horvath et al. 2021), section 3.3; the factor T squared is ours, and 1 at the paper's T of 1.
    """
    return _divergences(teacher, student, settings.temperature)


def mutual_distillation(exits: Sequence[Tensor], settings: ObjectiveSettings) -> Tensor:
    """Compute DepthFL's term for each label: the sum over exits i of the mean over j != i of KL(p_j || p_i), p_j fixed.

    Source: DepthFL (Kim et al. 2023), section 3.2.
    """
    total = torch.zeros_like(exits[0][..., 0])
    for i, student in enumerate(exits):
        for j, teacher in enumerate(exits):
            if i != j:
                total = total + _divergences(teacher, student, settings.temperature) / (len(exits) - 1)
    return total
