"""The optimisers of `torch.optim` as pure functions; all their states are zero before the first step.

`apply` is 1, or 0 in a micro-batch that is not the last of its batch, where nothing may change. It is only used as a
factor of scalars, and at 1 it does not change any result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.export.steps.objectives import total
from subfleet.export.steps.step import StepInputs
from subfleet.protocol.training import OptimiserSettings

_CLIP_EPSILON = 1e-6
"""The constant of `torch.nn.utils.clip_grad_norm_`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScalars:
    """Scalars that the updates of all parameters share.

    Attributes:
        learning_rate: scalar; 0 if nothing is applied.
        apply: scalar, 1 or 0; None if every step is applied.
        shared: what the optimiser's `advance` computed from its scalar states.
    """

    learning_rate: Tensor
    apply: Tensor | None
    shared: tuple[Tensor, ...] = ()

    def decay(self, factor: float) -> Tensor | float:
        """Return a state's factor: 1 if nothing is applied."""
        return factor if self.apply is None else self.apply * factor + (1 - self.apply)

    def share(self, factor: float) -> Tensor | float:
        """Return the factor of values that are added to a state: 0 if nothing is applied."""
        return factor if self.apply is None else self.apply * factor


Advance = Callable[[OptimiserSettings, StepScalars, Sequence[Tensor]], tuple[list[Tensor], tuple[Tensor, ...]]]
Update = Callable[[OptimiserSettings, Tensor, Tensor, Sequence[Tensor], StepScalars], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimiserRule:
    """An optimiser.

    Attributes:
        states: names of the states of each parameter, which have the parameter's shape.
        scalars: names of the scalar states.
        advance: scalar states before the step to those after it, and to the values that all updates share.
        update: (parameter, gradient, states) to the new parameter and its new states.
    """

    states: Callable[[OptimiserSettings], tuple[str, ...]]
    scalars: Callable[[OptimiserSettings], tuple[str, ...]]
    advance: Advance
    update: Update


def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """Scale gradients down together to a global norm, as `torch.nn.utils.clip_grad_norm_`."""
    if not gradients:
        return []
    square = total(gradients[0] * gradients[0])
    for gradient in gradients[1:]:
        square = square + total(gradient * gradient)
    factor = (max_norm / (torch.sqrt(square) + _CLIP_EPSILON)).clamp(max=1.0)
    return [gradient * factor for gradient in gradients]


def _sgd_advance(
    settings: OptimiserSettings, scalars: StepScalars, states: Sequence[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    applied = 1.0 if scalars.apply is None else scalars.apply
    shares = tuple((1 - started * settings.dampening) * applied for started in states)
    return [(started + applied).clamp(max=1.0) for started in states], shares


def _sgd(
    settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: StepScalars
) -> tuple[Tensor, list[Tensor]]:
    """`torch.optim.SGD`."""
    if settings.weight_decay:
        gradient = gradient + parameter * settings.weight_decay
    if not states:
        return parameter - scalars.learning_rate * gradient, []
    share = scalars.shared[0] if scalars.shared else scalars.share(1.0)
    added = gradient if isinstance(share, float) else gradient * share
    momentum = states[0] * scalars.decay(settings.momentum) + added
    direction = gradient + momentum * settings.momentum if settings.nesterov else momentum
    return parameter - scalars.learning_rate * direction, [momentum]


def _adam_advance(
    settings: OptimiserSettings, scalars: StepScalars, states: Sequence[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    betas = (settings.beta1, settings.beta2)
    new = [state * scalars.decay(beta) + scalars.share(1 - beta) for state, beta in zip(states, betas, strict=True)]
    # They are 0 before the first applied step, where the learning rate is 0 too.
    first, second = (state.clamp(min=(1 - beta) / 2) for state, beta in zip(new, betas, strict=True))
    return new, (scalars.learning_rate / first, torch.rsqrt(second))


def _adam(
    settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: StepScalars
) -> tuple[Tensor, list[Tensor]]:
    """`torch.optim.Adam`, and `torch.optim.AdamW`, which does not add the weight decay to the gradient."""
    is_decoupled = settings.name == "adamw"
    if settings.weight_decay and not is_decoupled:
        gradient = gradient + parameter * settings.weight_decay
    first = states[0] * scalars.decay(settings.beta1) + gradient * scalars.share(1 - settings.beta1)
    second = states[1] * scalars.decay(settings.beta2) + gradient * gradient * scalars.share(1 - settings.beta2)
    rate, inverse_root = scalars.shared
    change = rate * (first / (torch.sqrt(second) * inverse_root + settings.epsilon))
    if settings.weight_decay and is_decoupled:
        parameter = parameter * (1 - scalars.learning_rate * settings.weight_decay)
    return parameter - change, [first, second]


_SGD = OptimiserRule(
    states=lambda settings: ("momentum",) if settings.momentum else (),
    # PyTorch's momentum starts as the first gradient, undampened, so the first step must be known.
    scalars=lambda settings: ("started",) if settings.momentum and settings.dampening else (),
    advance=_sgd_advance,
    update=_sgd,
)
_ADAM = OptimiserRule(
    states=lambda _settings: ("first_moment", "second_moment"),
    # 1 - beta ** steps of both moments, instead of a count: single precision would lose that power's digits.
    scalars=lambda _settings: ("first_correction", "second_correction"),
    advance=_adam_advance,
    update=_adam,
)
OPTIMISERS: Mapping[str, OptimiserRule] = MappingProxyType({"sgd": _SGD, "adam": _ADAM, "adamw": _ADAM})


def apply_optimiser(
    settings: OptimiserSettings, step_inputs: StepInputs, gradients: Mapping[str, Tensor], apply: Tensor | None
) -> list[list[Tensor]]:
    """Return new parameters, each kind of states, and scalar states.

    Args:
        settings: the optimiser; gradients are already clipped.
        step_inputs: a learning rate, parameters, their states by kind, then scalar states.
        gradients: by parameter; a parameter without one does not change.
        apply: see the module's docstring.
    """
    rule, old = OPTIMISERS[settings.name], step_inputs.by_tensor("parameter")
    rate = step_inputs.single("learning_rate") if apply is None else step_inputs.single("learning_rate") * apply
    kinds, every_state = rule.states(settings), step_inputs.all("optimiser_state")
    states = {
        name: [every_state[len(old) * kind + index] for kind in range(len(kinds))] for index, name in enumerate(old)
    }
    scalars = StepScalars(learning_rate=rate, apply=apply)
    new_scalars, shared = rule.advance(settings, scalars, every_state[len(old) * len(kinds) :])
    scalars = replace(scalars, shared=shared)
    new = {
        name: rule.update(settings, old[name], gradient, states[name], scalars) for name, gradient in gradients.items()
    }
    for name in old:
        new.setdefault(name, (old[name].clone(), [state.clone() for state in states[name]]))
    groups = [[new[name][0] for name in old]]
    groups += [[new[name][1][kind] for name in old] for kind in range(len(kinds))]
    return [*groups, new_scalars]
