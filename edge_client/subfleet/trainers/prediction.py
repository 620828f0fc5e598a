"""Inference over a data set, the same for every runtime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError, FileError, TrainingError
from subfleet.protocol.programs import Prediction
from subfleet.tasks import Dataset, shaped
from subfleet.trainers.sessions import Array

__all__ = ["FREE_BATCH_SIZE", "predict_dataset", "read_model"]

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


def predict_dataset(
    infer: Callable[[Array], Array],
    dataset: Dataset,
    *,
    sample_shape: tuple[int, ...],
    batch_size: int,
) -> Prediction:
    """Run a model over a data set, batch by batch.

    Args:
        infer: inputs of shape (batch_size, *sample_shape) to logits of shape (batch_size, *label shape, classes), or,
            where labels are targets of 0 and 1, (batch_size, *label shape).
        dataset: samples and their labels.
        sample_shape: what the model takes.
        batch_size: of every call; the last batch is filled up with zeros, whose outputs are dropped.

    Raises:
        DataError: the samples cannot be fed in that shape, or the labels are other numbers than 0 and 1.
        TrainingError: the model takes no samples, or its output does not fit the labels.
    """
    if batch_size < 1:
        raise TrainingError(f"the model takes batches of {batch_size}, but must take 1 sample or more at once")
    dataset = shaped(dataset, sample_shape, "samples")
    if dataset.labels.dtype != np.int64 and not np.isin(dataset.labels, (0, 1)).all():
        raise DataError("labels are numbers, but a prediction is of classes; use class indices, or targets of 0 and 1")
    classes = np.concatenate([_classes(infer, dataset, start, batch_size) for start in _starts(dataset, batch_size)])
    counted = dataset.labels >= 0
    return Prediction(
        labels=tuple(int(label) for label in classes.ravel()),
        accuracy=float(np.mean((classes == dataset.labels)[counted])),
    )


def _starts(dataset: Dataset, batch_size: int) -> range:
    return range(0, len(dataset), batch_size)


def _classes(infer: Callable[[Array], Array], dataset: Dataset, start: int, batch_size: int) -> npt.NDArray[np.int64]:
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
    real = logits[: len(part)]
    return (np.asarray(real, np.float32) > 0 if binary else np.argmax(real, -1)).astype(np.int64)
