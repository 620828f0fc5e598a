"""Hold out a test part from data without one."""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ConfigError

Indices = npt.NDArray[np.int64]


def hold_out(labels: npt.NDArray[np.int64], *, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split samples into training and test indices, with the same fraction of every class in both.

    Args:
        labels: class of each sample.
        fraction: fraction of each class in the test set, above 0 and below 1.
        seed: seed of the draw.

    Raises:
        ConfigError: the fraction is out of range.
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
