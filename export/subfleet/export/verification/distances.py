"""How far a result is from the exact one, next to how far PyTorch's own single precision is."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.steps.seeding import SeededRandomness
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo

__all__ = ["EAGER_FACTOR", "VANISHING", "Distance", "Exact"]

FREE = 2e-5
"""Any result may be this far off, as a fraction of itself: PyTorch's own distance may be small by chance."""
ROUNDING = 1e-5
"""Or by this fraction of what is usual among its kind: the rounding of sums whose terms are usual and cancel."""
EAGER_FACTOR = 8.0
"""It may be this many times as far off as PyTorch in single precision."""
LARGEST = 0.09
"""But never by more of itself where PyTorch is nearer than that: no gradient that is off by a tenth passes."""
SEEN = 10.0
"""Where a result is not this many times as large as PyTorch's error, rounding is all that single precision shows of it:
a bias before a norm. It may then be as far off as PyTorch is, times `UNSEEN_FACTOR`, or by `ROUNDING`."""
UNSEEN_FACTOR = 16.0
"""Rounding that was made large on its way differs more between two computations than rounding itself. A result that
never changes is nothing of that kind: `EAGER_FACTOR` holds for it."""
VANISHING = 1e-5
"""Of what is usual for so many elements of its kind: a result that is this small has no gradient but rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far one result is from the exact one. All lengths are Euclidean.

    Attributes:
        name: of the result.
        jumps: whether it follows a gradient, which jumps where an activation's input rounds to the other side of 0.
        size: of the exact change of what is carried, of the exact result where nothing is.
        usual: size that it would have if its elements were as those of its role are in the mean.
        eager: how far PyTorch's single precision is off.
        own: how far this result is off.
        largest: difference of any element, as a fraction of the largest element where that is above 1.
    """

    name: str
    jumps: bool
    size: float
    usual: float
    eager: float
    own: float
    largest: float

    @property
    def is_seen(self) -> bool:
        """Whether the exact result stands out of PyTorch's rounding, and of rounding on the scale of its kind."""
        return self.size >= SEEN * self.eager and self.size > VANISHING * self.usual

    @property
    def limit(self) -> float:
        """How far it may be off."""
        is_drowned = not self.is_seen and self.size > VANISHING * self.usual
        factor = UNSEEN_FACTOR if is_drowned else EAGER_FACTOR
        rounding = max(factor * self.eager, FREE * self.size, ROUNDING * self.usual)
        return max(min(rounding, LARGEST * self.size), self.eager) if self.is_seen else rounding

    def passes(self, jump: float = 0.0) -> bool:
        """Whether it is near enough; a gradient's jump may be this fraction of it. Written so that NaN fails."""
        allowed = jump * (self.size if self.is_seen else self.usual) if self.jumps else 0.0
        return self.own <= max(self.limit, allowed)


_MORE_REFERENCES = 4
_ROUNDING = 2.0**-23
"""Of single precision, as a share."""
_COMPUTED_WITH = frozenset({"input", "parameter", "frozen", "buffer", "features"})


class Exact:
    """The exact results of a step on one example, of the untouched module in double precision.

    Args:
        step: the step.
        example: its inputs, in single precision.

    Raises:
        ExportError: the untouched module cannot be copied, or not be run in double precision.
    """

    def __init__(self, step: Step, example: Sequence[Tensor]) -> None:
        doubled = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in example)
        # By the same random numbers: what differs by chance is no rounding.
        with SeededRandomness(0):
            right = step.reference(*doubled)
        with SeededRandomness(0):
            eager = step.reference(*example)
        before = {f"new.{value.name}": tensor for value, tensor in zip(step.inputs, example, strict=True)}
        self._outputs = step.outputs
        self._right = right
        self._sizes = [
            _length(tensor - before.get(value.name, 0.0)) for value, tensor in zip(step.outputs, right, strict=True)
        ]
        self._usual = _usual_sizes(step, self._sizes)
        self._eager = self._eager_distances(eager)
        self._step, self._example = step, tuple(example)
        self._is_spread = False

    def add_references(self) -> bool:
        """Take more of PyTorch's own single precisions for what rounding is like, of inputs that differ by a rounding.

        One of them may be lucky: an activation's input that rounds to the other side of 0 makes a gradient jump, and
        does so in one computation and not in another.

        Returns:
            False where that was done before.
        """
        if self._is_spread:
            return False
        self._is_spread = True
        generator = torch.Generator().manual_seed(0)
        for _ in range(_MORE_REFERENCES):
            near = [_perturb(value, tensor, generator) for value, tensor in self._pairs()]
            with SeededRandomness(0):
                more = self._eager_distances(self._step.reference(*near))
            self._eager = [max(pair) for pair in zip(self._eager, more, strict=True)]
        return True

    def _pairs(self) -> Iterator[tuple[ValueInfo, Tensor]]:
        return zip(self._step.inputs, self._example, strict=True)

    def _eager_distances(self, eager: Sequence[Tensor]) -> list[float]:
        distances = [
            _length(eager_result - exact_result) for eager_result, exact_result in zip(eager, self._right, strict=True)
        ]
        return _expected_distances(distances, self._sizes, self._usual)

    def distances(self, results: Sequence[Tensor]) -> list[Distance]:
        """Of a program's results, in order.

        Raises:
            ExportError: there are more or fewer, or one is of another shape.
        """
        if len(results) != len(self._right):
            raise ExportError(f"the program gives {len(results)} results, but must give {len(self._right)}")
        return [self.distance(index, result) for index, result in enumerate(results)]

    def distance(self, index: int, result: Tensor) -> Distance:
        """Of one result by its place among all.

        Raises:
            ExportError: it is of another shape.
        """
        value, right = self._outputs[index], self._right[index]
        if right.shape != result.shape:
            raise ExportError(
                f"the program's {value.name!r} is {tuple(result.shape)}, but must be {tuple(right.shape)}"
            )
        off = result.double() - right
        return Distance(
            name=value.name,
            jumps=value.role in _JUMPING,
            size=self._sizes[index],
            usual=self._usual[index],
            eager=self._eager[index],
            own=_length(off),
            largest=_largest(off) / max(1.0, _largest(right)),
        )


_JUMPING = frozenset({"parameter", "optimiser_state", "gradient", "features_gradient"})
"""Roles of results that follow a gradient."""


def _usual_sizes(step: Step, sizes: Sequence[float]) -> list[float]:
    """What each would be if the elements of all results of its role were alike."""
    squares: dict[str, float] = {}
    elements: dict[str, int] = {}
    counts = [math.prod(value.shape) for value in step.outputs]
    for value, size, count in zip(step.outputs, sizes, counts, strict=True):
        squares[value.role] = squares.get(value.role, 0.0) + size**2
        elements[value.role] = elements.get(value.role, 0) + count
    return [
        math.sqrt(squares[value.role] / max(elements[value.role], 1) * count)
        for value, count in zip(step.outputs, counts, strict=True)
    ]


def _perturb(value: ValueInfo, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers that a network computes with, each by a rounding larger or smaller."""
    if value.role not in _COMPUTED_WITH or not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + signs * _ROUNDING)


def _expected_distances(distances: Sequence[float], sizes: Sequence[float], usual: Sequence[float]) -> list[float]:
    """PyTorch's distances, none of them luckier than the median result's: that is what rounding is like here.

    Results whose exact change is next to none have no say: many of them would hide all others.
    """
    known = zip(distances, sizes, usual, strict=True)
    shares = [distance / size for distance, size, usual_size in known if size > VANISHING * usual_size]
    middle = statistics.median(shares) if shares else 0.0
    return [max(distance, middle * size) for distance, size in zip(distances, sizes, strict=True)]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _length(tensor: Tensor) -> float:
    return float(tensor.double().norm())
