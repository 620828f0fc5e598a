"""The reference of each kind of step, in plain PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from subfleet.export.steps.module_calls import call_with_state
from subfleet.export.steps.parameter_hooks import has_hooks
from subfleet.export.steps.reference.pytorch import (
    as_exits,
    compute_in,
    copy_module,
    correct_count,
    counted_labels,
    divergence,
    find_own_loss,
    mutual_divergence,
    sum_losses,
    sum_squares,
    take_pytorch_step,
    tensor_of,
)
from subfleet.export.steps.reference.replayed_randomness import ReplayedRandomness
from subfleet.export.steps.step import StepInputs, Student
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardReference:
    """The original module in evaluation mode, with PyTorch's own loss of the real samples in an evaluation.

    Attributes:
        module: as given to `evaluation_step` or `inference_step`.
        objective: of an evaluation; None in inference.
        inputs: the step's inputs.
    """

    module: nn.Module
    objective: ObjectiveSettings | None
    inputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of all samples, in an evaluation after loss, correct and count, in the tensors' precision.

        Raises:
            ExportError: the original module cannot be copied, or not run in this precision.
        """
        step_inputs = StepInputs(self.inputs, tensors)
        precision = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        module = copy_module(
            self.module, step_inputs.by_tensor("parameter") | step_inputs.by_tensor("buffer"), precision
        )
        with torch.no_grad(), compute_in(precision):
            logits = as_exits(module.eval()(step_inputs.single("input")))[-1]
            if self.objective is None:
                return (logits,)
            real_B = step_inputs.single("sample_mask") > 0  # noqa: N806 - shapes in names
            real, labels = logits[real_B], step_inputs.single("label")[real_B]
            count = counted_labels(self.objective, labels).sum()
            loss = sum_losses(self.objective, real, labels) / count.clamp(min=1)
            correct = correct_count(self.objective, real, labels)
        return loss, correct.to(precision), count.to(precision), logits


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReferencePass:
    """The forward and backward pass of one batch, before the optimiser's step.

    Attributes:
        module: as the pass left it, with the parameters before the step.
        metrics: the step's `loss`, `correct`, `count` and `squares`.
        buffers: after the step, by name.
        gradients: by parameter name; parameters without one are left out.
    """

    module: nn.Module
    metrics: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def _record_output(
    outputs_found: list[tuple[str, Tensor]], name: str, _layer: nn.Module, _inputs: object, outputs: object
) -> None:
    if isinstance(outputs, Tensor):
        outputs_found.append((name, outputs.detach()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReference:
    """A training step of the original module, with the step's own inputs and outputs.

    Attributes:
        module: as given to `training_step`.
        student: its nested network.
        objective: the objective.
        optimiser: the optimiser's settings.
        inputs: the step's inputs.
        outputs: the step's outputs.
    """

    module: nn.Module
    student: Student | None
    objective: ObjectiveSettings
    optimiser: OptimiserSettings
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results in order, in the precision of the tensors.

        Raises:
            ExportError: the original module cannot be copied, or not run in this precision.
        """
        step_inputs = StepInputs(self.inputs, tensors)
        reference_pass = self._run_pass(step_inputs)
        results = dict(reference_pass.metrics) | self._carry(step_inputs, reference_pass)
        results |= {f"new.buffer.{name}": tensor for name, tensor in reference_pass.buffers.items()}
        return tuple(results[value.name].detach() for value in self.outputs)

    def gradients(self, *tensors: Tensor) -> Mapping[str, Tensor]:
        """Return the gradients of one batch by parameter name, neither summed nor clipped."""
        return self._run_pass(StepInputs(self.inputs, tensors)).gradients

    def layer_outputs(self, *tensors: Tensor) -> list[tuple[str, Tensor]]:
        """Return the output tensor of each layer in the forward pass, by name, in the order in which layers ended."""
        step_inputs, outputs = StepInputs(self.inputs, tensors), list[tuple[str, Tensor]]()
        state = step_inputs.by_tensor("parameter") | step_inputs.by_tensor("frozen") | step_inputs.by_tensor("buffer")
        module = copy_module(self.module, state, step_inputs.single("sample_mask").dtype)
        for name, layer in module.named_modules():
            layer.register_forward_hook(partial(_record_output, outputs, name))
        self._run(step_inputs, module)
        return outputs

    def _run_pass(self, step_inputs: StepInputs) -> _ReferencePass:
        state = step_inputs.by_tensor("parameter") | step_inputs.by_tensor("frozen") | step_inputs.by_tensor("buffer")
        module = copy_module(self.module, state, step_inputs.single("sample_mask").dtype)
        if not has_hooks(self.module):
            return self._run(step_inputs, module)
        # A hook may be bound to the module itself, and not to its copy.
        return call_with_state(self.module, state, partial(self._run, step_inputs, module))

    def _run(self, step_inputs: StepInputs, module: nn.Module) -> _ReferencePass:
        real_B = step_inputs.single("sample_mask") > 0  # noqa: N806 - shapes in names
        precision = step_inputs.single("sample_mask").dtype
        labels = step_inputs.single("label")[real_B]
        randomness = ReplayedRandomness(step_inputs.all("random"), real_B)
        with torch.enable_grad(), compute_in(precision), randomness:
            with randomness.watch_layers(module):
                loss, prediction = self._loss(step_inputs, module, step_inputs.single("input")[real_B], labels)
            count = counted_labels(self.objective, labels).sum()
            divisor = next(iter(step_inputs.all("batch_weight")), count)
            loss = loss / divisor.clamp(min=1)
            # Read here: torch.utils.checkpoint runs a norm again, which would count the batch twice.
            buffers = {name: tensor_of(module, name).detach().clone() for name in step_inputs.by_tensor("buffer")}
            with randomness.repeat_layers(module):
                loss.backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
        randomness.check_all_taken()
        correct = correct_count(self.objective, prediction, labels)
        return _ReferencePass(
            module=module,
            metrics={
                "loss": loss,
                "correct": correct.to(precision),
                "count": count.to(precision),
                "squares": sum_squares(self.objective, prediction, labels, find_own_loss(module)),
            },
            buffers=buffers,
            gradients={name: part.grad for name, part in module.named_parameters() if part.grad is not None},
        )

    def _loss(
        self, step_inputs: StepInputs, module: nn.Module, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss, and the logits of the prediction."""
        exits = [self._mask_logits(step_inputs, logits) for logits in as_exits(module(inputs))]
        own = find_own_loss(module)
        loss = torch.stack([sum_losses(self.objective, logits, labels, own) for logits in exits]).sum()
        weight = step_inputs.coefficient("distillation_weight")
        if self.student is not None:
            nested = {name: part.extract(tensor_of(module, name)) for name, part in self.student.maps.items()}
            student = copy_module(self.student.module, {}, inputs.dtype)
            (logits,) = as_exits(torch.func.functional_call(student, nested, (inputs,)))
            logits = self._mask_logits(step_inputs, logits)
            loss = loss + (1 - weight) * sum_losses(self.objective, logits, labels, own)
            loss = loss + weight * divergence(self.objective, exits[0], logits, labels)
        if self.objective.distillation == "mutual":
            loss = loss + weight * mutual_divergence(self.objective, exits, labels)
        return loss, exits[-1].detach()

    def _mask_logits(self, step_inputs: StepInputs, logits: Tensor) -> Tensor:
        if not self.objective.class_mask:
            return logits
        return logits.masked_fill(step_inputs.single("class_mask") == 0, 0.0)

    def _carry(self, step_inputs: StepInputs, reference_pass: _ReferencePass) -> dict[str, Tensor]:
        """Return parameters, states and summed gradients after the step, by name."""
        parameters = dict(reference_pass.module.named_parameters())
        summed, anchors = step_inputs.by_tensor("gradient"), step_inputs.by_tensor("anchor")
        totals = {name: part + summed[name] if summed else part for name, part in reference_pass.gradients.items()}
        states = dict(step_inputs.pairs("optimiser_state"))
        results = {f"new.{value.name}": tensor for value, tensor in states.items()}
        applies = not summed or bool(step_inputs.single("apply"))
        for name, tensor in (summed | totals if summed else {}).items():
            results[f"new.gradient.{name}"] = torch.zeros_like(tensor) if applies and name in totals else tensor
        for name, total in totals.items():
            pull = (
                step_inputs.coefficient("proximal_mu") * (parameters[name].detach() - anchors[name]) if anchors else 0.0
            )
            parameters[name].grad = total + pull
        if applies:
            results |= take_pytorch_step(self.optimiser, parameters, states, float(step_inputs.single("learning_rate")))
        return results | {f"new.parameter.{name}": part for name, part in parameters.items()}
