"""The league's samples: a part of Fashion-MNIST over 50 clients, cut once for each seed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from subfleet.emulation.partitions import partition
from subfleet.settings.samples import PartitionSettings
from subfleet.tasks import Dataset
from subfleet.tasks.catalogue import DATASETS

__all__ = ["SampleCounts", "Samples", "cut", "read"]

Split = Literal["dirichlet", "iid"]
ALPHA = 0.3
"""Concentration of the Dirichlet split over classes."""
OWN_TEST_SHARE = 0.2
"""Of each client's samples, held out for its own accuracy."""
LEAST_SAMPLES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """How many samples there are for training, over all clients, and for the server's evaluation."""

    train: int = 10_000
    evaluation: int = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What each side has, by client id."""

    train: Mapping[str, Dataset]
    test: Mapping[str, Dataset]
    evaluation: Dataset


def cut(folder: Path, seed: int, clients: int, counts: SampleCounts, split: Split = "dirichlet") -> Path:
    """Draw, scale and split the samples of a seed; returns the file that has them. Done once for each folder.

    Inputs are scaled to a mean of 0 and a variance of 1. "dirichlet" splits the classes unevenly, "iid" does not.

    Raises:
        SubfleetError: the data set cannot be had or split.
    """
    path = folder / f"{split}-{counts.train}-{counts.evaluation}-{clients}-{seed}.npz"
    if path.exists():
        return path
    task = DATASETS.named("fashion_mnist").load()
    generator = np.random.default_rng(seed)
    drawn = np.sort(generator.permutation(len(task.train))[: counts.train])
    mean, deviation = task.train.inputs.mean(), task.train.inputs.std()
    train = Dataset(inputs=task.train.inputs[drawn], labels=task.train.labels[drawn])
    settings = PartitionSettings(name=split, alpha=ALPHA, min_samples=LEAST_SAMPLES)
    owners = np.zeros(len(train), np.int64)
    for place, part in enumerate(partition(train, settings, clients=clients, seed=seed)):
        owners[part] = place
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.savez(
            file,
            x=(train.inputs - mean) / deviation,
            y=train.labels,
            owners=owners,
            # Another order for each client, so that what it holds out is a draw.
            order=generator.permutation(len(train)),
            x_test=(task.test.inputs[: counts.evaluation] - mean) / deviation,
            y_test=task.test.labels[: counts.evaluation],
        )
    os.replace(partial, path)  # noqa: PTH105 - atomic on every system
    return path


def read(path: Path, names: tuple[str, ...]) -> Samples:
    """The samples of a file, for clients of these names."""
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files}
    train, test = {}, {}
    for place, name in enumerate(names):
        mine = arrays["order"][arrays["owners"][arrays["order"]] == place]
        count = max(1, round(OWN_TEST_SHARE * len(mine)))
        test[name] = _dataset(arrays, np.sort(mine[:count]))
        train[name] = _dataset(arrays, np.sort(mine[count:]))
    evaluation = Dataset(inputs=arrays["x_test"].astype(np.float32), labels=arrays["y_test"])
    return Samples(train=MappingProxyType(train), test=MappingProxyType(test), evaluation=evaluation)


def _dataset(arrays: Mapping[str, npt.NDArray[np.generic]], indices: npt.NDArray[np.int64]) -> Dataset:
    return Dataset(inputs=arrays["x"][indices].astype(np.float32), labels=arrays["y"][indices].astype(np.int64))
