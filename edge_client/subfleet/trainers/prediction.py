"""Inference over a data set, the same for every runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from subfleet.protocol.class_names import CLASS_NAMES, parse_class_names
from subfleet.protocol.errors import DataError, ProtocolError, TrainingError, explain_os_errors
from subfleet.protocol.jobs import Prediction
from subfleet.protocol.model_notes import OBJECTIVE, parse_objective
from subfleet.protocol.task_kinds import TASK_KINDS, Objective, TaskKind, compute_metrics
from subfleet.protocol.transform import DATA_TRANSFORM, DataTransform, parse_transform
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.tasks.dataset import Labels
from subfleet.tasks.metrics import MetricTally

_Array = npt.NDArray[np.generic]

FREE_BATCH_SIZE = 64
"""The batch size if a model leaves it open: large enough to be fast, small enough for a small device."""


def read_model(path: Path) -> bytes:
    """Read an inference model.

    Raises:
        FileError: the file cannot be read.
    """
    with explain_os_errors(f"model {str(path)!r} cannot be read", "check the path"):
        return path.read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """The properties of an inference model.

    Attributes:
        sample_shape: the shape of one sample.
        classes: names of its classes, in its order; empty if they are numbered.
        objective: the objective of its training, which gives its outputs their meaning; empty if the file does not name
            it: then labels decide, where floating point numbers other than 0 and 1 mean a regression.
        dtype: NumPy's name of the type that it takes; None takes any.
        transform: the transform of its training samples; None for none.
    """

    sample_shape: tuple[int, ...]
    classes: tuple[str, ...] = ()
    objective: Objective | Literal[""] = ""
    dtype: str | None = None
    transform: DataTransform | None = None

    def kind(self, labels: Labels) -> TaskKind:
        """Determine the kind of task for such labels."""
        if self.objective:
            return TASK_KINDS[self.objective]
        if labels.dtype == np.int64:
            return TASK_KINDS["cross_entropy"]
        return TASK_KINDS["binary_cross_entropy" if np.isin(labels, (0, 1)).all() else "mean_squared_error"]

    def data(self, source: str) -> Dataset:
        """Read a data set in the form that the model takes.

        Raises:
            FileError: the data cannot be read.
            DataError: the data cannot be used, or do not fit the model.
        """
        form = DataForm(
            input_shape=self.sample_shape,
            class_count=len(self.classes),
            classes=self.classes,
            transform=self.transform,
            targets=bool(self.objective) and not TASK_KINDS[self.objective or "cross_entropy"].over_classes,
        )
        dataset = read_dataset(source, form)
        if self.dtype is not None and dataset.inputs.dtype.name != self.dtype:
            raise DataError(
                f"samples of {source!r} are {dataset.inputs.dtype}, but the model takes {self.dtype}; use data of that "
                "type"
            )
        return dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded inference model.

    Attributes:
        form: the properties in its file.
        batch_size: samples of every run.
        infer: runs it: inputs of shape (batch_size, *sample shape) to outputs of shape (batch_size, *label shape,
            classes), or (batch_size, *label shape) if labels are targets. The outputs belong to the caller.
    """

    form: ModelForm
    batch_size: int
    infer: Callable[[_Array], _Array]


def read_form(
    path: Path, note: Callable[[str], str], *, sample_shape: tuple[int, ...], dtype: str | None = None
) -> ModelForm:
    """Read the properties of a model from its file.

    Args:
        path: the file, for error messages.
        note: returns the text of a note in the file; empty if it has no such note.
        sample_shape: the shape of one sample.
        dtype: as in `ModelForm`.

    Raises:
        TrainingError: a note is invalid.
    """
    names, objective_note, transform = note(CLASS_NAMES), note(OBJECTIVE), note(DATA_TRANSFORM)
    part = "names of classes"
    try:
        classes = parse_class_names(names) if names else ()
        part = "an objective"
        objective: Objective | Literal[""] = parse_objective(objective_note) if objective_note else ""
        part = "a transform of data"
        done = parse_transform(transform) if transform else None
    except ProtocolError as error:
        raise TrainingError(
            f"model {str(path)!r} carries {part} that cannot be used: {error}; deploy it again"
        ) from error
    return ModelForm(sample_shape=sample_shape, classes=classes, objective=objective, dtype=dtype, transform=done)


def predict_dataset(model: Model, dataset: Dataset) -> Prediction:
    """Run a model over a data set in batches; the last batch is padded with zeros, whose outputs are dropped.

    Args:
        model: the model.
        dataset: samples and their labels, in the form that the model takes.

    Raises:
        DataError: labels are of another kind or shape than the model's outputs.
        TrainingError: the model takes no samples, or its output does not fit the names.
    """
    form, batch_size = model.form, model.batch_size
    if batch_size < 1:
        raise TrainingError(f"the model takes batches of {batch_size}, but must take 1 sample or more at once")
    kind = form.kind(dataset.labels)
    if (dataset.labels.dtype == np.int64) != kind.over_classes:
        raise DataError(
            f"labels are {dataset.labels.dtype}, but a model of objective {form.objective!r} predicts "
            f"{'classes; use class indices' if kind.over_classes else 'numbers; use targets'}"
        )
    outputs = np.concatenate([_run_batch(model, dataset, start) for start in range(0, len(dataset), batch_size)])
    labels = _fit_labels(dataset, outputs, kind, form.classes)
    tally = MetricTally(kind, outputs.shape[-1], by_class=True)
    tally.add(outputs, labels)
    metrics = compute_metrics(kind, tally.totals(_compute_loss(outputs, labels) if kind.over_classes else 0.0))
    predictions = _predict(kind, outputs)
    numbers = kind.labels == "numbers"
    return Prediction(
        labels=() if numbers else tuple(int(label) for label in predictions.ravel()),
        numbers=tuple(float(number) for number in predictions.ravel()) if numbers else (),
        metrics=metrics,
        headline=kind.headline,
        classes=form.classes,
    )


def _run_batch(model: Model, dataset: Dataset, start: int) -> npt.NDArray[np.float32]:
    """Run one batch; returns the outputs without padding."""
    batch_size = model.batch_size
    part = dataset.inputs[start : start + batch_size]
    missing = batch_size - len(part)
    padded = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)]) if missing else part
    logits = model.infer(padded)
    if logits.shape[:1] != (batch_size,) or not np.issubdtype(logits.dtype, np.floating):
        raise TrainingError(
            f"the model gives {logits.dtype} of shape {logits.shape}, but must give outputs of shape "
            f"({batch_size}, ...)"
        )
    real = np.asarray(logits[: len(part)], np.float32)
    return real if real.ndim > 1 else real[:, np.newaxis]


def _fit_labels(dataset: Dataset, outputs: npt.NDArray[np.float32], kind: TaskKind, classes: tuple[str, ...]) -> Labels:
    """Reshape the labels like the predictions."""
    labels, predicted = dataset.labels, outputs.shape[:-1] if kind.over_classes else outputs.shape
    if not kind.over_classes and predicted == (*labels.shape, 1):
        labels = labels[..., np.newaxis]
    if labels.shape != predicted:
        needed = (*labels.shape, "classes") if kind.over_classes else labels.shape
        raise TrainingError(
            f"the model gives outputs of shape {outputs.shape}, but labels of shape {labels.shape} need {needed}"
        )
    if classes and outputs.shape[-1] != len(classes):
        raise TrainingError(
            f"the model names {len(classes)} classes, but gives logits of {outputs.shape[-1]}; deploy it again"
        )
    if kind.over_classes and int(labels.max()) >= outputs.shape[-1]:
        raise DataError(
            f"a label is {int(labels.max())}, but must be below {outputs.shape[-1]}, the model's classes; correct it"
        )
    return labels


def _compute_loss(outputs: npt.NDArray[np.float32], labels: Labels) -> float:
    """Sum the cross-entropies of the labels that count, in nats."""
    counted = labels >= 0
    wide = outputs[counted].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    chosen = np.take_along_axis(wide, labels[counted].astype(np.int64)[:, np.newaxis], -1)
    return float((np.log(np.exp(wide).sum(-1)) - chosen[:, 0]).sum())


def _predict(kind: TaskKind, outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.generic]:
    """Predict classes, the outputs that are 1, or numbers."""
    if kind.over_classes:
        return np.asarray(np.argmax(outputs, -1))
    return outputs > 0 if kind.labels == "probabilities" else outputs
