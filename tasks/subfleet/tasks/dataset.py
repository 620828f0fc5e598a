"""A data set in memory, checked once where it is made."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError
from subfleet.protocol.programs import DataSummary

__all__ = ["MAX_CLASSES", "Dataset"]

MAX_CLASSES = 2**15
"""Labels stay below it: a device tells the count of each class in one control message, which is of limited size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples and their classes.

    Attributes:
        inputs: float32, (samples, *sample shape), all finite; images are channels first.
        labels: int64, (samples,), class indices of 0 or more.

    Raises:
        DataError: the arrays are of another type or shape, differ in length, are empty, or hold impossible values.
    """

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.inputs.dtype != np.float32 or self.inputs.ndim < 2:
            raise DataError(
                f"inputs are {self.inputs.dtype} of shape {self.inputs.shape}, but must be float32 of shape "
                "(samples, *sample shape)"
            )
        if self.labels.dtype != np.int64 or self.labels.shape != self.inputs.shape[:1]:
            raise DataError(
                f"labels are {self.labels.dtype} of shape {self.labels.shape}, but must be int64 of shape "
                f"{self.inputs.shape[:1]}, one for each sample"
            )
        if self.inputs.size == 0:
            raise DataError(f"inputs are of shape {self.inputs.shape}, but must hold one value or more")
        if self.labels.min() < 0 or self.labels.max() >= MAX_CLASSES:
            raise DataError(
                f"labels are {self.labels.min()} to {self.labels.max()}, but must be class indices of 0 or more and "
                f"below {MAX_CLASSES}"
            )
        # The sum of a float32 array is finite in float64 exactly when all of its values are.
        with np.errstate(invalid="ignore"):
            finite = bool(np.isfinite(self.inputs.sum(dtype=np.float64)))
        if not finite:
            raise DataError("inputs hold a value that is not finite; replace NaN and infinity before training")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.inputs.shape[1:]

    def summary(self) -> DataSummary:
        """What a device may tell of its data: counts and shapes, never samples."""
        counts = np.bincount(self.labels)
        return DataSummary(
            sample_count=len(self),
            input_shape=self.sample_shape,
            class_counts=tuple(int(count) for count in counts),
        )
