"""PyTorch's own losses and optimisers, by the names that a step has for them."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = [
    "correct_count",
    "counted_labels",
    "divergence",
    "loss_squares",
    "mutual_divergence",
    "own_loss",
    "take_pytorch_step",
]

_NOT_COUNTED = -100
"""PyTorch's own `ignore_index`."""


def counted_labels(settings: ObjectiveSettings, labels: Tensor) -> Tensor:
    """Return which labels count."""
    return labels >= 0 if settings.over_classes else torch.ones_like(labels, dtype=torch.bool)


def own_loss(settings: ObjectiveSettings, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the objective itself, summed over the labels that count."""
    return _LOSSES[settings.name](settings, logits, labels, "sum")


def loss_squares(settings: ObjectiveSettings, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the squared losses of the labels."""
    return _LOSSES[settings.name](settings, logits, labels, "none").square().sum()


def correct_count(settings: ObjectiveSettings, logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many labels that count are predicted correctly."""
    hits = logits.argmax(-1) == labels if settings.over_classes else (logits > 0) == (labels > 0.5)
    return (hits & counted_labels(settings, labels)).sum() * (settings.name != "mean_squared_error")


def divergence(settings: ObjectiveSettings, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
    """Return the student's divergence from the fixed teacher, times T squared (Hinton et al. 2015, section 2)."""
    elementwise = functional.kl_div(
        functional.log_softmax(student / settings.temperature, dim=-1),
        functional.softmax(teacher.detach() / settings.temperature, dim=-1),
        reduction="none",
    )
    return elementwise.sum(dim=-1)[counted_labels(settings, labels)].sum() * settings.temperature**2


def mutual_divergence(settings: ObjectiveSettings, exits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Return every exit's mean divergence from all others (DepthFL, Kim et al. 2023, section 3.2)."""
    pairs = [(teacher, student) for student in exits for teacher in exits if teacher is not student]
    terms = [divergence(settings, teacher, student, labels) for teacher, student in pairs]
    return torch.stack(terms).sum() / (len(exits) - 1)


def _class_loss(settings: ObjectiveSettings, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten().masked_fill(labels.flatten() < 0, _NOT_COUNTED),
        ignore_index=_NOT_COUNTED,
        label_smoothing=settings.label_smoothing,
        reduction=reduction,
    )


def _binary_loss(_settings: ObjectiveSettings, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction=reduction)


def _squared_loss(_settings: ObjectiveSettings, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction=reduction)


_LOSSES: Mapping[str, Callable[[ObjectiveSettings, Tensor, Tensor, str], Tensor]] = MappingProxyType(
    {
        "cross_entropy": _class_loss,
        "next_token": _class_loss,
        "dense_cross_entropy": _class_loss,
        "binary_cross_entropy": _binary_loss,
        "mean_squared_error": _squared_loss,
    }
)


_STATES: Mapping[str, str] = MappingProxyType(
    {"momentum": "momentum_buffer", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
)
"""The step's names of states, and PyTorch's."""
_CORRECTIONS = ("first_correction", "second_correction")


def take_pytorch_step(
    settings: OptimiserSettings,
    parameters: Mapping[str, nn.Parameter],
    states: Mapping[ValueInfo, Tensor],
    learning_rate: float,
) -> dict[str, Tensor]:
    """Take an optimiser's step with the gradients in the parameters' `grad`.

    Args:
        settings: the optimiser.
        parameters: by name; changed in place, except those without a gradient.
        states: before the step.
        learning_rate: 0 or more.

    Returns:
        The states after the step, by the names of the step's outputs.
    """
    trained = [part for part in parameters.values() if part.grad is not None]
    if settings.max_gradient_norm:
        torch.nn.utils.clip_grad_norm_(trained, settings.max_gradient_norm)
    optimiser = _OPTIMISERS[settings.name](trained, learning_rate, settings)
    steps = _steps_before(settings, {value.name: tensor for value, tensor in states.items() if not value.tensor})
    own = {value: tensor for value, tensor in states.items() if value.tensor}
    for value, tensor in own.items():
        if parameters[value.tensor].grad is not None and steps != 0:
            state = optimiser.state[parameters[value.tensor]]
            state[_kind(value)] = tensor.clone()
            state["step"] = torch.tensor(float(steps or 1))
    optimiser.step()
    after = {
        f"new.{value.name}": optimiser.state.get(parameters[value.tensor], {}).get(_kind(value), tensor)
        for value, tensor in own.items()
    }
    scalars = _scalars_after(settings, (steps or 0) + 1)
    return after | {
        f"new.{value.name}": torch.full_like(tensor, scalars[value.name])
        for value, tensor in states.items()
        if not value.tensor
    }


def _kind(value: ValueInfo) -> str:
    return _STATES[value.name.removesuffix(f".{value.tensor}")]


def _steps_before(settings: OptimiserSettings, scalars: Mapping[str, Tensor]) -> int | None:
    """Return the number of steps that the scalar states imply; None without any, where zero states equal no step."""
    if "started" in scalars:
        return round(float(scalars["started"]))
    steps = None
    for name, beta in zip(_CORRECTIONS, (settings.beta1, settings.beta2), strict=True):
        if name in scalars and steps is None:
            correction = float(scalars[name])
            # With a beta of 0 the correction is 1 from the first step on, and says no more.
            steps = round(math.log1p(-correction) / math.log(beta)) if beta else None
            if not correction:
                steps = 0
    return steps


def _scalars_after(settings: OptimiserSettings, steps: int) -> dict[str, float]:
    betas = (settings.beta1, settings.beta2)
    return {"started": 1.0} | {name: 1 - beta**steps for name, beta in zip(_CORRECTIONS, betas, strict=True)}


_Make = Callable[[list[nn.Parameter], float, OptimiserSettings], torch.optim.Optimizer]


def _sgd(parameters: list[nn.Parameter], learning_rate: float, settings: OptimiserSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters,
        lr=learning_rate,
        momentum=settings.momentum,
        dampening=settings.dampening,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
    )


def _adam(kind: Any) -> _Make:
    def make(parameters: list[nn.Parameter], learning_rate: float, settings: OptimiserSettings) -> Any:
        return kind(
            parameters,
            lr=learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )

    return make


_OPTIMISERS: Mapping[str, _Make] = MappingProxyType(
    {"sgd": _sgd, "adam": _adam(torch.optim.Adam), "adamw": _adam(torch.optim.AdamW)}
)
