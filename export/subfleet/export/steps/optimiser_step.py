"""An optimiser's step over all parameters of a network, in the order of a step's values."""

from collections.abc import Mapping

from torch import Tensor

from subfleet.export.steps.given import StepInputs
from subfleet.export.steps.optimisers import OPTIMISERS, StepScalars
from subfleet.protocol.training import OptimiserSettings

__all__ = ["apply_optimiser"]


def apply_optimiser(
    settings: OptimiserSettings, given: StepInputs, gradients: Mapping[str, Tensor], apply: Tensor | None
) -> list[list[Tensor]]:
    """New parameters, each kind of states, and scalar states.

    Args:
        settings: the optimiser; gradients are clipped already.
        given: a learning rate, parameters, and the states of these by kind, then the scalar ones.
        gradients: by parameter; one that has none stays as it is.
        apply: as in `subfleet.export.steps.optimisers`.
    """
    rule, old = OPTIMISERS[settings.name], given.by_tensor("parameter")
    rate = given.single("learning_rate") if apply is None else given.single("learning_rate") * apply
    kinds, every_state = rule.states(settings), given.all("optimiser_state")
    states = {
        name: [every_state[len(old) * kind + index] for kind in range(len(kinds))] for index, name in enumerate(old)
    }
    scalars = StepScalars(learning_rate=rate, apply=apply)
    new_scalars, shared = rule.advance(settings, scalars, every_state[len(old) * len(kinds) :])
    scalars = StepScalars(learning_rate=rate, apply=apply, shared=shared)
    new: dict[str, tuple[Tensor, list[Tensor]]] = {
        name: rule.update(settings, old[name], gradient, states[name], scalars) for name, gradient in gradients.items()
    }
    for name in old:
        new.setdefault(name, (old[name].clone(), [state.clone() for state in states[name]]))
    groups = [[new[name][0] for name in old]]
    groups += [[new[name][1][kind] for name in old] for kind in range(len(kinds))]
    return [*groups, new_scalars]
