"""The inputs and outputs of a training step in order, and those that other steps share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from subfleet.export.steps.module_calls import buffers_of
from subfleet.export.steps.objectives import OBJECTIVES
from subfleet.export.steps.optimisers import OPTIMISERS
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """What determines the inputs and outputs of a step.

    Attributes:
        sample: the step's input.
        logits: shape of the prediction.
        randoms: shapes of the random inputs.
        parameters: shapes of the trained parameters, by tensor name.
        frozen: shapes of the other parameters, by tensor name.
        buffers: shapes by tensor name.
        objective: the objective.
        optimiser: the optimiser's settings.
        accumulate: whether gradients are summed over micro-batches.
    """

    sample: ValueInfo
    logits: tuple[int, ...]
    randoms: tuple[tuple[int, ...], ...]
    parameters: Mapping[str, tuple[int, ...]]
    frozen: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    objective: ObjectiveSettings
    optimiser: OptimiserSettings
    accumulate: bool

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the scalars of `TrainingSettings` that the step takes."""
        used = {
            "proximal_mu": self.objective.proximal,
            "distillation_weight": self.objective.distillation != "none",
        }
        return tuple(name for name, is_wanted in used.items() if is_wanted)


def scalar(name: str, role: Role) -> ValueInfo:
    """Describe a scalar value."""
    return ValueInfo(name=name, dtype="F32", shape=(), role=role)


def _tensor_values(
    shapes: Mapping[str, tuple[int, ...]], kind: str, role: Role, prefix: str = ""
) -> Iterator[ValueInfo]:
    for name, shape in shapes.items():
        yield ValueInfo(name=f"{prefix}{kind}.{name}", dtype="F32", shape=shape, role=role, tensor=name)


def _carried_values(shapes: StepShapes, prefix: str) -> Iterator[ValueInfo]:
    """Yield the values that are carried from step to step."""
    rule = OPTIMISERS[shapes.optimiser.name]
    yield from _tensor_values(shapes.parameters, "parameter", "parameter", prefix)
    yield from _tensor_values(shapes.buffers, "buffer", "buffer", prefix)
    for kind in rule.states(shapes.optimiser):
        yield from _tensor_values(shapes.parameters, kind, "optimiser_state", prefix)
    for kind in rule.scalars(shapes.optimiser):
        yield scalar(f"{prefix}{kind}", "optimiser_state")
    if shapes.accumulate:
        yield from _tensor_values(shapes.parameters, "gradient", "gradient", prefix)


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
    parameters = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    buffers = {name: tuple(tensor.shape) for name, tensor in buffers_of(module).items()}
    return (*_tensor_values(parameters, "parameter", "parameter"), *_tensor_values(buffers, "buffer", "buffer"))


def step_inputs(shapes: StepShapes) -> tuple[ValueInfo, ...]:
    """Return a training step's inputs."""
    batch_size = shapes.sample.shape[0]
    class_count = shapes.logits[-1]
    label = label_of(shapes.objective, shapes.logits)
    values = [shapes.sample, label, mask_of(batch_size), scalar("learning_rate", "learning_rate")]
    if shapes.accumulate:
        values += [scalar("batch_weight", "batch_weight"), scalar("apply", "apply")]
    if shapes.objective.class_mask:
        values.append(ValueInfo(name="class_mask", dtype="F32", shape=(class_count,), role="class_mask"))
    values += [scalar(name, "coefficient") for name in shapes.coefficients]
    values += [
        ValueInfo(name=f"random.{index}", dtype="F32", shape=shape, role="random")
        for index, shape in enumerate(shapes.randoms)
    ]
    values += _carried_values(shapes, "")
    values += _tensor_values(shapes.frozen, "frozen", "frozen")
    if shapes.objective.proximal:
        values += _tensor_values(shapes.parameters, "anchor", "anchor")
    return tuple(values)


def metric_values(objective: ObjectiveSettings) -> tuple[ValueInfo, ...]:
    """Return the metrics of a training step."""
    names: tuple[Role, ...] = ("loss", "correct", "count")
    return tuple(scalar(name, name) for name in (*names, *(("squares",) if objective.squares else ())))


def step_outputs(shapes: StepShapes) -> tuple[ValueInfo, ...]:
    """Return a training step's outputs."""
    return (*metric_values(shapes.objective), *_carried_values(shapes, "new."))
