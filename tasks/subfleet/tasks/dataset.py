"""A data set in memory, checked once where it is made."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from subfleet.protocol.class_names import check_class_names
from subfleet.protocol.errors import DataError
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.transform import DataTransform

MAX_CLASSES = 2**15
"""Class indices stay below it: a device tells the count of each class in one control message, which is of limited
size."""
NO_LABEL = (-1, -100)
"""What stands for "no label" in class indices, such as behind the end of a text; -100 is PyTorch's word for it."""
NO_OWNER = -1
"""Stands for the owner of a sample that is nobody's, such as a recording of silence."""

Inputs = npt.NDArray[np.float32] | npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples and what they are to be taken for.

    Attributes:
        inputs: (samples, *sample shape): float32, all finite, where images are channels first; or int64 of 0 or more,
            such as tokens.
        labels: (samples, *label shape): int64 class indices; or float32 targets, all finite. Of several labels of a
            sample, such as one for each place of a text, some may be a number of `NO_LABEL`: there is none.
        owners: (samples,): int64 number of whoever each sample is from (a writer, role or speaker), or `NO_OWNER`;
            None where samples are nobody's.
        class_names: of the class indices, in their order; empty where classes have none but their numbers.
        transform: what was done to the inputs already; None where nothing was.

    Raises:
        DataError: the arrays are of another type or shape, differ in length, are empty, or hold impossible values; or
            names cannot be those of the classes.
    """

    inputs: Inputs
    labels: Labels
    owners: npt.NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()
    transform: DataTransform | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype not in (np.float32, np.int64) or self.inputs.ndim < 2:
            raise DataError(
                f"inputs are {self.inputs.dtype} of shape {self.inputs.shape}, but must be float32, or int64 indices, "
                "of shape (samples, *sample shape)"
            )
        if self.labels.dtype not in (np.int64, np.float32) or self.labels.shape[:1] != self.inputs.shape[:1]:
            raise DataError(
                f"labels are {self.labels.dtype} of shape {self.labels.shape}, but must be int64 class indices or "
                f"float32 targets of shape ({len(self.inputs)}, ...), one for each sample"
            )
        for name, array in (("inputs", self.inputs), ("labels", self.labels)):
            if array.size == 0:
                raise DataError(f"{name} are of shape {array.shape}, but must hold one value or more")
            if array.dtype == np.float32:
                _check_finite(name, array)
        if self.inputs.dtype == np.int64 and self.inputs.min() < 0:
            raise DataError(f"inputs are {self.inputs.min()} at least, but indices must be 0 or more")
        if self.labels.dtype == np.int64:
            _check_classes(self.labels)
        if self.class_names:
            _check_names(self.class_names, self.labels)
        if self.owners is not None:
            _check_owners(self.owners, len(self.labels))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.inputs.shape[1:]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of one sample's label: () for one class."""
        return self.labels.shape[1:]

    def classes(self) -> npt.NDArray[np.int64]:
        """One class for each sample.

        Raises:
            DataError: the labels are something else.
        """
        if self.labels.dtype != np.int64 or self.labels.ndim != 1 or int(np.min(self.labels)) < 0:
            raise DataError(
                f"labels are {self.labels.dtype} of shape {self.labels.shape}, but must be one class for each sample"
            )
        return self.labels.astype(np.int64, copy=False)

    def class_counts(self) -> npt.NDArray[np.int64]:
        """How many labels each class has: of those with names each, else up to the last one that occurs.

        Empty for float targets.
        """
        if self.labels.dtype != np.int64:
            return np.zeros(0, np.int64)
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.class_names)).astype(np.int64)

    def take(self, indices: npt.NDArray[np.int64]) -> "Dataset":
        """The data set of some of the samples, in the order of their indices."""
        owners = None if self.owners is None else self.owners[indices]
        return replace(self, inputs=self.inputs[indices], labels=self.labels[indices], owners=owners)

    def split_off(self, count: int) -> "tuple[Dataset, Dataset]":
        """The data set without some samples, and these: evenly spread, as files often have classes one after another.

        Args:
            count: of samples that are taken, from 1 to fewer than there are.
        """
        taken = (2 * np.arange(count, dtype=np.int64) + 1) * len(self) // (2 * count)
        return self.take(np.setdiff1d(np.arange(len(self)), taken)), self.take(taken)

    def summary(self) -> DataSummary:
        """What a device may tell of its data: counts and shapes, never samples."""
        return DataSummary(
            sample_count=len(self),
            input_shape=self.sample_shape,
            class_counts=tuple(int(count) for count in self.class_counts()),
            data_bytes=self.inputs.nbytes + self.labels.nbytes,
            class_names=self.class_names,
            streams=self.transform is not None,
        )


def _check_finite(name: str, array: npt.NDArray[np.generic]) -> None:
    # The sum of a float32 array is finite in float64 exactly when all of its values are.
    with np.errstate(invalid="ignore"):
        finite = bool(np.isfinite(np.sum(array, dtype=np.float64)))
    if not finite:
        raise DataError(f"{name} hold a value that is not finite; replace NaN and infinity before training")


def _check_classes(labels: Labels) -> None:
    least, most = int(np.min(labels)), int(np.max(labels))
    if least < 0 and labels.ndim == 1:
        raise DataError(
            f"a label is {least}, but must be a class index of 0 or more; leave samples without a class out, and write "
            "numbers to be predicted as floating point"
        )
    if most >= MAX_CLASSES or (least < 0 and not np.isin(labels[labels < 0], NO_LABEL).all()):
        raise DataError(
            f"labels are {least} to {most}, but must be class indices of 0 or more and below {MAX_CLASSES}, or one of "
            f"{NO_LABEL} where there is none; write numbers to be predicted as floating point"
        )
    if most < 0:
        raise DataError(f"labels are {most} at most, so that no sample has one; label at least one sample")


def _check_names(names: tuple[str, ...], labels: Labels) -> None:
    try:
        check_class_names(names)
    except ValueError as error:
        raise DataError(str(error)) from error
    if labels.dtype != np.int64 or int(np.max(labels)) >= len(names):
        raise DataError(
            f"labels are {labels.dtype} up to {np.max(labels)}, but must be indices of the {len(names)} classes named"
        )


def _check_owners(owners: npt.NDArray[np.int64], count: int) -> None:
    if owners.dtype != np.int64 or owners.shape != (count,):
        raise DataError(
            f"owners are {owners.dtype} of shape {owners.shape}, but must be int64 of shape ({count},), one for each "
            "sample"
        )
    if int(np.min(owners)) < NO_OWNER:
        raise DataError(
            f"owners are {np.min(owners)} at least, but must be 0 or more, or {NO_OWNER} where there is none"
        )
