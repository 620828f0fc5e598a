"""A test part for data that have none of their own."""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ConfigError

Indices = npt.NDArray[np.int64]


def hold_out(labels: npt.NDArray[np.int64], *, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split into training and test indices, with the same share of every class in both.

    Args:
        labels: class of each sample.
        fraction: share of each class that goes to the test set, between 0 and 1.
        seed: of the draw.

    Raises:
        ConfigError: the fraction leaves one of them without samples.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the held-out fraction is {fraction}, but must be above 0 and below 1")
    generator = np.random.default_rng(seed)
    test: list[Indices] = []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(fraction * len(members))])
    test_indices = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), test_indices), test_indices
