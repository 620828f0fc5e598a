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

DTYPES: Mapping[torch.dtype, str] = MappingProxyType({torch.float32: "F32", torch.int64: "I64"})
"""Types of a program's values, with their names in the tensor container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """The input of one sample.

    Attributes:
        shape: without the batch.
        dtype: "F32", or "I64" for indices such as tokens.
        limit: exclusive upper bound of the indices, 1 or more with "I64"; otherwise 0.
    """

    shape: tuple[int, ...]
    dtype: Literal["F32", "I64"] = "F32"
    limit: int = 0

    def __post_init__(self) -> None:
        if self.shape and min(self.shape) < 1:
            raise ValueError(f"a sample's shape is {self.shape}, but its sizes must be 1 or more")
        if (self.dtype == "I64") != (self.limit > 0):
            raise ValueError(f"a sample's limit is {self.limit}, but must be 1 or more with I64 and 0 with F32")

    @classmethod
    def of(cls, value: ValueInfo) -> "SampleSpec":
        """Describe one sample of a batch."""
        return cls(shape=value.shape[1:], dtype="I64" if value.dtype == "I64" else "F32", limit=value.limit)

    def value(self, batch_size: int) -> ValueInfo:
        """Describe the step's input for a batch.

        Raises:
            ExportError: the batch is empty.
        """
        if batch_size < 1:
            raise ExportError(f"the batch size is {batch_size}, but must be 1 or more")
        shape = (batch_size, *self.shape)
        return ValueInfo(name="input", dtype=self.dtype, shape=shape, role="input", limit=self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """A network nested in the trained one, for self-distillation (FjORD, section 3.3).

    Attributes:
        module: the student in its own size; its weights are never read.
        maps: the position of each of its parameters in the trained module's parameter of the same name.
    """

    module: nn.Module
    maps: Mapping[str, TensorMap]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A pure function over tensors, with the names and roles of its inputs and outputs.

    Attributes:
        run: takes a tensor for each of `inputs`, returns one for each of `outputs`; in single or double precision.
        reference: the same computed by the original module, with which programs are compared; see
            `subfleet.export.steps.reference`.
        inputs: in order.
        outputs: in order.
        padded_labels: whether labels below 0 are common: tokens that do not count.
        carried: the network's own parameters and buffers, by name: no constant may share their memory.
        held: all tensors that the network holds, by name.
    """

    run: Callable[..., tuple[Tensor, ...]]
    reference: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    padded_labels: bool = False
    carried: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    held: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def example(
        self, generator: torch.Generator, *, apply: bool = True, sample_count: int | None = None
    ) -> tuple[Tensor, ...]:
        """Return random inputs of the right shapes.

        Args:
            generator: of the random numbers.
            apply: whether a micro-batch is the last of its batch.
            sample_count: number of real samples, the others are masked out; by default all but the last if there are
                two or more.
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
    """Random weights that keep activations near 1 for any width."""
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
        tensors: one for each input.
    """

    def __init__(self, values: Sequence[ValueInfo], tensors: Sequence[Tensor]) -> None:
        self._pairs = tuple(zip(values, tensors, strict=True))

    def pairs(self, role: Role) -> Iterator[tuple[ValueInfo, Tensor]]:
        """Return the inputs of a role with their tensors."""
        return (pair for pair in self._pairs if pair[0].role == role)

    def single(self, role: Role) -> Tensor:
        """Return the only tensor of a role."""
        return next(tensor for _, tensor in self.pairs(role))

    def all(self, role: Role) -> list[Tensor]:
        """Return all tensors of a role, in order."""
        return [tensor for _, tensor in self.pairs(role)]

    def by_tensor(self, role: Role) -> dict[str, Tensor]:
        """Return the tensors of a role by the submodel's tensor name."""
        return {value.tensor: tensor for value, tensor in self.pairs(role)}

    def coefficient(self, name: str) -> Tensor | float:
        """Return a scalar of `TrainingSettings`; 0 if the step does not take it."""
        return next((tensor for value, tensor in self.pairs("coefficient") if value.name == name), 0.0)
