"""Inference over a data set, the same for every runtime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from subfleet.protocol.class_names import CLASS_NAMES, class_names_of_text
from subfleet.protocol.errors import DataError, FileError, ProtocolError, TrainingError
from subfleet.protocol.programs import Prediction
from subfleet.protocol.transform import DATA_TRANSFORM, transform_of_text
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.trainers.sessions import Array

__all__ = ["FREE_BATCH_SIZE", "model_data", "model_form", "predict_dataset", "read_model"]

FREE_BATCH_SIZE = 64
"""Samples at once where a model leaves the batch open: enough to be fast, few enough for a small device."""


def read_model(path: Path) -> bytes:
    """Read an inference model.

    Raises:
        FileError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"model {str(path)!r} cannot be read ({error.strerror}); check the path") from error


def model_form(note: Callable[[str], str], sample_shape: tuple[int, ...], path: Path) -> DataForm:
    """In which form a model takes data, by what it carries: names of its classes, and what was done to samples.

    Args:
        note: gives a text that the model carries, by name; empty where there is none.
        sample_shape: what the model takes.
        path: of the model, for the error's text.

    Raises:
        TrainingError: a text is not what its name says.
    """
    names, transform = note(CLASS_NAMES), note(DATA_TRANSFORM)
    try:
        classes = class_names_of_text(names) if names else ()
    except ProtocolError as error:
        raise TrainingError(
            f"model {str(path)!r} carries names of classes that cannot be used: {error}; deploy it again"
        ) from error
    try:
        done = transform_of_text(transform) if transform else None
    except ProtocolError as error:
        raise TrainingError(
            f"model {str(path)!r} carries a transform of data that cannot be used: {error}; deploy it again"
        ) from error
    return DataForm(input_shape=sample_shape, class_count=len(classes), classes=classes, transform=done)


def model_data(source: str, form: DataForm, *, dtype: str | None = None) -> Dataset:
    """Read a data set as a model takes it.

    Args:
        source: of the data.
        form: in which the model takes it.
        dtype: NumPy's name of the type that it takes; None takes any.

    Raises:
        FileError: the data cannot be read.
        DataError: the data cannot be used, or do not fit the model.
    """
    dataset = read_dataset(source, form)
    if dtype is not None and dataset.inputs.dtype.name != dtype:
        raise DataError(
            f"samples of {source!r} are {dataset.inputs.dtype}, but the model takes {dtype}; use data of that type"
        )
    return dataset


def predict_dataset(
    infer: Callable[[Array], Array],
    dataset: Dataset,
    *,
    batch_size: int,
    classes: tuple[str, ...] = (),
) -> Prediction:
    """Run a model over a data set, batch by batch.

    Args:
        infer: inputs of shape (batch_size, *sample shape) to logits of shape (batch_size, *label shape, classes), or,
            where labels are targets of 0 and 1, (batch_size, *label shape).
        dataset: samples and their labels, in the form that the model takes.
        batch_size: of every call; the last batch is filled up with zeros, whose outputs are dropped.
        classes: names of the model's classes; empty where it numbers them.

    Raises:
        DataError: the labels are other numbers than 0 and 1.
        TrainingError: the model takes no samples, or its output does not fit the labels or the names.
    """
    if batch_size < 1:
        raise TrainingError(f"the model takes batches of {batch_size}, but must take 1 sample or more at once")
    if dataset.labels.dtype != np.int64 and not np.isin(dataset.labels, (0, 1)).all():
        raise DataError("labels are numbers, but a prediction is of classes; use class indices, or targets of 0 and 1")
    batches = [_predicted(infer, dataset, start, batch_size, len(classes)) for start in _starts(dataset, batch_size)]
    predicted = np.concatenate(batches)
    counted = dataset.labels >= 0
    return Prediction(
        labels=tuple(int(label) for label in predicted.ravel()),
        accuracy=float(np.mean((predicted == dataset.labels)[counted])),
        classes=classes,
    )


def _starts(dataset: Dataset, batch_size: int) -> range:
    return range(0, len(dataset), batch_size)


def _predicted(
    infer: Callable[[Array], Array], dataset: Dataset, start: int, batch_size: int, named: int
) -> npt.NDArray[np.int64]:
    """Predicted classes of one batch, of the shape of its labels."""
    part = dataset.inputs[start : start + batch_size]
    missing = batch_size - len(part)
    padded = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)]) if missing else part
    logits = infer(padded)
    binary = dataset.labels.dtype != np.int64
    expected = (batch_size, *dataset.label_shape)
    given = logits.shape if binary else logits.shape[:-1]
    if given != expected or not np.issubdtype(logits.dtype, np.floating):
        raise TrainingError(
            f"the model gives {logits.dtype} of shape {logits.shape}, but must give logits of shape "
            f"{expected if binary else (*expected, 'classes')}"
        )
    if named and logits.shape[-1] != named:
        raise TrainingError(f"the model names {named} classes, but gives logits of {logits.shape[-1]}; deploy it again")
    real = logits[: len(part)]
    return (np.asarray(real, np.float32) > 0 if binary else np.argmax(real, -1)).astype(np.int64)
