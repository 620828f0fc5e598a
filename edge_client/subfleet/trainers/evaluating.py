"""Evaluates a model on a device's held-out data, with the same runtimes that train: one loop for all of them."""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from subfleet.protocol.errors import DivergedError, ProtocolError, TrainingError
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.programs import EvaluateJob, EvaluationResult
from subfleet.protocol.task_kinds import TASK_KINDS
from subfleet.tasks import Dataset, split_batch
from subfleet.tasks.dataset import Labels
from subfleet.tasks.metrics import Tally
from subfleet.trainers.evaluation_layout import EvaluationLayout
from subfleet.trainers.job_data import read_data
from subfleet.trainers.job_files import read_weights
from subfleet.trainers.kept import Host
from subfleet.trainers.sessions import Array, OpenSession
from subfleet.trainers.training import loaded_session

__all__ = ["LabelSums", "batches_of", "check_batch_size", "evaluate_job"]

_ROUNDING = 1e-5
"""A loss of nothing may be this much below 0."""


def evaluate_job(
    job: EvaluateJob, stopped: Callable[[], bool], *, target: str, open_session: OpenSession, slot: Host
) -> EvaluationResult:
    """How good a model is on a device's held-out data. Nothing is trained, and no file is written.

    The data set is read before measuring begins, as in a training; the program, the weights, which are held once, the
    runtime's session and the steps count.

    Args:
        job: what to evaluate.
        stopped: asked between steps.
        target: what the program must be written for.
        open_session: loads a program.
        slot: the process that it runs in.

    Raises:
        MemoryLimitError: the process grew beyond the limit, or what the program takes alone is beyond it.
        MemoryError: the system refused memory below the limit.
        LoadError: the runtime refuses the program.
        TrainingError: the program failed, was stopped, or tells what cannot be.
        DataError: the data do not fit the program.
        ProtocolError: program, weights and settings do not fit each other.
        FileError: a file of the job cannot be read.
    """
    dataset = read_data(job, target)
    with loaded_session(job, target=target, open_session=open_session, slot=slot) as (loaded, watch):
        layout, session = loaded.for_evaluation, loaded.session
        check_batch_size(job, layout)
        weights = read_weights(job.weights_path, layout.weights)
        session.begin({}, {value.name: weights[value.tensor] for value in layout.weights})
        del weights
        # What loading left behind would stay beneath the steps' peak.
        slot.release()
        sums = LabelSums(layout, job.settings)
        for fed, labels, last in batches_of(dataset, layout):
            if stopped():
                raise TrainingError("evaluating was stopped; its task must be taken up anew")
            sums.add(session.step(fed, last=last), labels)
            del fed  # before the next one is made
            watch.check()
        session.finish()
    return sums.result(sample_count=len(dataset), measured_peak_bytes=watch.growth_bytes())


def check_batch_size(job: EvaluateJob, layout: EvaluationLayout) -> None:
    """Compare a task's batch size and kind of labels with its program; raises ProtocolError where they differ."""
    classes = TASK_KINDS[job.settings.objective].over_classes
    if classes != (layout.label.dtype == "I64"):
        raise ProtocolError(
            f"the task's objective is {job.settings.objective!r}, but its program takes labels of {layout.label.dtype}"
        )
    if job.settings.batch_size != layout.batch_size:
        raise ProtocolError(
            f"the task's batch size is {job.settings.batch_size}, but its program takes {layout.batch_size}"
        )


def batches_of(dataset: Dataset, layout: EvaluationLayout) -> Iterator[tuple[Mapping[str, Array], Labels, bool]]:
    """What is fed for each batch in order, the labels of its real samples, and whether it is the last."""
    count = len(dataset)
    starts = range(0, count, layout.batch_size)
    whole = split_batch(np.arange(count), np.ones(count, np.float32), layout.batch_size)
    for start, (indices, mask) in zip(starts, whole, strict=True):
        labels = dataset.labels[indices]
        fed = {layout.input.name: dataset.inputs[indices], layout.label.name: labels, layout.sample_mask.name: mask}
        yield fed, labels[mask > 0], start == starts[-1]


class LabelSums:
    """What the batches of one evaluation add up to."""

    def __init__(self, layout: EvaluationLayout, settings: EvaluationSettings) -> None:
        self._layout = layout
        self._loss = 0.0
        self._correct = 0.0
        self._labels = 0
        outputs = layout.label.limit or layout.label.shape[-1]
        self._tally = Tally(TASK_KINDS[settings.objective], outputs, by_class=settings.per_class)

    def add(self, read: Mapping[str, Array], labels: Labels) -> None:
        """Add what the program has told of a batch whose real samples have these labels.

        Raises:
            DivergedError: its loss is not finite.
            TrainingError: it counted other labels than there are.
        """
        layout = self._layout
        loss, correct, count = (float(read[name]) for name in (layout.loss, layout.correct, layout.count))
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of a batch is {loss}, so that nothing can be said of the model")
        real = labels >= 0 if labels.dtype == np.int64 else np.ones(labels.shape, np.bool_)
        if count != np.count_nonzero(real):
            raise TrainingError(
                f"the program counted {count:g} labels of a batch that has {np.count_nonzero(real)}; it must be "
                "exported again"
            )
        self._loss += loss * count
        self._correct += correct
        self._labels += int(count)
        self._tally.add(np.asarray(read[layout.logits][: len(labels)], np.float32), labels)

    def result(self, *, sample_count: int, measured_peak_bytes: int) -> EvaluationResult:
        """The means; a data set has one label or more that counts.

        Raises:
            TrainingError: they are not such as can be.
        """
        loss = self._loss / self._labels
        totals = self._tally.totals(self._loss)
        if loss < -_ROUNDING or not 0 <= self._correct <= self._labels:
            raise TrainingError(
                f"the program told a loss of {loss:g} and {self._correct:g} right labels of {self._labels}, which "
                "cannot be; use targets from 0 to 1, or export it again"
            )
        return EvaluationResult(
            loss=max(loss, 0.0),
            accuracy=totals.correct / self._labels,
            sample_count=sample_count,
            label_count=self._labels,
            measured_peak_bytes=measured_peak_bytes,
            class_counts=totals.class_counts,
            class_correct=totals.class_correct,
            sums=totals.sums,
        )
