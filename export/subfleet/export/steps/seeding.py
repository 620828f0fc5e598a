"""Controls Python's and NumPy's random numbers, because a program would contain the numbers drawn at its export."""

import random
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np
import torch

_STRATA = 22
SEED_COUNT = _STRATA + 2
"""Enough seeds that the first number drawn falls into every part of its range, and once close to either end: an event
with a probability above 1 in 22 happens with one of them."""


class SeededRandomness:
    """Sets all random number generators by a seed while active, and restores them at the end.

    Args:
        turn: selects the seed.

    Attributes:
        was_used: whether Python's or NumPy's numbers were drawn.
    """

    def __init__(self, turn: int) -> None:
        self._turn = turn % SEED_COUNT
        self.was_used = False

    def __enter__(self) -> "SeededRandomness":
        self._before = _states()
        random.setstate(random.Random(_python_seeds()[self._turn]).getstate())  # noqa: S311 - as networks draw
        np.random.set_state(np.random.RandomState(_numpy_seeds()[self._turn]).get_state())
        torch.default_generator.manual_seed(self._turn)
        self._begun = _states()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.was_used = _states()[:2] != self._begun[:2]
        python, legacy, tensors = self._before
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(tensors)


@lru_cache(maxsize=1)
def _python_seeds() -> tuple[int, ...]:
    return _seeds(lambda seed: random.Random(seed).random())  # noqa: S311


@lru_cache(maxsize=1)
def _numpy_seeds() -> tuple[int, ...]:
    return _seeds(lambda seed: float(np.random.RandomState(seed).random_sample()))


def _seeds(first: Callable[[int], float]) -> tuple[int, ...]:
    """Return one seed for each turn, ordered so that the first numbers of consecutive seeds are far apart."""
    ends = [(0.0, 0.01), (0.99, 1.0)]
    strata = [(part / _STRATA, (part + 1) / _STRATA) for part in range(_STRATA)]
    ranges = [*ends, *strata[::2], *strata[1::2]]
    return tuple(next(seed for seed in count() if low <= first(seed) < high) for low, high in ranges)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), _comparable(np.random.get_state()), torch.default_generator.get_state()


def _comparable(state: Any) -> tuple[Any, ...]:
    """Convert NumPy's state to a comparable value."""
    name, keys, *rest = state
    return (name, tuple(keys.tolist()), *rest)


def is_source(value: Any) -> bool:
    """Return whether a value differs on each access: a random number generator or an iterator."""
    value = getattr(value, "__self__", value)
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    return isinstance(value, kinds) or hasattr(type(value), "__next__")
