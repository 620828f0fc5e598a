"""The distance of a result from the exact one, compared with the error of PyTorch's own single precision."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.steps.seeding import SeededRandomness
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo

FREE = 2e-5
"""Any result may be off by this fraction of itself: PyTorch's own distance may be small by chance."""
ROUNDING = 1e-5
"""Or by this fraction of the usual size of its kind: the rounding of sums with usual terms that cancel."""
EAGER_FACTOR = 8.0
"""A result may be this many times as far off as PyTorch in single precision."""
LARGEST = 0.09
"""But never by more of itself if PyTorch is closer than that: no gradient that is off by a tenth passes."""
SEEN = 10.0
"""If a result is not this many times as large as PyTorch's error, single precision only shows its rounding, as for a
bias before a norm. It may then be `UNSEEN_FACTOR` times as far off as PyTorch, or by `ROUNDING`."""
UNSEEN_FACTOR = 16.0
"""Amplified rounding differs more between two computations than rounding itself. A result that never changes is
different: `EAGER_FACTOR` applies."""
VANISHING = 1e-5
"""A fraction of the usual size of so many elements of its kind: a result this small has no gradient except rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """The distance of one result from the exact one. All lengths are Euclidean.

    Attributes:
        name: of the result.
        jumps: whether it follows a gradient, which jumps if an activation's input rounds to the other side of 0.
        is_number: whether it is a single number.
        size: of the exact change of a carried value, or of the exact result.
        usual: size that it would have if its elements were average for its role.
        eager: error of PyTorch's single precision.
        own: error of this result.
        largest: largest error of an element, as a fraction of the largest element if that is above 1.
    """

    name: str
    jumps: bool
    is_number: bool
    size: float
    usual: float
    eager: float
    own: float
    largest: float

    @property
    def is_seen(self) -> bool:
        """Whether the exact result exceeds PyTorch's rounding, and the rounding of its kind."""
        return self.size >= SEEN * self.eager and self.size > VANISHING * self.usual

    @property
    def limit(self) -> float:
        """The largest allowed error."""
        is_drowned = not self.is_seen and self.size > VANISHING * self.usual
        factor = UNSEEN_FACTOR if is_drowned else EAGER_FACTOR
        rounding = max(factor * self.eager, FREE * self.size, ROUNDING * self.usual)
        return max(min(rounding, LARGEST * self.size), self.eager) if self.is_seen else rounding

    @property
    def may_be_chance(self) -> bool:
        """Whether its error may be the rounding of one number, which differs by chance, although above the limit."""
        return self.jumps and self.is_number and self.own <= EAGER_FACTOR * self.eager

    def passes(self, jump: float = 0.0) -> bool:
        """Return whether the result is close enough; a gradient may jump by this fraction of itself. NaN fails."""
        allowed = jump * (self.size if self.is_seen else self.usual) if self.jumps else 0.0
        return self.own <= max(self.limit, allowed)


def list_failures(distances: Iterable[Distance], jump: float = 0.0) -> list[Distance]:
    """List the results that are too far off; see `Distance.passes`."""
    return [distance for distance in distances if not distance.passes(jump)]


_MORE_REFERENCES = 4
_ROUNDING = 2.0**-23
"""Of single precision, as a fraction."""
_COMPUTED_WITH = frozenset({"input", "parameter", "frozen", "buffer", "features"})


Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A program: a tensor for each of the step's inputs to one for each of its outputs."""


class Trial:
    """An example of a step, with its exact results by the original module in double precision.

    Attributes:
        example: the step's inputs, in single precision.
        is_whole: whether all samples of the batch are real.

    Raises:
        ExportError: the original module cannot be copied, or not run in double precision.
    """

    def __init__(self, step: Step, example: Sequence[Tensor], *, is_whole: bool = True) -> None:
        self.example, self.is_whole = tuple(example), is_whole
        doubled = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in example)
        # The same random numbers: differences by chance are not rounding.
        with SeededRandomness(0):
            right = step.reference(*doubled)
        with SeededRandomness(0):
            eager = step.reference(*example)
        before = {f"new.{value.name}": tensor for value, tensor in zip(step.inputs, example, strict=True)}
        self._step, self._right = step, right
        self._sizes = [
            _length(tensor - before.get(value.name, 0.0)) for value, tensor in zip(step.outputs, right, strict=True)
        ]
        self._usual = _usual_sizes(step, self._sizes)
        self._eager = self._eager_distances(eager)
        self._is_spread = False

    def measure(self, run: Run) -> list[Distance]:
        """Return the distances of a program's results; if too large, with more estimates of PyTorch's rounding."""
        results = run(self.example)
        distances = self.distances(results)
        if list_failures(distances) and self.add_references():
            distances = self.distances(results)
        return distances

    def add_references(self) -> bool:
        """Estimate PyTorch's rounding from more runs in single precision, with inputs that differ by a rounding.

        One run may be lucky: an activation's input that rounds to the other side of 0 makes a gradient jump, in one
        computation and not in another.

        Returns:
            False if this was done before.
        """
        if self._is_spread:
            return False
        self._is_spread = True
        generator = torch.Generator().manual_seed(0)
        for _ in range(_MORE_REFERENCES):
            pairs = zip(self._step.inputs, self.example, strict=True)
            near = [_perturb(value, tensor, generator) for value, tensor in pairs]
            with SeededRandomness(0):
                more = self._eager_distances(self._step.reference(*near))
            self._eager = [max(pair) for pair in zip(self._eager, more, strict=True)]
        return True

    def _eager_distances(self, eager: Sequence[Tensor]) -> list[float]:
        distances = [
            _length(eager_result - exact_result) for eager_result, exact_result in zip(eager, self._right, strict=True)
        ]
        return _expected_distances(distances, self._sizes, self._usual)

    def distances(self, results: Sequence[Tensor]) -> list[Distance]:
        """Return the distances of a program's results, in order.

        Raises:
            ExportError: the number of results or a shape is wrong.
        """
        if len(results) != len(self._right):
            raise ExportError(f"the program gives {len(results)} results, but must give {len(self._right)}")
        return [self.distance(index, result) for index, result in enumerate(results)]

    def distance(self, index: int, result: Tensor) -> Distance:
        """Return the distance of the result at an index.

        Raises:
            ExportError: its shape is wrong.
        """
        value, right = self._step.outputs[index], self._right[index]
        if right.shape != result.shape:
            raise ExportError(
                f"the program's {value.name!r} is {tuple(result.shape)}, but must be {tuple(right.shape)}"
            )
        off = result.double() - right
        return Distance(
            name=value.name,
            jumps=value.role in _JUMPING,
            is_number=right.numel() == 1,
            size=self._sizes[index],
            usual=self._usual[index],
            eager=self._eager[index],
            own=_length(off),
            largest=_largest(off) / max(1.0, _largest(right)),
        )


_JUMPING = frozenset({"parameter", "optimiser_state", "gradient", "features_gradient"})
"""Roles of results that follow a gradient."""


def _usual_sizes(step: Step, sizes: Sequence[float]) -> list[float]:
    """Return the size of each result if the elements of all results of its role were alike."""
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
    """Change the numbers that a network computes with by a rounding each."""
    if value.role not in _COMPUTED_WITH or not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + signs * _ROUNDING)


def _expected_distances(distances: Sequence[float], sizes: Sequence[float], usual: Sequence[float]) -> list[float]:
    """Return PyTorch's distances, but none smaller than the median result's: that is the rounding to expect.

    Results with almost no exact change are ignored, since many of them would hide all others.
    """
    known = zip(distances, sizes, usual, strict=True)
    shares = [distance / size for distance, size, usual_size in known if size > VANISHING * usual_size]
    middle = statistics.median(shares) if shares else 0.0
    return [max(distance, middle * size) for distance, size in zip(distances, sizes, strict=True)]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _length(tensor: Tensor) -> float:
    return float(tensor.double().norm())
