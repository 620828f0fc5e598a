"""Inference over a data set, the same for every runtime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError, FileError, TrainingError
from subfleet.protocol.programs import Prediction
from subfleet.tasks import Dataset
from subfleet.tasks.metrics import accuracy

__all__ = ["FREE_BATCH_SIZE", "predict_dataset", "read_model"]

FREE_BATCH_SIZE = 64
"""Samples at once where a model leaves the batch open: enough to be fast, few enough for a small device."""

Inputs = npt.NDArray[np.float32]


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
    infer: Callable[[Inputs], npt.NDArray[np.generic]],
    dataset: Dataset,
    *,
    sample_shape: tuple[int, ...],
    batch_size: int,
) -> Prediction:
    """Run a model over a data set, batch by batch.

    Args:
        infer: inputs of shape (batch_size, *sample_shape) to logits of shape (batch_size, classes).
        dataset: samples and their labels.
        sample_shape: what the model takes.
        batch_size: of every call; the last batch is filled up with zeros, whose outputs are dropped.

    Raises:
        DataError: the samples have another shape.
        TrainingError: the model takes no samples, or its output is no table of logits.
    """
    if batch_size < 1:
        raise TrainingError(f"the model takes batches of {batch_size}, but must take 1 sample or more at once")
    if dataset.sample_shape != sample_shape:
        raise DataError(
            f"samples are of shape {dataset.sample_shape}, but the model takes {sample_shape}; use data of that shape"
        )
    rows = []
    for start in range(0, len(dataset), batch_size):
        part = dataset.inputs[start : start + batch_size]
        missing = batch_size - len(part)
        padded = np.concatenate([part, np.zeros((missing, *sample_shape), np.float32)]) if missing else part
        logits = infer(padded)
        if logits.ndim != 2 or len(logits) != batch_size or not np.issubdtype(logits.dtype, np.floating):
            raise TrainingError(
                f"the model gives {logits.dtype} of shape {logits.shape}, but must give logits of shape "
                f"({batch_size}, classes)"
            )
        rows.append(logits[: len(part)].astype(np.float32))
    table = np.concatenate(rows)
    return Prediction(labels=tuple(int(label) for label in table.argmax(1)), accuracy=accuracy(table, dataset.labels))
