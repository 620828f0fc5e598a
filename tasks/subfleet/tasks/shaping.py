"""The one rule by which samples of one shape are fed to a model of another: its shape decides, and values stay put."""

import math
from dataclasses import replace

from subfleet.protocol.errors import DataError
from subfleet.tasks.dataset import Dataset

__all__ = ["reshape_samples", "shape_problem"]


def shape_problem(given: tuple[int, ...], taken: tuple[int, ...]) -> str:
    """Why samples of one shape cannot be fed to a model of another; empty where they can.

    Dimensions of size 1 come and go, and samples are flattened, or cut out of flat ones: every value keeps its place.
    A series (time, features) is thus also an image of one channel, or one long vector. Where dimensions would have to
    change places, nobody can tell which is which.

    Args:
        given: shape of one sample.
        taken: shape of one sample as the model takes it.
    """
    mismatch = f"have shape {given}, but the model takes {taken}"
    if math.prod(given) != math.prod(taken):
        return f"{mismatch}: another number of values"
    wide_given, wide_taken = _drop_ones(given), _drop_ones(taken)
    if wide_given != wide_taken and min(len(wide_given), len(wide_taken)) > 1:
        return f"{mismatch}: as many values, in other dimensions"
    return ""


def reshape_samples(dataset: Dataset, taken: tuple[int, ...], what: str) -> Dataset:
    """A data set with its samples in the shape that a model takes.

    Args:
        dataset: as it was read.
        taken: shape of one sample as the model takes it.
        what: these samples, for the error's text.

    Raises:
        DataError: the samples cannot be fed to it.
    """
    if dataset.sample_shape == taken:
        return dataset
    problem = shape_problem(dataset.sample_shape, taken)
    if problem:
        raise DataError(f"{what} {problem}; use data of the model's shape")
    return replace(dataset, inputs=dataset.inputs.reshape(-1, *taken))


def _drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
