"""One training step as a pure function, and one inference step; everything is a name, a tensor in or a tensor out.

(inputs, labels, sample_mask, learning_rate, parameters, optimiser state)
    -> (loss, correct, new parameters, new optimiser state)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["OBJECTIVES", "OPTIMISERS", "Step", "inference_step", "training_step"]

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
Optimiser = Callable[[OptimiserSettings, Tensor, Tensor, Sequence[Tensor], Tensor], tuple[Tensor, list[Tensor]]]

_DTYPES: Mapping[torch.dtype, str] = MappingProxyType({torch.float32: "F32", torch.int64: "I64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A pure function over tensors, with the names and roles of what goes in and comes out.

    Attributes:
        run: takes one tensor for each of `inputs`, gives one for each of `outputs`.
        inputs: in order.
        outputs: in order.
        class_count: exclusive upper bound of the labels; 0 where there are none.
    """

    run: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    class_count: int

    def example(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random inputs of the right shapes: a batch whose last sample is masked out wherever there are two."""
        return tuple(_example(value, self.class_count, generator) for value in self.inputs)


def cross_entropy(logits_BC: Tensor, labels_B: Tensor, mask_B: Tensor) -> Tensor:  # noqa: N803 - shapes in names
    """Mean cross-entropy over the real samples; 0 where there is none.

    Compares instead of gathering, because every runtime has a comparison and a backward of `gather` is a scatter.
    """
    classes_C = torch.arange(logits_BC.shape[1])  # noqa: N806 - shapes in names
    chosen_BC = (labels_B.unsqueeze(1) == classes_C).to(logits_BC.dtype)  # noqa: N806 - shapes in names
    losses_B = -(chosen_BC * torch.log_softmax(logits_BC, dim=1)).sum(dim=1)  # noqa: N806 - shapes in names
    return (losses_B * mask_B).sum(dim=0) / mask_B.sum(dim=0).clamp(min=1.0)


def sgd(
    settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, state: Sequence[Tensor], learning_rate: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """`torch.optim.SGD` with momentum and weight decay. A state of zeros is the state before the first step."""
    if settings.weight_decay:
        gradient = gradient + parameter * settings.weight_decay
    if not state:
        return parameter - learning_rate * gradient, []
    momentum = state[0] * settings.momentum + gradient
    return parameter - learning_rate * momentum, [momentum]


def _sgd_states(settings: OptimiserSettings) -> tuple[str, ...]:
    return ("momentum",) if settings.momentum else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimiserRule:
    """One optimiser: which states of a parameter's shape it keeps, and its pure update."""

    states: Callable[[OptimiserSettings], tuple[str, ...]]
    update: Optimiser


OBJECTIVES: Mapping[str, Objective] = MappingProxyType({"cross_entropy": cross_entropy})
OPTIMISERS: Mapping[str, OptimiserRule] = MappingProxyType({"sgd": OptimiserRule(states=_sgd_states, update=sgd)})


def training_step(
    module: nn.Module,
    input_shape: tuple[int, ...],
    *,
    batch_size: int,
    objective: ObjectiveSettings,
    optimiser: OptimiserSettings,
) -> Step:
    """Make the training step of a module.

    Args:
        module: maps (batch, *input_shape) to logits (batch, classes); all its state is parameters.
        input_shape: of one sample.
        batch_size: samples of one step.
        objective: a name in `OBJECTIVES`.
        optimiser: its settings.

    Raises:
        ExportError: the objective or optimiser is unknown, or the module keeps buffers.
    """
    if objective.name not in OBJECTIVES or optimiser.name not in OPTIMISERS:
        raise ExportError(
            f"objective is {objective.name!r} and optimiser {optimiser.name!r}, but they must be one of "
            f"{sorted(OBJECTIVES)} and {sorted(OPTIMISERS)}"
        )
    _refuse_buffers(module)
    tensors, new_tensors = _tensor_values(module, OPTIMISERS[optimiser.name].states(optimiser))
    batch = (
        ValueInfo(name="input", dtype="F32", shape=(batch_size, *input_shape), role="input"),
        ValueInfo(name="label", dtype="I64", shape=(batch_size,), role="label"),
        ValueInfo(name="sample_mask", dtype="F32", shape=(batch_size,), role="sample_mask"),
        ValueInfo(name="learning_rate", dtype="F32", shape=(), role="learning_rate"),
    )
    scalars = (
        ValueInfo(name="loss", dtype="F32", shape=(), role="loss"),
        ValueInfo(name="correct", dtype="F32", shape=(), role="correct"),
    )
    return Step(
        run=_training_run(module, OBJECTIVES[objective.name], optimiser),
        inputs=batch + tensors,
        outputs=scalars + new_tensors,
        class_count=_class_count(module, (batch_size, *input_shape)),
    )


def _training_run(
    module: nn.Module, loss_of: Objective, optimiser: OptimiserSettings
) -> Callable[..., tuple[Tensor, ...]]:
    """The pure function of a training step, in the order of the step's inputs and outputs."""
    names = [name for name, _ in module.named_parameters()]
    rule = OPTIMISERS[optimiser.name]
    kinds = rule.states(optimiser)

    def run(inputs: Tensor, labels: Tensor, mask: Tensor, rate: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Plain autograd: torch.func.grad would split every backward into its twice differentiable form.
        parameters = [tensor.detach().requires_grad_() for tensor in tensors[: len(names)]]
        states = tensors[len(names) :]
        with torch.enable_grad():
            logits = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (inputs,))
            loss = loss_of(logits, labels, mask)
            gradients = torch.autograd.grad(loss, parameters)
        correct = ((logits.detach().argmax(dim=1) == labels).to(mask.dtype) * mask).sum(dim=0)
        new_parameters, new_states = [], []
        for place, (parameter, gradient) in enumerate(zip(tensors, gradients, strict=False)):
            own = states[place * len(kinds) : (place + 1) * len(kinds)]
            new_parameter, new_state = rule.update(optimiser, parameter, gradient, own, rate)
            new_parameters.append(new_parameter)
            new_states.extend(new_state)
        return loss.detach(), correct, *new_parameters, *new_states

    return run


def inference_step(module: nn.Module, input_shape: tuple[int, ...], *, batch_size: int) -> Step:
    """Make the inference step of a module: (inputs, parameters) to logits."""
    _refuse_buffers(module)
    names = [name for name, _ in module.named_parameters()]

    def run(inputs: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        logits: Tensor = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (inputs,))
        return (logits,)

    tensors, _ = _tensor_values(module, ())
    shape = (batch_size, *input_shape)
    class_count = _class_count(module, shape)
    return Step(
        run=run,
        inputs=(ValueInfo(name="input", dtype="F32", shape=shape, role="input"), *tensors),
        outputs=(ValueInfo(name="logits", dtype="F32", shape=(batch_size, class_count), role="logits"),),
        class_count=class_count,
    )


def _refuse_buffers(module: nn.Module) -> None:
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        raise ExportError(
            f"the module keeps the buffer {buffers[0]!r}, but a training step carries parameters only; "
            "use a layer without running statistics, such as GroupNorm"
        )


def _tensor_values(module: nn.Module, kinds: Sequence[str]) -> tuple[tuple[ValueInfo, ...], tuple[ValueInfo, ...]]:
    """The values of parameters, then of their states, before and after the step."""
    named = [(name, tuple(tensor.shape), _DTYPES[tensor.dtype]) for name, tensor in module.named_parameters()]

    def values(prefix: str) -> tuple[ValueInfo, ...]:
        parameters = [
            ValueInfo(name=f"{prefix}parameter.{name}", dtype=dtype, shape=shape, role="parameter", tensor=name)
            for name, shape, dtype in named
        ]
        states = [
            ValueInfo(name=f"{prefix}{kind}.{name}", dtype=dtype, shape=shape, role="optimiser_state", tensor=name)
            for name, shape, dtype in named
            for kind in kinds
        ]
        return (*parameters, *states)

    return values(""), values("new.")


def _class_count(module: nn.Module, shape: tuple[int, ...]) -> int:
    with torch.no_grad():
        logits = module(torch.zeros(shape))
    return int(logits.shape[1])


def _example(value: ValueInfo, class_count: int, generator: torch.Generator) -> Tensor:
    if value.role == "label":
        return torch.randint(0, class_count, value.shape, generator=generator)
    if value.role == "sample_mask":
        mask = torch.ones(value.shape)
        if len(mask) > 1:
            mask[-1] = 0.0
        return mask
    if value.role == "learning_rate":
        return torch.tensor(0.05)
    noise: Tensor = torch.randn(value.shape, generator=generator)
    if value.role == "optimiser_state":
        return noise * 0.1
    if value.role == "parameter" and noise.dim() > 1:
        return noise / math.sqrt(math.prod(noise.shape[1:]))  # keeps activations near 1 however wide the layers are
    return noise * 0.2 + 0.8 if value.role == "parameter" else noise
