"""One step of training in plain PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from subfleet.export.steps.given import Given
from subfleet.export.steps.module_state import within
from subfleet.export.steps.parameter_hooks import has_hooks
from subfleet.export.steps.reference.modules import exits_of, in_precision, tensor_of, untouched
from subfleet.export.steps.reference.objectives import counted, divergence, mutual_divergence, own_loss, right, squares
from subfleet.export.steps.reference.optimisers import step_of_pytorch
from subfleet.export.steps.reference.randomness import GivenRandomness
from subfleet.export.steps.values import Student
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["TrainingReference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What one batch says before anything is learnt from it.

    Attributes:
        module: as the pass left it, its parameters those before the step.
        buffers: after the step, by name.
        told: the step's `loss`, `correct`, `count` and `squares`.
        gradients: by the parameter's name; those without one are not in it.
    """

    module: nn.Module
    told: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def _keep(found: list[tuple[str, Tensor]], name: str, _layer: nn.Module, _inputs: object, outputs: object) -> None:
    if isinstance(outputs, Tensor):
        found.append((name, outputs.detach()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReference:
    """A training step of the untouched module, with the step's own inputs and outputs.

    Attributes:
        module: as it was given to `training_step`.
        student: its nested network.
        objective: what is minimised.
        optimiser: its settings.
        inputs: of the step.
        outputs: of the step.
    """

    module: nn.Module
    student: Student | None
    objective: ObjectiveSettings
    optimiser: OptimiserSettings
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, in order, in the precision of the tensors.

        Raises:
            ExportError: the untouched module cannot be copied, or not be run in this precision.
        """
        given = Given(self.inputs, tensors)
        done = self._passed(given)
        found = dict(done.told) | self._carried(given, done)
        found |= {f"new.buffer.{name}": tensor for name, tensor in done.buffers.items()}
        return tuple(found[value.name].detach() for value in self.outputs)

    def gradients(self, *tensors: Tensor) -> Mapping[str, Tensor]:
        """Of one batch alone, by the parameter's name: nothing is added to them, and they are not clipped."""
        return self._passed(Given(self.inputs, tensors)).gradients

    def layer_outputs(self, *tensors: Tensor) -> list[tuple[str, Tensor]]:
        """What each layer that gives a tensor gave in the forward pass, in the order in which they ended, by name."""
        given, found = Given(self.inputs, tensors), list[tuple[str, Tensor]]()
        state = given.named("parameter") | given.named("frozen") | given.named("buffer")
        module = untouched(self.module, state, given.one("sample_mask").dtype)
        for name, layer in module.named_modules():
            layer.register_forward_hook(partial(_keep, found, name))
        self._run(given, module)
        return found

    def _passed(self, given: Given) -> _Pass:
        state = given.named("parameter") | given.named("frozen") | given.named("buffer")
        module = untouched(self.module, state, given.one("sample_mask").dtype)
        if not has_hooks(self.module):
            return self._run(given, module)
        # What a hook was made with may be the module itself, and not its copy.
        return within(self.module, state, partial(self._run, given, module))

    def _run(self, given: Given, module: nn.Module) -> _Pass:
        real_B = given.one("sample_mask") > 0  # noqa: N806 - shapes in names
        precision = given.one("sample_mask").dtype
        labels = given.one("label")[real_B]
        randomness = GivenRandomness(given.all("random"), real_B)
        with torch.enable_grad(), in_precision(precision), randomness:
            with randomness.watching(module):
                loss, prediction = self._loss(given, module, given.one("input")[real_B], labels)
            count = counted(self.objective, labels).sum()
            divisor = next(iter(given.all("batch_weight")), count)
            loss = loss / divisor.clamp(min=1)
            # Read here: torch.utils.checkpoint runs a norm again, which then counts a batch twice.
            buffers = {name: tensor_of(module, name).detach().clone() for name in given.named("buffer")}
            with randomness.repeating(module):
                loss.backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
        randomness.check_all_taken()
        correct = right(self.objective, prediction, labels)
        return _Pass(
            module=module,
            told={
                "loss": loss,
                "correct": correct.to(precision),
                "count": count.to(precision),
                "squares": squares(self.objective, prediction, labels),
            },
            buffers=buffers,
            gradients={name: part.grad for name, part in module.named_parameters() if part.grad is not None},
        )

    def _loss(self, given: Given, module: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the labels, and the logits that predict."""
        exits = [self._masked(given, logits) for logits in exits_of(module(inputs))]
        loss = torch.stack([own_loss(self.objective, logits, labels) for logits in exits]).sum()
        weight = given.coefficient("distillation_weight")
        if self.student is not None:
            nested = {name: part.extract(tensor_of(module, name)) for name, part in self.student.maps.items()}
            student = untouched(self.student.module, {}, inputs.dtype)
            (logits,) = exits_of(torch.func.functional_call(student, nested, (inputs,)))
            logits = self._masked(given, logits)
            loss = loss + (1 - weight) * own_loss(self.objective, logits, labels)
            loss = loss + weight * divergence(self.objective, exits[0], logits, labels)
        if self.objective.distillation == "mutual":
            loss = loss + weight * mutual_divergence(self.objective, exits, labels)
        return loss, exits[-1].detach()

    def _masked(self, given: Given, logits: Tensor) -> Tensor:
        if not self.objective.class_mask:
            return logits
        return logits.masked_fill(given.one("class_mask") == 0, 0.0)

    def _carried(self, given: Given, done: _Pass) -> dict[str, Tensor]:
        """Parameters, states and summed gradients after the step, by name."""
        parameters = dict(done.module.named_parameters())
        summed, anchors = given.named("gradient"), given.named("anchor")
        totals = {name: part + summed[name] if summed else part for name, part in done.gradients.items()}
        states = dict(given.pairs("optimiser_state"))
        found = {f"new.{value.name}": tensor for value, tensor in states.items()}
        applies = not summed or bool(given.one("apply"))
        for name, tensor in (summed | totals if summed else {}).items():
            found[f"new.gradient.{name}"] = torch.zeros_like(tensor) if applies and name in totals else tensor
        for name, total in totals.items():
            pull = given.coefficient("proximal_mu") * (parameters[name].detach() - anchors[name]) if anchors else 0.0
            parameters[name].grad = total + pull
        if applies:
            found |= step_of_pytorch(self.optimiser, parameters, states, float(given.one("learning_rate")))
        return found | {f"new.parameter.{name}": part for name, part in parameters.items()}
