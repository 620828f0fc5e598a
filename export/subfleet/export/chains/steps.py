"""The steps of a chain's piece: forward, backward, loss, update, and evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from subfleet.export.chains.link_values import LinkValues, update_inputs, update_outputs
from subfleet.export.chains.reference import LinkReference, UpdateReference
from subfleet.export.layers import LayerContext
from subfleet.export.steps import SampleSpec, Step, evaluation_step, inference_step
from subfleet.export.steps.layout import label_of, scalar
from subfleet.export.steps.module_calls import call_with_state, prepare_module, run_exits, state_of, updated_buffers
from subfleet.export.steps.objectives import OBJECTIVES, total
from subfleet.export.steps.optimisers import apply_optimiser
from subfleet.export.steps.state_snapshot import StateSnapshot
from subfleet.export.steps.step import StepInputs
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["evaluation_steps", "training_steps"]


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
    if last:
        steps = {"backward": _loss(module, values, objective, in_parts=in_parts)}
    else:
        forward = _forward(module, values, in_parts=in_parts)
        steps = {"forward": forward, "backward": _backward(module, values, in_parts=in_parts)}
    return {name: step for name, step in (steps | {"update": _update(values, optimiser)}).items() if step.outputs}


def evaluation_steps(
    module: nn.Module, values: LinkValues, *, objective: ObjectiveSettings, last: bool
) -> Mapping[str, Step]:
    """Return the steps of an evaluation, in which every layer is in evaluation mode."""
    reads = values.reads
    sample = SampleSpec(shape=reads.shape[1:], dtype="I64" if reads.dtype == "I64" else "F32", limit=reads.limit)
    if last:
        step = evaluation_step(module, sample, batch_size=reads.shape[0], objective=objective)
        return {"evaluate": replace(step, inputs=(reads, *step.inputs[1:]))}
    step = inference_step(module, sample, batch_size=reads.shape[0])
    return {"forward": replace(step, inputs=(reads, *step.inputs[1:]), outputs=(values.gives,))}


def _forward(module: nn.Module, values: LinkValues, *, in_parts: bool) -> Step:
    return _step(
        module, values, (values.reads, values.mask, *values.weights), values.forward_outputs, _go_forward, in_parts
    )


def _backward(module: nn.Module, values: LinkValues, *, in_parts: bool) -> Step:
    inputs = (values.reads, values.mask, *values.weights, values.output_gradient)
    return _step(module, values, inputs, values.gradients, _go_back, in_parts)


def _loss(module: nn.Module, values: LinkValues, objective: ObjectiveSettings, *, in_parts: bool) -> Step:
    fed = (label_of(objective, values.gives.shape), values.mask, scalar("batch_weight", "batch_weight"))
    inputs = (values.reads, *fed, *values.weights)
    return replace(
        _step(module, values, inputs, values.loss_outputs(objective), _go_to_the_loss, in_parts, objective),
        class_count=inputs[1].limit,
        padded_labels=objective.padded,
    )


def _step(  # noqa: PLR0913, PLR0917 - each says one thing of the step
    module: nn.Module,
    values: LinkValues,
    inputs: tuple[ValueInfo, ...],
    outputs: tuple[ValueInfo, ...],
    finish: "_Finish",
    in_parts: bool,
    objective: ObjectiveSettings | None = None,
) -> Step:
    role = values.reads.role
    return Step(
        run=_LinkRun(module=module, inputs=inputs, finish=finish, in_parts=in_parts, objective=objective),
        reference=LinkReference(module=module, reads=role, inputs=inputs, outputs=outputs, objective=objective),
        inputs=inputs,
        outputs=outputs,
        carried=state_of(module),
        held=StateSnapshot(module).tensors,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkResult:
    """A link that has run forward.

    Attributes:
        given: the step's inputs.
        output: the link's output.
        leaves: tensors that need gradients: the input if there is a previous link, then the parameters.
        buffers: after the run, in order.
        context: of its layers.
        objective: of the last link.
    """

    given: StepInputs
    output: Tensor
    leaves: Mapping[str, Tensor]
    buffers: tuple[Tensor, ...]
    context: LayerContext
    objective: ObjectiveSettings | None

    def gradients(self, differentiated: Tensor, by: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the gradients of a tensor made from the link's output, by its leaves."""
        if not self.leaves:
            return ()
        with self.context.backward_pass():
            gradients_found: Sequence[Tensor | None] = torch.autograd.grad(
                differentiated, list(self.leaves.values()), by, allow_unused=True
            )
        gradients = {name: part for name, part in zip(self.leaves, gradients_found, strict=True) if part is not None}
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
    objective: ObjectiveSettings | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = StepInputs(self.inputs, tensors)
        goes_back = self.finish is not _go_forward
        parameters = {
            name: tensor.detach().requires_grad_(goes_back) for name, tensor in given.by_tensor("parameter").items()
        }
        buffers = {name: tensor.clone() for name, tensor in given.by_tensor("buffer").items()}
        read = tensors[0].detach()
        leaves = dict(parameters)
        if self.inputs[0].role == "features":
            leaves = {"features": read.requires_grad_(goes_back), **parameters}
        context = LayerContext(given.single("sample_mask"), in_parts=self.in_parts)

        def body() -> tuple[Tensor, ...]:
            (output,) = run_exits(self.module, read.clone())  # a layer may change its input in place
            after = tuple(updated_buffers(self.module, context, buffers))
            result = _LinkResult(
                given=given, output=output, leaves=leaves, buffers=after, context=context, objective=self.objective
            )
            return self.finish(result)

        with prepare_module(self.module, context, training=True), torch.set_grad_enabled(goes_back):
            return call_with_state(self.module, parameters | buffers, body)


def _go_forward(result: _LinkResult) -> tuple[Tensor, ...]:
    return result.output, *result.buffers


def _go_back(result: _LinkResult) -> tuple[Tensor, ...]:
    return result.gradients(result.output, result.given.single("features_gradient"))


def _go_to_the_loss(result: _LinkResult) -> tuple[Tensor, ...]:
    settings = result.objective or ObjectiveSettings()
    rule, labels = OBJECTIVES[settings.name], result.given.single("label")
    counted = rule.count_mask(labels, result.given.single("sample_mask"))
    losses = rule.losses(settings, result.output, labels)
    loss = total(losses * counted) / result.given.single("batch_weight").clamp(min=1.0)
    own = losses.detach()
    metrics = [loss.detach(), total(rule.correct(result.output.detach(), labels) * counted), total(counted)]
    if settings.squares:
        metrics.append(total(own * own * counted))
    return (*metrics, *result.gradients(loss), *result.buffers)


def _update(values: LinkValues, optimiser: OptimiserSettings) -> Step:
    inputs = update_inputs(values.parameters, optimiser)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = StepInputs(inputs, tensors)
        scale = given.single("gradient_scale")
        gradients = {name: part * scale for name, part in given.by_tensor("gradient").items()}
        return tuple(tensor for group in apply_optimiser(optimiser, given, gradients, None) for tensor in group)

    outputs = update_outputs(values.parameters, optimiser) if values.parameters else ()
    return Step(
        run=run,
        reference=UpdateReference(optimiser=optimiser, inputs=inputs, outputs=outputs),
        inputs=inputs,
        outputs=outputs,
        carried=MappingProxyType({}),
    )
