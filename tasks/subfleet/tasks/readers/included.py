"""Data sets that come with the package or with scikit-learn, without a download.

The digits have a variant for each kind of task, with labels that follow from the pixels and the class.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import MissingExtraError
from subfleet.tasks.bundled import load_digits
from subfleet.tasks.dataset import Dataset, Inputs, Labels
from subfleet.tasks.hold_out import hold_out
from subfleet.tasks.named_dataset import TrainTest

ATTRIBUTES: tuple[frozenset[int], ...] = (
    frozenset({0, 2, 4, 6, 8}),
    frozenset({2, 3, 5, 7}),
    frozenset({5, 6, 7, 8, 9}),
    frozenset({0, 6, 8, 9}),
)
"""Digits that are even, prime, at least five, or have a loop."""
PIXEL_CLASSES = ("outside", "stroke", "hole")
BRIGHTNESSES = 8
TOKENS = 15
_TEST_FRACTION = 0.2
_SPLIT_SEED = 3
_STROKE = 0.3
"""Least brightness of a pixel that is part of a stroke."""
_HUNDRED = 100.0

Floats = npt.NDArray[np.float32]


def read_digits(paths: Sequence[Path]) -> TrainTest:
    """Read the digits; a fixed fifth of each class is the test part. `paths` is empty."""
    return _derive(lambda images, classes: (images, classes))


def read_digits_attributes(paths: Sequence[Path]) -> TrainTest:
    """Read the digits with a 1 or 0 for each of `ATTRIBUTES`. `paths` is empty."""
    return _derive(
        lambda images, classes: (
            images,
            np.stack([np.isin(classes, [*group]) for group in ATTRIBUTES], axis=1).astype(np.float32),
        )
    )


def read_digits_moments(paths: Sequence[Path]) -> TrainTest:
    """Read the digits with the ink's centre (row and column, relative to the middle) and spread, in pixels."""
    return _derive(lambda images, _: (images, _measure_moments(images[:, 0])))


def read_digits_pixels(paths: Sequence[Path]) -> TrainTest:
    """Read the digits with one of `PIXEL_CLASSES` for each pixel. `paths` is empty."""
    return _derive(lambda images, _: (images, _classify_pixels(images[:, 0] >= _STROKE)))


def read_digits_tokens(paths: Sequence[Path]) -> TrainTest:
    """Read the digits at 4 x 4 pixels, row by row, as texts of `BRIGHTNESSES` symbols with the next symbol as label."""

    def texts(images: Floats, _: npt.NDArray[np.int64]) -> tuple[Inputs, Labels]:
        small = images.reshape(len(images), 4, 2, 4, 2).mean(axis=(2, 4), dtype=np.float64)
        symbols = np.minimum((small * BRIGHTNESSES).astype(np.int64), BRIGHTNESSES - 1).reshape(len(images), -1)
        return np.ascontiguousarray(symbols[:, :-1]), np.ascontiguousarray(symbols[:, 1:])

    return _derive(texts)


def read_diabetes(paths: Sequence[Path]) -> TrainTest:
    """Read ten measurements of 442 patients, each with variance 1, and the disease's progress in a year, in hundreds.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_diabetes
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "dev", remedy="run: pip install scikit-learn") from error
    loaded: Any = load_diabetes(return_X_y=True)
    measured, progress = (np.asarray(array, np.float64) for array in loaded)
    inputs = (measured * np.sqrt(len(measured))).astype(np.float32)
    return _split(inputs, (progress / _HUNDRED).astype(np.float32)[:, np.newaxis], np.zeros(len(inputs), np.int64))


def _derive(make: Callable[[Floats, npt.NDArray[np.int64]], tuple[Inputs, Labels]]) -> TrainTest:
    dataset = load_digits()
    images = np.asarray(dataset.inputs, np.float32)
    return _split(*make(images, dataset.classes()), dataset.classes())


def _split(inputs: Inputs, labels: Labels, groups: npt.NDArray[np.int64]) -> TrainTest:
    """Hold out a fixed fifth of each group as the test part."""
    dataset = Dataset(inputs=inputs, labels=labels)
    train, test = hold_out(groups, fraction=_TEST_FRACTION, seed=_SPLIT_SEED)
    return TrainTest(train=dataset.take(train), test=dataset.take(test))


def _measure_moments(images: Floats) -> Floats:
    ink = images.astype(np.float64)
    ink /= ink.sum(axis=(1, 2), keepdims=True)
    positions = np.arange(ink.shape[1]) - (ink.shape[1] - 1) / 2
    rows, columns = ink.sum(axis=2) @ positions, ink.sum(axis=1) @ positions
    squares = ink.sum(axis=2) @ positions**2 + ink.sum(axis=1) @ positions**2
    return np.stack([rows, columns, np.sqrt(squares - rows**2 - columns**2)], axis=1).astype(np.float32)


def _classify_pixels(strokes: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Classify pixels; background that cannot be reached from the border without crossing a stroke is a hole."""
    framed = np.pad(~strokes, ((0, 0), (1, 1), (1, 1)), constant_values=True)
    outside = np.zeros_like(framed)
    outside[:, 0] = True
    while True:
        wider = outside.copy()
        wider[:, 1:] |= outside[:, :-1]
        wider[:, :-1] |= outside[:, 1:]
        wider[:, :, 1:] |= outside[:, :, :-1]
        wider[:, :, :-1] |= outside[:, :, 1:]
        wider &= framed
        if (wider == outside).all():
            break
        outside = wider
    background = np.where(outside[:, 1:-1, 1:-1], 0, PIXEL_CLASSES.index("hole"))
    return np.where(strokes, PIXEL_CLASSES.index("stroke"), background).astype(np.int64)
