"""An inference step in plain PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subfleet.export.steps.given import StepInputs
from subfleet.export.steps.reference.modules import as_exits, compute_in, copy_module
from subfleet.protocol.programs import ValueInfo

__all__ = ["InferenceReference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceReference:
    """The untouched module in evaluation mode.

    Attributes:
        module: as it was given to `inference_step`.
        inputs: of the step.
    """

    module: nn.Module
    inputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The logits, of the last exit where there are many, in the precision of the tensors.

        Raises:
            ExportError: the untouched module cannot be copied, or not be run in this precision.
        """
        given = StepInputs(self.inputs, tensors)
        precision = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        module = copy_module(self.module, given.by_tensor("parameter") | given.by_tensor("buffer"), precision)
        with torch.no_grad(), compute_in(precision):
            return (as_exits(module.eval()(given.single("input")))[-1],)
