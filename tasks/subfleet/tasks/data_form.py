"""Fit data to a model: the shape of samples and labels, and the index of each class."""

import math
from dataclasses import dataclass, replace

import numpy as np

from subfleet.protocol.class_names import find_class_indices
from subfleet.protocol.errors import DataError
from subfleet.protocol.transform import DataTransform
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.transforms.data_transform import transform_dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class DataForm:
    """The form in which a model takes data.

    Attributes:
        input_shape: shape of one sample.
        class_count: number of classes; 0 if labels are numbers or the number of classes is unknown.
        classes: class names in the model's order; () if classes only have numbers; None accepts the names and the order
            of the data.
        label_shape: shape of one sample's label; None accepts any.
        targets: labels are numbers, one for each output; integer labels are converted.
        transform: transform of each sample; None leaves samples as they are.
    """

    input_shape: tuple[int, ...]
    class_count: int = 0
    classes: tuple[str, ...] | None = ()
    label_shape: tuple[int, ...] | None = None
    targets: bool = False
    transform: DataTransform | None = None


def shape_problem(given: tuple[int, ...], taken: tuple[int, ...]) -> str:
    """Why samples of one shape cannot be fed to a model that takes another; empty if they can.

    Dimensions of size 1 may be added and removed, and samples may be flattened or unflattened: every value keeps its
    position. A series (time, features) is thus also an image of one channel, or one long vector. Dimensions are never
    swapped, because their meaning is unknown.

    Args:
        given: shape of one sample.
        taken: shape of one sample as the model takes it.
    """
    mismatch = f"have shape {given}, but the model takes {taken}"
    if math.prod(given) != math.prod(taken):
        return f"{mismatch}: the number of values differs"
    wide_given, wide_taken = _drop_ones(given), _drop_ones(taken)
    if wide_given != wide_taken and min(len(wide_given), len(wide_taken)) > 1:
        return f"{mismatch}: the dimensions differ"
    return ""


def reshape_samples(dataset: Dataset, taken: tuple[int, ...], what: str) -> Dataset:
    """Reshape the samples of a data set for a model.

    Args:
        dataset: the data set.
        taken: shape of one sample as the model takes it.
        what: name of these samples in the error message.

    Raises:
        DataError: the samples cannot be reshaped so.
    """
    if dataset.sample_shape == taken:
        return dataset
    problem = shape_problem(dataset.sample_shape, taken)
    if problem:
        raise DataError(f"{what} {problem}; use data with the model's shape")
    return replace(dataset, inputs=dataset.inputs.reshape(-1, *taken))


def _drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def fit_to_form(dataset: Dataset, form: DataForm, source: str) -> Dataset:
    """Convert a data set to the form that a model takes.

    Args:
        dataset: the data set that was read.
        form: the model's form.
        source: name of the data in error messages.

    Raises:
        DataError: the samples have another shape, cannot be transformed, or were transformed differently before; or
            labels are not classes of the model.
    """
    dataset = reshape_samples(_apply_transform(dataset, form, source), form.input_shape, f"samples of {source!r}")
    dataset = _fit_labels(dataset, form, source)
    if form.class_count and dataset.labels.dtype != np.int64:
        raise DataError(
            f"labels of {source!r} are floating point numbers, but the model takes classes; write them as integers "
            f"from 0 to {form.class_count - 1}"
        )
    return _check_class_count(_map_classes(dataset, form, source), form, source)


def _fit_labels(dataset: Dataset, form: DataForm, source: str) -> Dataset:
    """Convert labels to the model's type and shape."""
    labels = dataset.labels
    if form.targets and labels.dtype == np.int64:
        if dataset.class_names:
            raise DataError(
                f"{source!r} has named classes, but the model takes numbers as labels; use data with targets, or "
                "the objective 'cross_entropy'"
            )
        labels = labels.astype(np.float32)
    taken, given = form.label_shape, labels.shape[1:]
    if form.targets and taken == (1,) and not given:  # most files have a plain number for each sample
        labels = labels[:, np.newaxis]
    elif taken is not None and given != taken:
        raise DataError(
            f"labels of {source!r} have the shape {given} for each sample, but the model takes {taken}; use data "
            "with a label for each prediction"
        )
    return dataset if labels is dataset.labels else replace(dataset, labels=labels, class_names=())


def _apply_transform(dataset: Dataset, form: DataForm, source: str) -> Dataset:
    """Apply the transform unless the data were transformed before they were written."""
    if dataset.transform == form.transform:
        return dataset
    if dataset.transform is not None or form.transform is None:
        raise DataError(
            f"samples of {source!r} were already transformed, and differently from the model's; use the data from "
            "before that transform"
        )
    return transform_dataset(dataset, form.transform, source)


def _map_classes(dataset: Dataset, form: DataForm, source: str) -> Dataset:
    """Map named classes to the model's class indices."""
    if not dataset.class_names or form.classes is None or dataset.class_names == form.classes:
        return dataset
    try:
        indices = find_class_indices(dataset.class_names, form.classes, form.class_count)
    except ValueError as error:
        raise DataError(f"the classes of {source!r} do not fit: {error}; rename or remove the others") from error
    labels = dataset.labels
    known = labels >= 0  # there is no class after the end of a text
    mapped = np.where(known, np.array(indices, np.int64)[np.where(known, labels, 0)], labels)
    return replace(dataset, labels=mapped, class_names=form.classes)


def _check_class_count(dataset: Dataset, form: DataForm, source: str) -> Dataset:
    if not form.class_count:
        return dataset
    if dataset.class_names and len(dataset.class_names) != form.class_count:
        raise DataError(
            f"{source!r} names {len(dataset.class_names)} classes, but the model has {form.class_count}; name all of "
            "them in `classes` of the run file"
        )
    highest = int(np.max(dataset.labels))
    if highest >= form.class_count:
        raise DataError(
            f"a label of {source!r} is {highest}, but must be below {form.class_count}, the number of the model's "
            "classes; correct it"
        )
    return dataset
