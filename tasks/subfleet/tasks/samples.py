"""Real data that comes with an installed package: nothing is downloaded."""

import numpy as np

from subfleet.protocol.errors import MissingExtraError
from subfleet.tasks.dataset import Dataset

__all__ = ["digits"]

_DIGIT_MAX = 16


def digits() -> Dataset:
    """scikit-learn's 1797 handwritten digits of 1 x 8 x 8, scaled to 0 to 1, in 10 classes.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "emulation") from error
    bunch = load_digits()
    inputs = (bunch.images[:, np.newaxis] / _DIGIT_MAX).astype(np.float32)
    return Dataset(inputs=inputs, labels=bunch.target.astype(np.int64))
