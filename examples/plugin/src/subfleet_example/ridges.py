"""Ridges: synthetic pictures of bright lines in four directions, drawn with numpy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from subfleet.tasks import Dataset
from subfleet.tasks.named_dataset import NamedDataset, TrainTest

__all__ = ["RIDGES"]

SIDE = 8
DIRECTIONS = ("level", "rising", "upright", "falling")


def _draw(count: int, seed: int) -> Dataset:
    """Draw pictures of all directions equally often: a line at a random distance from the centre, and noise."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.int64) % len(DIRECTIONS)
    angles = (labels * np.pi / len(DIRECTIONS))[:, None, None]
    rows, columns = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    away = generator.uniform(-2, 2, (count, 1, 1))
    distance = rows * np.cos(angles) + columns * np.sin(angles) - away
    pictures = np.clip(np.exp(-(distance**2)) + generator.normal(0, 0.1, distance.shape), 0, 1)
    return Dataset(inputs=pictures[:, None].astype(np.float32), labels=labels)


def _read(paths: Sequence[Path]) -> TrainTest:
    return TrainTest(train=_draw(400, seed=1), test=_draw(100, seed=2))


RIDGES = NamedDataset(
    name="ridges",
    summary="bright lines in 4 directions, drawn",
    files=(),
    read=_read,
    input_shape=(1, SIDE, SIDE),
    class_count=len(DIRECTIONS),
    class_names=DIRECTIONS,
    objective="cross_entropy",
    licence="Apache-2.0",
    source="Drawn with numpy by this package; nothing was measured.",
)
"""The data set, as its entry point names it."""
