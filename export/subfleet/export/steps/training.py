"""The training step of a module.

(batch, scalars, parameters, buffers, optimiser states) -> (loss, correct, count, new parameters, buffers, states)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.export.layers import LayerContext
from subfleet.export.steps.layout import training_values
from subfleet.export.steps.mixing import check_samples_apart
from subfleet.export.steps.module_calls import (
    buffers_of,
    call_with_state,
    prepare_module,
    run_exits,
    state_of,
    updated_buffers,
)
from subfleet.export.steps.objectives import (
    OBJECTIVES,
    label_metrics,
    losses_of,
    mutual_distillation,
    self_distillation,
    total,
)
from subfleet.export.steps.optimisers import apply_optimiser, clip_gradients
from subfleet.export.steps.parameter_hooks import apply_post_hooks, check_hooks, copy_hooks
from subfleet.export.steps.recompute import blocks_of, recompute_blocks
from subfleet.export.steps.reference import TrainingReference
from subfleet.export.steps.shape_run import ModuleShapes, run_on_shapes
from subfleet.export.steps.state_snapshot import StateSnapshot
from subfleet.export.steps.step import SampleSpec, Step, StepInputs, Student
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


def training_step(  # noqa: PLR0913 - each says one thing of the step
    module: nn.Module,
    sample: SampleSpec,
    *,
    batch_size: int,
    objective: ObjectiveSettings,
    optimiser: OptimiserSettings,
    accumulate: bool = False,
    recompute: bool = False,
    one_part: bool = False,
    student: Student | None = None,
) -> Step:
    """Build the training step of a module.

    Its loss is the mean over the labels that count, with distillation terms; the proximal term only enters the
    gradients. A parameter without a gradient, or that needs none, does not change. A module with an attribute
    `own_loss`, which maps logits and labels to the loss of each label, is trained by that in place of the objective's.

    Args:
        module: maps a batch (batch, *sample.shape) to logits (batch, classes), with "next_token" (batch, tokens,
            classes); or with distillation "mutual" to a tuple with the logits of each exit, the last one the
            prediction. Each layer keeps its mode: a layer set to `.eval()` is frozen. The module is not changed.
        sample: the input of one sample.
        batch_size: samples of one step; a smaller batch is padded, and masked by the step's sample mask.
        objective: the objective to minimise.
        optimiser: the optimiser's settings.
        accumulate: sum the gradients of micro-batches, and take the optimiser's step in the last one of a batch.
        recompute: keep the inputs of blocks instead of their activations; see `subfleet.export.steps.recompute`.
        one_part: with accumulate, whether each batch is a single micro-batch, so that layers may use its statistics.
        student: the nested network of distillation "self".

    Raises:
        ExportError: the module cannot be run or trained; the message names the layer if it is known.
    """
    _ = blocks_of(module) if recompute else ()  # raises if there is none
    batch_input, in_parts = sample.value(batch_size), accumulate and not one_part
    run_shapes = run_on_shapes(module, batch_input, training=True, in_parts=in_parts)
    _check_exits(run_shapes, batch_size, objective)
    randoms = run_shapes.random_shapes + _check_student(run_shapes, batch_input, objective, student, in_parts)
    settings: dict[str, Any] = {"objective": objective, "optimiser": optimiser}
    inputs, outputs = training_values(
        module, batch_input, run_shapes.output_shapes[-1], randoms, **settings, accumulate=accumulate
    )
    settings["student"] = student
    if in_parts:
        check_hooks(module)
        check_samples_apart(training_step(module, sample, batch_size=2, accumulate=True, one_part=True, **settings))
    return Step(
        run=_TrainingRun(module=module, inputs=inputs, recompute=recompute, in_parts=in_parts, **settings),
        reference=TrainingReference(module=module, inputs=inputs, outputs=outputs, **settings),
        inputs=inputs,
        outputs=outputs,
        padded_labels=objective.padded,
        carried=state_of(module) | (state_of(student.module) if student else {}),
        held=StateSnapshot(module).tensors,
    )


def _check_student(
    network: ModuleShapes, sample: ValueInfo, objective: ObjectiveSettings, student: Student | None, in_parts: bool
) -> tuple[tuple[int, ...], ...]:
    """Check that a student is given exactly if it is needed; return the shapes of its random inputs."""
    if (objective.distillation == "self") != (student is not None):
        raise ExportError(
            f"distillation is {objective.distillation!r} and the student network is "
            f"{'given' if student else 'missing'}, but 'self' needs one and the others take none"
        )
    if student is None:
        return ()
    buffers = list(buffers_of(student.module))
    if buffers:
        raise ExportError(
            f"the student network keeps the buffer {buffers[0]!r}, but a nested network only shares parameters; use "
            "GroupNorm, or BatchNorm with track_running_stats=False"
        )
    run = run_on_shapes(student.module, sample, training=True, in_parts=in_parts)
    if run.output_shapes != network.output_shapes:
        raise ExportError(
            f"the student's logits are of the shapes {run.output_shapes}, but must be of the network's own, "
            f"{network.output_shapes}; keep every class in both"
        )
    return run.random_shapes


def _check_exits(network: ModuleShapes, batch_size: int, objective: ObjectiveSettings) -> None:
    shapes = network.output_shapes
    if (objective.distillation == "mutual") != (len(shapes) > 1):
        raise ExportError(
            f"the network has {len(shapes)} exits and distillation is {objective.distillation!r}, but 'mutual' needs 2 "
            "or more and the others take 1"
        )
    for shape in shapes:
        OBJECTIVES[objective.name].label_shape(shape)
        if shape != shapes[-1] or shape[:1] != (batch_size,):
            raise ExportError(
                f"the network's outputs are of the shapes {shapes}, but must all be equal, with the first size the "
                f"batch's {batch_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassResult:
    """The result of forward and backward of one batch: metrics and buffers in order, gradients by parameter."""

    metrics: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]
    buffers: Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainingRun:
    """The pure function of a training step, in the order of the step's inputs and outputs."""

    module: nn.Module
    student: Student | None
    objective: ObjectiveSettings
    optimiser: OptimiserSettings
    recompute: bool
    in_parts: bool
    inputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        step_inputs = StepInputs(self.inputs, tensors)
        # Plain autograd: torch.func.grad would split every backward into its twice differentiable form.
        trained = dict(self.module.named_parameters())
        leaves = {
            name: copy_hooks(tensor.detach().requires_grad_(), trained[name])
            for name, tensor in step_inputs.by_tensor("parameter").items()
        }
        frozen = {name: tensor.detach() for name, tensor in step_inputs.by_tensor("frozen").items()}
        # A step neither returns nor changes its inputs, but the module may change them in place.
        buffers = {name: tensor.clone() for name, tensor in step_inputs.by_tensor("buffer").items()}
        context = LayerContext(step_inputs.single("sample_mask"), step_inputs.all("random"), in_parts=self.in_parts)
        with ExitStack() as stack:
            stack.enter_context(prepare_module(self.module, context, training=True))
            if self.student is not None:
                stack.enter_context(prepare_module(self.student.module, context, training=True))
            if self.recompute:
                stack.enter_context(recompute_blocks(self.module, context))
            stack.enter_context(torch.enable_grad())
            result = self._call_with_state(
                leaves | frozen | buffers, partial(self._run, step_inputs, trained, leaves, buffers, context)
            )
        parameters, *rest = self.update(step_inputs, result.gradients)
        return (*result.metrics, *parameters, *result.buffers, *chain.from_iterable(rest))

    def _call_with_state(self, state: Mapping[str, Tensor], body: Callable[[], _PassResult]) -> _PassResult:
        """Call a function while the module has this state, and the student its part of it."""
        if self.student is not None:
            nested = {name: part.extract(state[name]) for name, part in self.student.maps.items()}
            body = partial(call_with_state, self.student.module, nested, body)
        return call_with_state(self.module, state, body)

    def _run(
        self,
        step_inputs: StepInputs,
        trained: Mapping[str, Tensor],
        leaves: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        context: LayerContext,
    ) -> _PassResult:
        """Run forward and backward of the module."""
        loss, metrics = self._losses(step_inputs)
        new_buffers = updated_buffers(self.module, context, buffers)
        # A batch that is all padding or has no label that counts has the loss 0.
        loss = loss / next(iter(step_inputs.all("batch_weight")), metrics[1]).clamp(min=1.0)
        if not loss.requires_grad:
            raise ExportError(
                "the loss depends on no trainable parameter; give the network one that its output depends on, "
                "with requires_grad=True"
            )
        with context.backward_pass():
            parts: Sequence[Tensor | None] = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = {name: part for name, part in zip(leaves, parts, strict=True) if part is not None}
        gradients = apply_post_hooks(leaves, gradients, trained)
        return _PassResult(metrics=(loss.detach(), *metrics), gradients=gradients, buffers=new_buffers)

    def _losses(self, step_inputs: StepInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the sum of all losses, and the metrics of the prediction."""
        settings = self.objective
        label_losses = losses_of(self.module, settings)
        inputs, labels = step_inputs.single("input"), step_inputs.single("label")
        exits = self._mask_logits(step_inputs, run_exits(self.module, inputs))
        own = losses = label_losses(exits[-1], labels)
        for logits in exits[:-1]:
            losses = losses + label_losses(logits, labels)
        weight = step_inputs.coefficient("distillation_weight")
        if self.student is not None:
            (student,) = self._mask_logits(step_inputs, run_exits(self.student.module, inputs))
            nested = label_losses(student, labels)
            losses = losses + nested * (1 - weight) + self_distillation(exits[-1], student, settings) * weight
        if settings.distillation == "mutual":
            losses = losses + mutual_distillation(exits, settings) * weight
        counted = OBJECTIVES[settings.name].count_mask(labels, step_inputs.single("sample_mask"))
        return total(losses * counted), label_metrics(settings, exits[-1], labels, own, counted)

    def _mask_logits(self, step_inputs: StepInputs, exits: Sequence[Tensor]) -> list[Tensor]:
        """Set logits of classes that the client lacks to 0 (HeteroFL, section 3.3)."""
        if not self.objective.class_mask:
            return list(exits)
        return [logits * step_inputs.single("class_mask") for logits in exits]

    def update(self, step_inputs: StepInputs, gradients: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Return new parameters, each kind of states, scalar states, and summed gradients."""
        old, summed = step_inputs.by_tensor("parameter"), step_inputs.by_tensor("gradient")
        apply = next(iter(step_inputs.all("apply")), None)
        totals = {name: summed[name] + part if summed else part for name, part in gradients.items()}
        groups = apply_optimiser(self.optimiser, step_inputs, self._regularise(step_inputs, totals), apply)
        if apply is not None:
            groups.append([totals[name] * (1 - apply) if name in totals else summed[name].clone() for name in old])
        return groups

    def _regularise(self, step_inputs: StepInputs, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the proximal term's gradient (FedProx, section 3.2), then clip."""
        ready = dict(gradients)
        if self.objective.proximal:
            parameters, anchors = step_inputs.by_tensor("parameter"), step_inputs.by_tensor("anchor")
            mu = step_inputs.coefficient("proximal_mu")
            ready = {name: part + mu * (parameters[name] - anchors[name]) for name, part in ready.items()}
        if self.optimiser.max_gradient_norm:
            limited = clip_gradients(list(ready.values()), self.optimiser.max_gradient_norm)
            ready = dict(zip(ready, limited, strict=True))
        return ready
