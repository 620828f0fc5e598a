"""The values of a chain's programs, and of the whole chain as a training or evaluation program has them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from subfleet.export.steps.layout import (
    describe_next,
    label_of,
    mask_of,
    metric_values,
    scalar,
    states_of,
    weights_of,
    with_role,
)
from subfleet.export.steps.optimisers import OPTIMISERS
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkValues:
    """The inputs, outputs and weights of a module that computes a link.

    Attributes:
        reads: its input, of role "input" in the first link, otherwise "features".
        gives: features, or logits in the last link.
        weights: parameters and buffers.
    """

    reads: ValueInfo
    gives: ValueInfo
    weights: tuple[ValueInfo, ...]

    @property
    def mask(self) -> ValueInfo:
        """The mask of real samples."""
        return mask_of(self.reads.shape[0])

    @property
    def output_gradient(self) -> ValueInfo:
        """The incoming gradient of the link's output."""
        return replace(self.gives, name="given_gradient", role="features_gradient")

    @property
    def forward_outputs(self) -> tuple[ValueInfo, ...]:
        """The outputs of a forward program in training."""
        return (self.gives, *self._new_buffers)

    @property
    def gradients(self) -> tuple[ValueInfo, ...]:
        """The outputs of a backward program: gradients of the input, unless it is the first link, and of parameters."""
        before = [replace(self.reads, name="read_gradient", role="features_gradient")]
        return (*(before if self.reads.role == "features" else ()), *with_role(self.parameters, "gradient"))

    def loss_outputs(self, objective: ObjectiveSettings) -> tuple[ValueInfo, ...]:
        """Return the outputs of the last link's program in training."""
        return (*metric_values(objective), *self.gradients, *self._new_buffers)

    @property
    def parameters(self) -> tuple[ValueInfo, ...]:
        """The parameters, in the module's order."""
        return of_role(self.weights, "parameter")

    @property
    def _new_buffers(self) -> tuple[ValueInfo, ...]:
        return tuple(map(describe_next, of_role(self.weights, "buffer")))


def of_role(values: Iterable[ValueInfo], role: Role) -> tuple[ValueInfo, ...]:
    """Return the values of a role."""
    return tuple(value for value in values if value.role == role)


def update_inputs(parameters: Sequence[ValueInfo], optimiser: OptimiserSettings) -> tuple[ValueInfo, ...]:
    """Return the inputs of the program that updates a piece's parameters."""
    scalars = (scalar(kind, "optimiser_state") for kind in OPTIMISERS[optimiser.name].scalars(optimiser))
    fed = (scalar("learning_rate", "learning_rate"), scalar("gradient_scale", "gradient_scale"))
    return (*fed, *parameters, *with_role(parameters, "gradient"), *states_of(parameters, optimiser), *scalars)


def update_outputs(parameters: Sequence[ValueInfo], optimiser: OptimiserSettings) -> tuple[ValueInfo, ...]:
    """Return the outputs of the program that updates a piece's parameters."""
    inputs = update_inputs(parameters, optimiser)
    return tuple(describe_next(value) for value in inputs if value.role in ("parameter", "optimiser_state"))


def chain_training(
    module: nn.Module,
    sample: ValueInfo,
    logits: ValueInfo,
    parts: Sequence[str],
    objective: ObjectiveSettings,
    optimiser: OptimiserSettings,
) -> tuple[tuple[ValueInfo, ...], tuple[ValueInfo, ...]]:
    """Return inputs and outputs of a whole chain, like those of a program that sums gradients; here the device sums.

    Args:
        module: the supernet's module.
        sample: the input of a batch.
        logits: shape of a batch's logits.
        parts: names of the parts with parameters: each has its own scalar states, as it only steps when it is drawn.
        objective: the objective to minimise.
        optimiser: the optimiser's settings.
    """
    weights = weights_of(module)
    scalars = (
        scalar(f"{kind}.{part}", "optimiser_state")
        for kind in OPTIMISERS[optimiser.name].scalars(optimiser)
        for part in parts
    )
    carried = (*weights, *states_of(of_role(weights, "parameter"), optimiser), *scalars)
    fed = (scalar(name, name) for name in ("learning_rate", "batch_weight", "apply"))
    inputs = (sample, label_of(objective, logits.shape), mask_of(sample.shape[0]), *fed, *carried)
    return inputs, (*metric_values(objective), *map(describe_next, carried))


def chain_evaluation(
    module: nn.Module, sample: ValueInfo, logits: ValueInfo, objective: ObjectiveSettings
) -> tuple[tuple[ValueInfo, ...], tuple[ValueInfo, ...]]:
    """Return inputs and outputs of a whole chain, like those of an evaluation program."""
    inputs = (sample, label_of(objective, logits.shape), mask_of(sample.shape[0]), *weights_of(module))
    return inputs, (*metric_values(objective), replace(logits, name="logits", role="logits"))
