"""The values of a training step, in the order in which it takes and gives them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from subfleet.export.steps.objectives import OBJECTIVES
from subfleet.export.steps.optimisers import OPTIMISERS
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["StepShapes", "after", "before"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """What the values of a step follow from.

    Attributes:
        sample: the step's input.
        logits: shape of the prediction.
        randoms: shapes of the randomness.
        parameters: shapes by tensor name.
        buffers: shapes by tensor name.
        objective: what is minimised.
        optimiser: its settings.
        accumulate: whether gradients are summed over micro-batches.
    """

    sample: ValueInfo
    logits: tuple[int, ...]
    randoms: tuple[tuple[int, ...], ...]
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    objective: ObjectiveSettings
    optimiser: OptimiserSettings
    accumulate: bool

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the scalars of `TrainingSettings` that the step takes."""
        wanted = {
            "proximal_mu": self.objective.proximal,
            "distillation_weight": self.objective.distillation != "none",
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def _scalar(name: str, role: Role) -> ValueInfo:
    return ValueInfo(name=name, dtype="F32", shape=(), role=role)


def _tensors(shapes: Mapping[str, tuple[int, ...]], kind: str, role: Role, prefix: str = "") -> Iterator[ValueInfo]:
    for name, shape in shapes.items():
        yield ValueInfo(name=f"{prefix}{kind}.{name}", dtype="F32", shape=shape, role=role, tensor=name)


def _carried(shapes: StepShapes, prefix: str) -> Iterator[ValueInfo]:
    """What goes from step to step."""
    rule = OPTIMISERS[shapes.optimiser.name]
    yield from _tensors(shapes.parameters, "parameter", "parameter", prefix)
    yield from _tensors(shapes.buffers, "buffer", "buffer", prefix)
    for kind in rule.states(shapes.optimiser):
        yield from _tensors(shapes.parameters, kind, "optimiser_state", prefix)
    for kind in rule.scalars(shapes.optimiser):
        yield _scalar(f"{prefix}{kind}", "optimiser_state")
    if shapes.accumulate:
        yield from _tensors(shapes.parameters, "gradient", "gradient", prefix)


def before(shapes: StepShapes) -> tuple[ValueInfo, ...]:
    """A step's inputs."""
    batch_size = shapes.sample.shape[0]
    rule = OBJECTIVES[shapes.objective.name]
    class_count = shapes.logits[-1]
    label = ValueInfo(
        name="label",
        dtype=rule.label_dtype,
        shape=rule.label_shape(shapes.logits),
        role="label",
        limit=class_count if rule.label_dtype == "I64" else 0,
    )
    mask = ValueInfo(name="sample_mask", dtype="F32", shape=(batch_size,), role="sample_mask")
    values = [shapes.sample, label, mask, _scalar("learning_rate", "learning_rate")]
    if shapes.accumulate:
        values += [_scalar("batch_weight", "batch_weight"), _scalar("apply", "apply")]
    if shapes.objective.class_mask:
        values.append(ValueInfo(name="class_mask", dtype="F32", shape=(class_count,), role="class_mask"))
    values += [_scalar(name, "coefficient") for name in shapes.coefficients]
    values += _randoms(shapes.randoms)
    values += _carried(shapes, "")
    if shapes.objective.proximal:
        values += _tensors(shapes.parameters, "anchor", "anchor")
    return tuple(values)


def _randoms(shapes: Sequence[tuple[int, ...]]) -> list[ValueInfo]:
    return [
        ValueInfo(name=f"random.{place}", dtype="F32", shape=shape, role="random") for place, shape in enumerate(shapes)
    ]


def after(shapes: StepShapes) -> tuple[ValueInfo, ...]:
    """A step's outputs."""
    names: tuple[Role, ...] = ("loss", "correct", "count")
    read = (_scalar(name, name) for name in (*names, *(("squares",) if shapes.objective.squares else ())))
    return (*read, *_carried(shapes, "new."))
