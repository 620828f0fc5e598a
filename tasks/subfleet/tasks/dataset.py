"""A data set in memory, validated on creation."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from subfleet.protocol.class_names import check_class_names
from subfleet.protocol.errors import DataError
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.transform import DataTransform

MAX_CLASSES = 2**15
"""Class indices must be below this: a device reports the counts of all classes in one control message of limited
size."""
NO_LABEL = (-1, -100)
"""Class indices that mean "no label", such as after the end of a text; -100 is PyTorch's default."""
NO_OWNER = -1
"""Owner of samples that belong to no one, such as recordings of silence."""

Inputs = npt.NDArray[np.float32] | npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples and their labels.

    Attributes:
        inputs: (samples, *sample shape): float32, all finite, images with channels first; or int64 of at least 0, such
            as tokens.
        labels: (samples, *label shape): int64 class indices, or finite float32 targets. If a sample has several labels,
            such as one for each token of a text, some may be missing (`NO_LABEL`).
        owners: (samples,): int64 number of each sample's owner (a writer, role or speaker), or `NO_OWNER`; None if
            samples have no owners.
        class_names: in the order of the class indices; empty if classes only have numbers.
        transform: the transform that was already applied to the inputs, if any.

    Raises:
        DataError: the arrays have a wrong type or shape, differ in length, are empty, or contain invalid values; or
            class names are invalid.
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
                raise DataError(f"{name} have the shape {array.shape}, but must contain at least one value")
            if array.dtype == np.float32:
                _check_finite(name, array)
        if self.inputs.dtype == np.int64 and self.inputs.min() < 0:
            raise DataError(f"the smallest input is {self.inputs.min()}, but indices must be 0 or more")
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
        """Shape of one sample's label; () for one class."""
        return self.labels.shape[1:]

    def classes(self) -> npt.NDArray[np.int64]:
        """The class of each sample.

        Raises:
            DataError: samples do not have exactly one class each.
        """
        if self.labels.dtype != np.int64 or self.labels.ndim != 1 or int(np.min(self.labels)) < 0:
            raise DataError(
                f"labels are {self.labels.dtype} of shape {self.labels.shape}, but must be one class for each sample"
            )
        return self.labels.astype(np.int64, copy=False)

    def class_counts(self) -> npt.NDArray[np.int64]:
        """Number of labels of each class: of all named classes, or up to the last class that occurs.

        Empty for float targets.
        """
        if self.labels.dtype != np.int64:
            return np.zeros(0, np.int64)
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.class_names)).astype(np.int64)

    def take(self, indices: npt.NDArray[np.int64]) -> "Dataset":
        """The data set of the samples at these indices, in their order."""
        owners = None if self.owners is None else self.owners[indices]
        return replace(self, inputs=self.inputs[indices], labels=self.labels[indices], owners=owners)

    def split_off(self, count: int) -> "tuple[Dataset, Dataset]":
        """Split off evenly spread samples, because files are often sorted by class.

        Args:
            count: number of samples to split off, at least 1 and less than all.

        Returns:
            The remaining samples, and those that were split off.
        """
        taken = (2 * np.arange(count, dtype=np.int64) + 1) * len(self) // (2 * count)
        return self.take(np.setdiff1d(np.arange(len(self)), taken)), self.take(taken)

    @property
    def data_bytes(self) -> int:
        """The memory of its samples."""
        return self.inputs.nbytes + self.labels.nbytes

    def summary(self) -> DataSummary:
        """The counts and shapes that a device may report about its data; never samples."""
        return DataSummary(
            sample_count=len(self),
            input_shape=self.sample_shape,
            class_counts=tuple(int(count) for count in self.class_counts()),
            data_bytes=self.data_bytes,
            class_names=self.class_names,
            streams=self.transform is not None,
        )


def _check_finite(name: str, array: npt.NDArray[np.generic]) -> None:
    # The float64 sum of a float32 array is finite exactly if all values are.
    with np.errstate(invalid="ignore"):
        finite = bool(np.isfinite(np.sum(array, dtype=np.float64)))
    if not finite:
        raise DataError(f"{name} contain a value that is not finite; replace NaN and infinity before training")


def _check_classes(labels: Labels) -> None:
    least, most = int(np.min(labels)), int(np.max(labels))
    if least < 0 and labels.ndim == 1:
        raise DataError(
            f"a label is {least}, but must be a class index of 0 or more; remove samples without a class, and write "
            "numbers to be predicted as floating point"
        )
    if most >= MAX_CLASSES or (least < 0 and not np.isin(labels[labels < 0], NO_LABEL).all()):
        raise DataError(
            f"labels are {least} to {most}, but must be class indices from 0 and below {MAX_CLASSES}, or one of "
            f"{NO_LABEL} for no label; write numbers to be predicted as floating point"
        )
    if most < 0:
        raise DataError(f"the largest label is {most}, so no sample has a label; label at least one sample")


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
            f"the smallest owner is {np.min(owners)}, but owners must be 0 or more, or {NO_OWNER} for no owner"
        )
