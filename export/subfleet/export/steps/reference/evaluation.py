"""An evaluation in plain PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subfleet.export.steps.given import StepInputs
from subfleet.export.steps.reference.modules import as_exits, compute_in, copy_module
from subfleet.export.steps.reference.objectives import correct_count, counted_labels, own_loss
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings

__all__ = ["EvaluationReference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReference:
    """The untouched module in evaluation mode, and PyTorch's own loss of the real samples.

    Attributes:
        module: as it was given to `evaluation_step`.
        objective: what is told.
        inputs: of the step.
    """

    module: nn.Module
    objective: ObjectiveSettings
    inputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Loss, correct, count, and the logits of all samples, padding included, in the precision of the tensors.

        Raises:
            ExportError: the untouched module cannot be copied, or not be run in this precision.
        """
        given = StepInputs(self.inputs, tensors)
        real_B = given.single("sample_mask") > 0  # noqa: N806 - shapes in names
        precision = given.single("sample_mask").dtype
        module = copy_module(self.module, given.by_tensor("parameter") | given.by_tensor("buffer"), precision)
        with torch.no_grad(), compute_in(precision):
            logits = as_exits(module.eval()(given.single("input")))[-1]
            real, labels = logits[real_B], given.single("label")[real_B]
            count = counted_labels(self.objective, labels).sum()
            loss = own_loss(self.objective, real, labels) / count.clamp(min=1)
            correct = correct_count(self.objective, real, labels)
        return loss, correct.to(precision), count.to(precision), logits
