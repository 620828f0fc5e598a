"""A step: names, shapes and roles of its inputs and outputs, and random examples of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from subfleet.elastic.maps import TensorMap
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import Role, ValueInfo

__all__ = ["DTYPES", "SampleSpec", "Step", "StepInputs", "Student"]

DTYPES: Mapping[torch.dtype, str] = MappingProxyType({torch.float32: "F32", torch.int64: "I64"})
"""What a program's values may be, with their names in the tensor container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """The input of one sample.

    Attributes:
        shape: without the batch.
        dtype: "F32", or "I64" for indices such as tokens.
        limit: exclusive upper bound of the indices, 1 or more with "I64"; else 0.
    """

    shape: tuple[int, ...]
    dtype: Literal["F32", "I64"] = "F32"
    limit: int = 0

    def __post_init__(self) -> None:
        if self.shape and min(self.shape) < 1:
            raise ValueError(f"a sample's shape is {self.shape}, but its sizes must be 1 or more")
        if (self.dtype == "I64") != (self.limit > 0):
            raise ValueError(f"a sample's limit is {self.limit}, but must be 1 or more with I64 and 0 with F32")

    def value(self, batch_size: int) -> ValueInfo:
        """The step's input of a batch.

        Raises:
            ExportError: there is no sample in it.
        """
        if batch_size < 1:
            raise ExportError(f"the batch size is {batch_size}, but must be 1 or more")
        shape = (batch_size, *self.shape)
        return ValueInfo(name="input", dtype=self.dtype, shape=shape, role="input", limit=self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """A network nested in the one that is trained, for self-distillation (FjORD, section 3.3).

    Attributes:
        module: the student, of its own size; its weights are never read.
        maps: for each of its parameters, where it lies in the parameter of that name of the module that is trained.
    """

    module: nn.Module
    maps: Mapping[str, TensorMap]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A pure function over tensors, with the names and roles of what goes in and comes out.

    Attributes:
        run: takes one tensor for each of `inputs`, gives one for each of `outputs`; in single or double precision.
        reference: the same of the untouched module, which the programs of this step are compared with; see
            `subfleet.export.steps.reference`.
        inputs: in order.
        outputs: in order.
        class_count: exclusive upper bound of the labels; 0 where they are no classes.
        padded_labels: whether labels below 0 are usual: tokens that are not counted.
        carried: the network's own parameters and buffers, by name: no constant may lie in their memory.
        held: all tensors that it holds, by name.
    """

    run: Callable[..., tuple[Tensor, ...]]
    reference: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    class_count: int = 0
    padded_labels: bool = False
    carried: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    held: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def example(
        self, generator: torch.Generator, *, apply: bool = True, sample_count: int | None = None
    ) -> tuple[Tensor, ...]:
        """Random inputs of the right shapes.

        Args:
            generator: of the random numbers.
            apply: whether a micro-batch is the last of its batch.
            sample_count: real samples, the others masked out; by default all but the last wherever there are two.
        """
        tensors = [_example(value, generator) for value in self.inputs]
        for index, value in enumerate(self.inputs):
            if value.role == "apply" and not apply:
                tensors[index] = torch.zeros(())
            if value.role == "label" and self.padded_labels:
                tensors[index].view(-1)[::3] = -1
            if value.role == "sample_mask" and sample_count is not None:
                tensors[index][sample_count:] = 0.0
        return tuple(tensors)


def _mask(shape: tuple[int, ...], _generator: torch.Generator) -> Tensor:
    mask = torch.ones(shape)
    if len(mask) > 1:
        mask[-1] = 0.0
    return mask


def _weights(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Keeps activations near 1 however wide the layers are."""
    noise = torch.randn(shape, generator=generator)
    return noise / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else noise * 0.2 + 0.8


_Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _constant(number: float) -> _Draw:
    return lambda shape, _generator: torch.full(shape, number)


def _normal(scale: float) -> _Draw:
    return lambda shape, generator: torch.randn(shape, generator=generator) * scale


def _uniform(low: float, high: float) -> _Draw:
    return lambda shape, generator: torch.rand(shape, generator=generator) * (high - low) + low


_DRAWS: Mapping[Role, _Draw] = MappingProxyType(
    {
        "input": _normal(1.0),
        "label": _uniform(0.0, 1.0),
        "sample_mask": _mask,
        "learning_rate": _constant(0.05),
        "random": _uniform(0.0, 1.0),
        "class_mask": _mask,
        "coefficient": _constant(0.3),
        "frozen": _weights,
        "anchor": _weights,
        "batch_weight": _constant(7.0),
        "apply": _constant(1.0),
        "parameter": _weights,
        "buffer": _uniform(0.5, 1.5),  # a variance is above 0
        "optimiser_state": _uniform(0.01, 0.1),  # a second moment is above 0
        "gradient": _normal(0.1),
        "features": _normal(1.0),
        "features_gradient": _normal(0.1),
        "gradient_scale": _constant(0.7),
    }
)


def _example(value: ValueInfo, generator: torch.Generator) -> Tensor:
    if value.dtype == "I64":
        return torch.randint(0, max(value.limit, 1), value.shape, generator=generator)
    return _DRAWS[value.role](value.shape, generator)


class StepInputs:
    """A step's input tensors by role.

    Args:
        values: the step's inputs.
        tensors: one for each.
    """

    def __init__(self, values: Sequence[ValueInfo], tensors: Sequence[Tensor]) -> None:
        self._pairs = tuple(zip(values, tensors, strict=True))

    def pairs(self, role: Role) -> Iterator[tuple[ValueInfo, Tensor]]:
        """What is known of each tensor of a role, and the tensor."""
        return (pair for pair in self._pairs if pair[0].role == role)

    def single(self, role: Role) -> Tensor:
        """The only tensor of a role."""
        return next(tensor for _, tensor in self.pairs(role))

    def all(self, role: Role) -> list[Tensor]:
        """In order."""
        return [tensor for _, tensor in self.pairs(role)]

    def by_tensor(self, role: Role) -> dict[str, Tensor]:
        """By the submodel's tensor that each belongs to."""
        return {value.tensor: tensor for value, tensor in self.pairs(role)}

    def coefficient(self, name: str) -> Tensor | float:
        """A scalar of `TrainingSettings`; 0 where the step takes none of that name."""
        return next((tensor for value, tensor in self.pairs("coefficient") if value.name == name), 0.0)
