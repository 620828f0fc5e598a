"""PyTorch's own losses and optimisers, and copies of a module as its author wrote it, in a given precision."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from subfleet.export.steps.parameter_hooks import copy_hooks
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


def copy_module(module: nn.Module, tensors: Mapping[str, Tensor], precision: torch.dtype) -> nn.Module:
    """Copy a module with the given tensors; each layer keeps its mode.

    Args:
        module: it is not changed.
        tensors: values of its parameters and buffers, by name; tied ones need one name.
        precision: converts everything else in single precision: buffers, attributes, tensors in lists.

    Raises:
        ExportError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in tensors.items():
        old, new = tensor_of(module, name), tensor.detach().clone()
        memo[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    try:
        with _TensorCopying(precision):
            copied = copy.deepcopy(module, memo)
            for old in module.parameters():  # PyTorch copies no hook of a parameter
                if old.requires_grad:
                    copy_hooks(memo[id(old)], old, memo)
            return copied
    except Exception as error:
        raise ExportError(
            "the network cannot be copied, so its program cannot be verified: "
            f"{type(error).__name__}: {error!s:.200}; remove attributes that Python cannot copy, such as locks"
        ) from error


def tensor_of(module: nn.Module, name: str) -> Any:
    """Return a module's parameter, buffer or attribute by name."""
    tensor: Any = reduce(getattr, name.split("."), module)
    return tensor


def as_exits(outputs: Any) -> tuple[Tensor, ...]:
    """Return the logits of each exit, one or several."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


@contextmanager
def compute_in(precision: torch.dtype) -> Iterator[None]:
    """Let a module compute in this precision, also where its code asks for single precision.

    Raises:
        ExportError: it cannot, for example because TorchScript compiled its code for single precision.
    """
    with ExitStack() as stack:
        if precision == torch.float64:
            stack.enter_context(_DoublePrecision())
        try:
            yield
        except (RuntimeError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"the network cannot be run in {precision} as it is, so no program of it can be verified: "
                f"{type(error).__name__}: {reason}; keep its numbers in PyTorch's tensors and functions, and "
                "take their type from its inputs"
            ) from error


class _TensorCopying(TorchFunctionMode):
    """Copies any tensor of a module, also results of operations, which PyTorch refuses to copy."""

    def __init__(self, precision: torch.dtype) -> None:
        super().__init__()
        self._precision = precision

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy a tensor; everything else is left to PyTorch."""
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        new = tensor.detach().clone()
        memo[id(tensor)] = new.to(self._precision) if new.dtype == torch.float32 else new
        return memo[id(tensor)]


class _DoublePrecision(TorchFunctionMode):
    """Turns every single precision that a module's code names, keeps or gets from PyTorch into double precision."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        if func is Tensor.float:
            func = Tensor.double
        if func is functional.rms_norm:
            func = _rms_norm
        args, kwargs = pytree.tree_map(_to_double, (args, dict(kwargs or {})))
        return pytree.tree_map(_to_double, func(*args, **kwargs))


def _rms_norm(
    inputs: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Without an epsilon, PyTorch chooses another one in each precision; the network's is that of single precision."""
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    return functional.rms_norm(inputs, list(normalized_shape), weight, epsilon)


def _to_double(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


_NOT_COUNTED = -100
"""PyTorch's own `ignore_index`."""


def counted_labels(settings: ObjectiveSettings, labels: Tensor) -> Tensor:
    """Return which labels count."""
    return labels >= 0 if settings.over_classes else torch.ones_like(labels, dtype=torch.bool)


OwnLoss = Callable[[Tensor, Tensor], Tensor] | None
"""A module's own loss of each label; None takes the objective's."""


def find_own_loss(module: nn.Module) -> OwnLoss:
    """Return the loss that a module has of its own."""
    own: OwnLoss = getattr(module, "own_loss", None)
    return own


def sum_losses(settings: ObjectiveSettings, logits: Tensor, labels: Tensor, own: OwnLoss = None) -> Tensor:
    """Return the loss, summed over the labels that count."""
    if own is not None:
        return own(logits, labels)[counted_labels(settings, labels)].sum()
    return _LOSSES[settings.name](settings, logits, labels, "sum")


def sum_squares(settings: ObjectiveSettings, logits: Tensor, labels: Tensor, own: OwnLoss = None) -> Tensor:
    """Return the sum of the squared losses of the labels that count."""
    if own is not None:
        return own(logits, labels)[counted_labels(settings, labels)].square().sum()
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
            # With a beta of 0 the correction is 1 from the first step on, and carries no more information.
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
