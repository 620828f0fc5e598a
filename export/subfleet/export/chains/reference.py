"""What the programs of a piece must compute: the original module, with PyTorch's own losses and optimisers.

As in `subfleet.export.steps.reference`, it only takes the real samples; a link's output for padding is 0 here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from subfleet.export.steps.reference.modules import as_exits, compute_in, copy_module, tensor_of
from subfleet.export.steps.reference.pytorch import (
    correct_count,
    counted_labels,
    loss_squares,
    own_loss,
    take_pytorch_step,
)
from subfleet.export.steps.step import StepInputs
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["LinkReference", "UpdateReference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReference:
    """A link's forward pass, and its backward pass from a given gradient or from the loss, in plain PyTorch.

    Attributes:
        module: computes the link.
        reads: role of its input.
        inputs: the step's inputs.
        outputs: the step's outputs.
        objective: of the last link; None in others.
    """

    module: nn.Module
    reads: Role
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    objective: ObjectiveSettings | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results in order, in the precision of the tensors.

        Raises:
            ExportError: the original module cannot be copied, or not run in this precision.
        """
        given = StepInputs(self.inputs, tensors)
        real_B = given.single("sample_mask") > 0  # noqa: N806 - shapes in names
        precision = given.single("sample_mask").dtype
        module = copy_module(self.module, given.by_tensor("parameter") | given.by_tensor("buffer"), precision)
        read = given.single(self.reads)[real_B].detach()
        if self.reads == "features":
            read.requires_grad_()
        results: dict[str, Tensor] = {}
        with torch.enable_grad(), compute_in(precision):
            (output,) = as_exits(module(read.clone()))
            buffers = {name: tensor_of(module, name).detach().clone() for name in given.by_tensor("buffer")}
            results |= {f"new.buffer.{name}": tensor for name, tensor in buffers.items()}
            if self.objective is not None:
                results |= self._metrics(self.objective, given, output, given.single("label")[real_B])
                results["loss"].backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
            elif given.all("features_gradient"):
                output.backward(given.single("features_gradient")[real_B])  # type: ignore[no-untyped-call] # likewise
        gradients = {f"gradient.{name}": part.grad for name, part in module.named_parameters()}
        gradients["read_gradient"] = None if read.grad is None else _fill_rows(read.grad, real_B)
        results |= {name: part for name, part in gradients.items() if part is not None}
        results |= {value.name: _fill_rows(output, real_B) for value in self.outputs if value.role == "features"}
        return tuple(results[value.name].detach() for value in self.outputs)

    @staticmethod
    def _metrics(settings: ObjectiveSettings, given: StepInputs, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        divisor = given.single("batch_weight").clamp(min=1)
        return {
            "loss": own_loss(settings, logits, labels) / divisor,
            "correct": correct_count(settings, logits.detach(), labels).to(logits.dtype),
            "count": counted_labels(settings, labels).sum().to(logits.dtype),
            "squares": loss_squares(settings, logits.detach(), labels),
        }


def _fill_rows(rows: Tensor, real_B: Tensor) -> Tensor:  # noqa: N803 - shapes in names
    """Insert rows of zeros between the rows of real samples."""
    filled = rows.new_zeros((real_B.shape[0], *rows.shape[1:]))
    filled[real_B] = rows.detach()
    return filled


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReference:
    """A step of `torch.optim` on scaled gradients."""

    optimiser: OptimiserSettings
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results in order, in the precision of the tensors."""
        given = StepInputs(self.inputs, tensors)
        parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in given.by_tensor("parameter").items()}
        for name, gradient in given.by_tensor("gradient").items():
            parameters[name].grad = gradient * given.single("gradient_scale")
        results = take_pytorch_step(
            replace(self.optimiser, max_gradient_norm=0.0),
            parameters,
            dict(given.pairs("optimiser_state")),
            float(given.single("learning_rate")),
        )
        results |= {f"new.parameter.{name}": part for name, part in parameters.items()}
        return tuple(results[value.name].detach() for value in self.outputs)
