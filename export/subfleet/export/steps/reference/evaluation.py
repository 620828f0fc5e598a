"""An evaluation in plain PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subfleet.export.steps.given import Given
from subfleet.export.steps.reference.modules import exits_of, in_precision, untouched
from subfleet.export.steps.reference.objectives import counted, own_loss, right
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
        given = Given(self.inputs, tensors)
        real_B = given.one("sample_mask") > 0  # noqa: N806 - shapes in names
        precision = given.one("sample_mask").dtype
        module = untouched(self.module, given.named("parameter") | given.named("buffer"), precision)
        with torch.no_grad(), in_precision(precision):
            logits = exits_of(module.eval()(given.one("input")))[-1]
            real, labels = logits[real_B], given.one("label")[real_B]
            count = counted(self.objective, labels).sum()
            loss = own_loss(self.objective, real, labels) / count.clamp(min=1)
            correct = right(self.objective, real, labels)
        return loss, correct.to(precision), count.to(precision), logits
