"""Real data that comes with the package, without a download or another package."""

from importlib import resources

import numpy as np

from subfleet.tasks.dataset import Dataset

_DIGIT_MAX = 16


def load_digits() -> Dataset:
    """Load the 1797 handwritten digits of scikit-learn, (1, 8, 8), scaled to 0 to 1, in 10 classes."""
    with (resources.files("subfleet.tasks") / "data" / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        inputs = (arrays["images"][:, np.newaxis] / _DIGIT_MAX).astype(np.float32)
        return Dataset(inputs=inputs, labels=arrays["labels"].astype(np.int64))
