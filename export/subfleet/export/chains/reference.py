"""What the programs of a chain's piece must compute: the untouched module, PyTorch's own losses and optimisers.

As `subfleet.export.steps.reference`, it takes the real samples alone; what a link gives of padding is 0 here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from subfleet.export.steps.given import Given
from subfleet.export.steps.reference.modules import exits_of, in_precision, tensor_of, untouched
from subfleet.export.steps.reference.objectives import counted, own_loss, right, squares
from subfleet.export.steps.reference.optimisers import step_of_pytorch
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["LinkReference", "UpdateReference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReference:
    """A link forward, and back from a given gradient or from the loss, in plain PyTorch.

    Attributes:
        module: that computes the link.
        reads: role of what it reads.
        inputs: of the step.
        outputs: of the step.
        objective: of the last link; None in others.
    """

    module: nn.Module
    reads: Role
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    objective: ObjectiveSettings | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, in order, in the precision of the tensors.

        Raises:
            ExportError: the untouched module cannot be copied, or not be run in this precision.
        """
        given = Given(self.inputs, tensors)
        real_B = given.one("sample_mask") > 0  # noqa: N806 - shapes in names
        precision = given.one("sample_mask").dtype
        module = untouched(self.module, given.named("parameter") | given.named("buffer"), precision)
        read = given.one(self.reads)[real_B].detach()
        if self.reads == "features":
            read.requires_grad_()
        found: dict[str, Tensor] = {}
        with torch.enable_grad(), in_precision(precision):
            (made,) = exits_of(module(read.clone()))
            buffers = {name: tensor_of(module, name).detach().clone() for name in given.named("buffer")}
            found |= {f"new.buffer.{name}": tensor for name, tensor in buffers.items()}
            if self.objective is not None:
                found |= self._lost(self.objective, given, made, given.one("label")[real_B])
                found["loss"].backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
            elif given.all("features_gradient"):
                made.backward(given.one("features_gradient")[real_B])  # type: ignore[no-untyped-call] # likewise
        gradients = {f"gradient.{name}": part.grad for name, part in module.named_parameters()}
        gradients["read_gradient"] = None if read.grad is None else _filled(read.grad, real_B)
        found |= {name: part for name, part in gradients.items() if part is not None}
        found |= {value.name: _filled(made, real_B) for value in self.outputs if value.role == "features"}
        return tuple(found[value.name].detach() for value in self.outputs)

    @staticmethod
    def _lost(settings: ObjectiveSettings, given: Given, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        divisor = given.one("batch_weight").clamp(min=1)
        return {
            "loss": own_loss(settings, logits, labels) / divisor,
            "correct": right(settings, logits.detach(), labels).to(logits.dtype),
            "count": counted(settings, labels).sum().to(logits.dtype),
            "squares": squares(settings, logits.detach(), labels),
        }


def _filled(rows: Tensor, real_B: Tensor) -> Tensor:  # noqa: N803 - shapes in names
    """Rows of the real samples among rows of zeros."""
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
        """The results, in order, in the precision of the tensors."""
        given = Given(self.inputs, tensors)
        parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in given.named("parameter").items()}
        for name, gradient in given.named("gradient").items():
            parameters[name].grad = gradient * given.one("gradient_scale")
        found = step_of_pytorch(
            replace(self.optimiser, max_gradient_norm=0.0),
            parameters,
            dict(given.pairs("optimiser_state")),
            float(given.one("learning_rate")),
        )
        found |= {f"new.parameter.{name}": part for name, part in parameters.items()}
        return tuple(found[value.name].detach() for value in self.outputs)
