"""The steps of a chain's piece (forward, backward, loss, update and evaluation) and their references.

As in `subfleet.export.steps.reference`, a reference is the original module with PyTorch's own losses and optimisers,
and only takes the real samples; a link's output for padding is 0 there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from subfleet.export.chains.link_values import LinkValues, update_inputs, update_outputs
from subfleet.export.layers import LayerContext
from subfleet.export.steps import SampleSpec, Step, evaluation_step, inference_step
from subfleet.export.steps.layout import label_of, scalar
from subfleet.export.steps.module_calls import call_with_state, prepare_module, run_exits, state_of, updated_buffers
from subfleet.export.steps.objectives import OBJECTIVES, label_metrics, total
from subfleet.export.steps.optimisers import apply_optimiser
from subfleet.export.steps.reference.pytorch import (
    as_exits,
    compute_in,
    copy_module,
    correct_count,
    counted_labels,
    sum_losses,
    sum_squares,
    take_pytorch_step,
    tensor_of,
)
from subfleet.export.steps.state_snapshot import StateSnapshot
from subfleet.export.steps.step import StepInputs
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkReference:
    """A link's forward pass, and its backward pass from a given gradient or from the loss, in plain PyTorch.

    Attributes:
        module: computes the link.
        reads: role of its input.
        inputs: the step's inputs.
        outputs: the step's outputs.
        objective: the objective in the last link; None in others.
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
        step_inputs = StepInputs(self.inputs, tensors)
        real_B = step_inputs.single("sample_mask") > 0  # noqa: N806 - shapes in names
        precision = step_inputs.single("sample_mask").dtype
        module = copy_module(
            self.module, step_inputs.by_tensor("parameter") | step_inputs.by_tensor("buffer"), precision
        )
        read = step_inputs.single(self.reads)[real_B].detach()
        if self.reads == "features":
            read.requires_grad_()
        results: dict[str, Tensor] = {}
        with torch.enable_grad(), compute_in(precision):
            (output,) = as_exits(module(read.clone()))
            buffers = {name: tensor_of(module, name).detach().clone() for name in step_inputs.by_tensor("buffer")}
            results |= {f"new.buffer.{name}": tensor for name, tensor in buffers.items()}
            if self.objective is not None:
                results |= self._metrics(self.objective, step_inputs, output, step_inputs.single("label")[real_B])
                results["loss"].backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
            elif step_inputs.all("features_gradient"):
                output.backward(step_inputs.single("features_gradient")[real_B])  # type: ignore[no-untyped-call] # likewise
        gradients = {f"gradient.{name}": part.grad for name, part in module.named_parameters()}
        gradients["read_gradient"] = None if read.grad is None else _fill_rows(read.grad, real_B)
        results |= {name: part for name, part in gradients.items() if part is not None}
        results |= {value.name: _fill_rows(output, real_B) for value in self.outputs if value.role == "features"}
        return tuple(results[value.name].detach() for value in self.outputs)

    @staticmethod
    def _metrics(
        settings: ObjectiveSettings, step_inputs: StepInputs, logits: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        divisor = step_inputs.single("batch_weight").clamp(min=1)
        return {
            "loss": sum_losses(settings, logits, labels) / divisor,
            "correct": correct_count(settings, logits.detach(), labels).to(logits.dtype),
            "count": counted_labels(settings, labels).sum().to(logits.dtype),
            "squares": sum_squares(settings, logits.detach(), labels),
        }


def _fill_rows(rows: Tensor, real_B: Tensor) -> Tensor:  # noqa: N803 - shapes in names
    """Insert rows of zeros between the rows of real samples."""
    filled = rows.new_zeros((real_B.shape[0], *rows.shape[1:]))
    filled[real_B] = rows.detach()
    return filled


@dataclass(frozen=True, slots=True, kw_only=True)
class _UpdateReference:
    """A step of `torch.optim` on scaled gradients."""

    optimiser: OptimiserSettings
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results in order, in the precision of the tensors."""
        step_inputs = StepInputs(self.inputs, tensors)
        parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in step_inputs.by_tensor("parameter").items()}
        for name, gradient in step_inputs.by_tensor("gradient").items():
            parameters[name].grad = gradient * step_inputs.single("gradient_scale")
        results = take_pytorch_step(
            replace(self.optimiser, max_gradient_norm=0.0),
            parameters,
            dict(step_inputs.pairs("optimiser_state")),
            float(step_inputs.single("learning_rate")),
        )
        results |= {f"new.parameter.{name}": part for name, part in parameters.items()}
        return tuple(results[value.name].detach() for value in self.outputs)


def training_steps(
    module: nn.Module,
    values: LinkValues,
    *,
    objective: ObjectiveSettings,
    optimiser: OptimiserSettings,
    last: bool,
    in_parts: bool,
) -> Mapping[str, Step]:
    """Return the steps of a piece by their names in `subfleet.protocol.chains`, without steps that have no output.

    Args:
        module: computes the link; it is not changed.
        values: its inputs and outputs.
        objective: the objective to minimise.
        optimiser: the optimiser's settings.
        last: whether the loss follows.
        in_parts: whether a batch is one of several micro-batches.

    Raises:
        ExportError: its logits do not fit the objective.
    """

    def link_step(
        finish: "_Finish",
        inputs: tuple[ValueInfo, ...],
        outputs: tuple[ValueInfo, ...],
        settings: ObjectiveSettings | None = None,
    ) -> Step:
        reads = values.reads.role
        return Step(
            run=_LinkRun(module=module, inputs=inputs, finish=finish, in_parts=in_parts),
            reference=_LinkReference(module=module, reads=reads, inputs=inputs, outputs=outputs, objective=settings),
            inputs=inputs,
            outputs=outputs,
            carried=state_of(module),
            held=StateSnapshot(module).tensors,
        )

    if last:
        label = label_of(objective, values.gives.shape)
        inputs = (values.reads, label, values.mask, scalar("batch_weight", "batch_weight"), *values.weights)
        step = link_step(partial(_go_to_the_loss, objective), inputs, values.loss_outputs(objective), objective)
        steps = {"backward": replace(step, padded_labels=objective.padded)}
    else:
        inputs = (values.reads, values.mask, *values.weights)
        steps = {
            "forward": link_step(_go_forward, inputs, values.forward_outputs),
            "backward": link_step(_go_back, (*inputs, values.output_gradient), values.gradients),
        }
    return {name: step for name, step in (steps | {"update": _update(values, optimiser)}).items() if step.outputs}


def evaluation_steps(
    module: nn.Module, values: LinkValues, *, objective: ObjectiveSettings, last: bool
) -> Mapping[str, Step]:
    """Return the steps of an evaluation, in which every layer is in evaluation mode."""
    reads = values.reads
    sample = SampleSpec.of(reads)
    if last:
        step = evaluation_step(module, sample, batch_size=reads.shape[0], objective=objective)
        return {"evaluate": replace(step, inputs=(reads, *step.inputs[1:]))}
    step = inference_step(module, sample, batch_size=reads.shape[0])
    return {"forward": replace(step, inputs=(reads, *step.inputs[1:]), outputs=(values.gives,))}


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkResult:
    """A link that has run forward.

    Attributes:
        inputs: the step's inputs.
        output: the link's output.
        leaves: tensors that need gradients: the input if there is a previous link, then the parameters.
        buffers: after the run, in order.
        context: the context of its layers.
    """

    inputs: StepInputs
    output: Tensor
    leaves: Mapping[str, Tensor]
    buffers: tuple[Tensor, ...]
    context: LayerContext

    def gradients(self, differentiated: Tensor, by: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the gradients of a tensor made from the link's output, by its leaves."""
        if not self.leaves:
            return ()
        with self.context.backward_pass():
            parts: Sequence[Tensor | None] = torch.autograd.grad(
                differentiated, list(self.leaves.values()), by, allow_unused=True
            )
        gradients = {name: part for name, part in zip(self.leaves, parts, strict=True) if part is not None}
        lacking = sorted(self.leaves.keys() - gradients.keys())
        if lacking:
            raise ExportError(
                f"{lacking[0]!r} of a link has no gradient, but each parameter in a chain must have one; take it out "
                "of the network, or make it a buffer"
            )
        return tuple(gradients.values())


_Finish = Callable[[_LinkResult], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkRun:
    """The pure function of a step that runs a link, in the order of the step's inputs and outputs."""

    module: nn.Module
    inputs: tuple[ValueInfo, ...]
    finish: _Finish
    in_parts: bool

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        step_inputs = StepInputs(self.inputs, tensors)
        goes_back = self.finish is not _go_forward
        parameters = {
            name: tensor.detach().requires_grad_(goes_back)
            for name, tensor in step_inputs.by_tensor("parameter").items()
        }
        buffers = {name: tensor.clone() for name, tensor in step_inputs.by_tensor("buffer").items()}
        read = tensors[0].detach()
        leaves = dict(parameters)
        if self.inputs[0].role == "features":
            leaves = {"features": read.requires_grad_(goes_back), **parameters}
        context = LayerContext(step_inputs.single("sample_mask"), in_parts=self.in_parts)

        def body() -> tuple[Tensor, ...]:
            (output,) = run_exits(self.module, read.clone())  # a layer may change its input in place
            after = tuple(updated_buffers(self.module, context, buffers))
            return self.finish(
                _LinkResult(inputs=step_inputs, output=output, leaves=leaves, buffers=after, context=context)
            )

        with prepare_module(self.module, context, training=True), torch.set_grad_enabled(goes_back):
            return call_with_state(self.module, parameters | buffers, body)


def _go_forward(result: _LinkResult) -> tuple[Tensor, ...]:
    return result.output, *result.buffers


def _go_back(result: _LinkResult) -> tuple[Tensor, ...]:
    return result.gradients(result.output, result.inputs.single("features_gradient"))


def _go_to_the_loss(settings: ObjectiveSettings, result: _LinkResult) -> tuple[Tensor, ...]:
    rule, labels = OBJECTIVES[settings.name], result.inputs.single("label")
    counted = rule.count_mask(labels, result.inputs.single("sample_mask"))
    losses = rule.losses(settings, result.output, labels)
    loss = total(losses * counted) / result.inputs.single("batch_weight").clamp(min=1.0)
    metrics = label_metrics(settings, result.output, labels, losses, counted)
    return (loss.detach(), *metrics, *result.gradients(loss), *result.buffers)


def _update(values: LinkValues, optimiser: OptimiserSettings) -> Step:
    inputs = update_inputs(values.parameters, optimiser)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        step_inputs = StepInputs(inputs, tensors)
        scale = step_inputs.single("gradient_scale")
        gradients = {name: part * scale for name, part in step_inputs.by_tensor("gradient").items()}
        return tuple(tensor for group in apply_optimiser(optimiser, step_inputs, gradients, None) for tensor in group)

    outputs = update_outputs(values.parameters, optimiser) if values.parameters else ()
    return Step(
        run=run,
        reference=_UpdateReference(optimiser=optimiser, inputs=inputs, outputs=outputs),
        inputs=inputs,
        outputs=outputs,
    )
