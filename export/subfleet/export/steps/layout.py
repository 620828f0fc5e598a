"""The inputs and outputs of a training step in order, and those that other steps share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from subfleet.export.steps.module_calls import buffers_of
from subfleet.export.steps.objectives import OBJECTIVES
from subfleet.export.steps.optimisers import OPTIMISERS
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


def scalar(name: str, role: Role) -> ValueInfo:
    """Describe a scalar value."""
    return ValueInfo(name=name, dtype="F32", shape=(), role=role)


def label_of(objective: ObjectiveSettings, logits: tuple[int, ...]) -> ValueInfo:
    """Describe the labels that an objective compares with logits of this shape.

    Raises:
        ExportError: the logits do not fit the objective.
    """
    rule = OBJECTIVES[objective.name]
    shape = rule.label_shape(logits)
    limit = logits[-1] if rule.label_dtype == "I64" else 0
    return ValueInfo(name="label", dtype=rule.label_dtype, shape=shape, role="label", limit=limit)


def mask_of(batch_size: int) -> ValueInfo:
    """Describe the mask of real samples."""
    return ValueInfo(name="sample_mask", dtype="F32", shape=(batch_size,), role="sample_mask")


def weights_of(module: nn.Module) -> tuple[ValueInfo, ...]:
    """Describe a module's parameters and buffers as inputs of a step."""
    parameters = _tensor_values(dict(module.named_parameters()), "parameter")
    return (*parameters, *_tensor_values(buffers_of(module), "buffer"))


def metric_values(objective: ObjectiveSettings) -> tuple[ValueInfo, ...]:
    """Return the metrics of a training step."""
    names: tuple[Role, ...] = ("loss", "correct", "count")
    return tuple(scalar(name, name) for name in (*names, *(("squares",) if objective.squares else ())))


def with_role(values: Iterable[ValueInfo], role: Role, kind: str = "") -> Iterator[ValueInfo]:
    """Yield the values of another role for the same tensors, such as the gradients of parameters.

    Args:
        values: values of tensors.
        role: the other role.
        kind: first part of their names; the role if it is empty.
    """
    for value in values:
        yield replace(value, name=f"{kind or role}.{value.tensor}", role=role)


def states_of(parameters: Sequence[ValueInfo], optimiser: OptimiserSettings) -> Iterator[ValueInfo]:
    """Yield the states that an optimiser keeps for each parameter, by kind."""
    for kind in OPTIMISERS[optimiser.name].states(optimiser):
        yield from with_role(parameters, "optimiser_state", kind)


def describe_next(value: ValueInfo) -> ValueInfo:
    """Describe the output that holds a carried value after the step."""
    return replace(value, name=f"new.{value.name}")


def training_values(  # noqa: PLR0913 - each determines some of the values
    module: nn.Module,
    sample: ValueInfo,
    logits: tuple[int, ...],
    randoms: Sequence[tuple[int, ...]],
    *,
    objective: ObjectiveSettings,
    optimiser: OptimiserSettings,
    accumulate: bool,
) -> tuple[tuple[ValueInfo, ...], tuple[ValueInfo, ...]]:
    """Return the inputs and outputs of a training step.

    Args:
        module: the module; parameters that need no gradient are frozen.
        sample: the step's input.
        logits: shape of the prediction.
        randoms: shapes of the random inputs.
        objective: the objective.
        optimiser: the optimiser's settings.
        accumulate: whether gradients are summed over micro-batches.
    """
    named = dict(module.named_parameters())
    parameters = tuple(_tensor_values({name: part for name, part in named.items() if part.requires_grad}, "parameter"))
    frozen = _tensor_values({name: part for name, part in named.items() if not part.requires_grad}, "frozen")
    carried = [*parameters, *_tensor_values(buffers_of(module), "buffer"), *states_of(parameters, optimiser)]
    carried += [scalar(kind, "optimiser_state") for kind in OPTIMISERS[optimiser.name].scalars(optimiser)]
    values = [sample, label_of(objective, logits), mask_of(sample.shape[0]), scalar("learning_rate", "learning_rate")]
    if accumulate:
        carried += with_role(parameters, "gradient")
        values += [scalar("batch_weight", "batch_weight"), scalar("apply", "apply")]
    if objective.class_mask:
        values.append(ValueInfo(name="class_mask", dtype="F32", shape=logits[-1:], role="class_mask"))
    if objective.proximal:
        values.append(scalar("proximal_mu", "coefficient"))
    if objective.distillation != "none":
        values.append(scalar("distillation_weight", "coefficient"))
    values += [
        ValueInfo(name=f"random.{index}", dtype="F32", shape=shape, role="random")
        for index, shape in enumerate(randoms)
    ]
    anchors = with_role(parameters, "anchor") if objective.proximal else ()
    return (*values, *carried, *frozen, *anchors), (*metric_values(objective), *map(describe_next, carried))


def _tensor_values(tensors: Mapping[str, Tensor], role: Role) -> Iterator[ValueInfo]:
    for name, tensor in tensors.items():
        yield ValueInfo(name=f"{role}.{name}", dtype="F32", shape=tuple(tensor.shape), role=role, tensor=name)
