"""Evaluates a model on a device's held-out data, with any runtime that trains."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np

from subfleet.protocol.chains import Link
from subfleet.protocol.errors import DivergedError, LoadError, MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.evaluating import EvaluationResult, EvaluationSettings
from subfleet.protocol.jobs import Job
from subfleet.protocol.paths import PathScore
from subfleet.protocol.task import Evaluate
from subfleet.protocol.task_kinds import TASK_KINDS
from subfleet.tasks import Dataset, split_batch
from subfleet.tasks.dataset import Labels
from subfleet.tasks.metrics import MetricTally
from subfleet.trainers.job_context import open_context
from subfleet.trainers.job_files import read_weights
from subfleet.trainers.kept import Host
from subfleet.trainers.layouts import EvaluationLayout
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.program_layout import Path, list_stages
from subfleet.trainers.program_session import ProgramSession
from subfleet.trainers.runtime import Array, Runtime

_ROUNDING = 1e-5
"""How far below 0 rounding may bring a loss of 0."""


def evaluate_job(
    job: Job[Evaluate], stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host
) -> EvaluationResult:
    """Evaluate a model, or each path of a population, on a device's held-out data. Nothing is written.

    The weights are held once, unchanged. Each batch goes along all paths before the next one is read. Only the features
    of two links are held at a time, so that a population takes no more memory than its largest path. See `open_context`
    for what counts as memory.

    Args:
        job: what to evaluate; its settings may name a population.
        stopped: called between paths; True ends the job.
        target: the target that the program must be written for.
        runtime: the runtime.
        host: the process that the job runs in.

    Raises:
        MemoryLimitError: a path does not fit, or the process grew beyond the limit.
        MemoryError: the system refused memory within the limit.
        LoadError: the runtime refuses the program, or an operator of the population.
        TrainingError: a program failed, was stopped, or returned impossible numbers.
        DataError: the data do not fit the program.
        ProtocolError: program, population, weights and settings do not fit each other.
        FileError: a file of the job cannot be read.
    """
    settings = job.work.settings
    with open_context(job, stopped, target=target, runtime=runtime, host=host) as context:
        loaded, layout = context.loaded, context.loaded.layout.for_evaluation
        loaded.layout.check_paths(named=bool(settings.population))
        _check_settings(settings, layout)
        links = loaded.layout.links(dict(job.choices))
        paths = [_find_path(links, operators) for operators in settings.population or ((),)]
        _load(job, loaded, links, paths, drops=not host.shared)
        session = ProgramSession(loaded, links, read_weights(job.tensor_paths, loaded.layout.weights(links)), {})
        host.release()  # memory that loading left behind would add to the steps' peak
        sums = [LabelSums(layout, settings) for _ in paths]
        for fed, labels, last in _make_batches(context.dataset, layout):
            for path, own in zip(paths, sums, strict=True):
                context.check_stopped("evaluation was stopped")
                own.add(session.evaluate(path, fed, last=last and own is sums[-1]), labels)
                context.watch.check()
            del fed  # before the next one is made
        del session
    peak_bytes = context.watch.growth_bytes()
    results = [own.result(sample_count=len(context.dataset), measured_peak_bytes=peak_bytes) for own in sums]
    return _average(results) if settings.population else results[0]


def _average(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """Average the results of a population, with the score of each path."""
    return EvaluationResult(
        loss=fmean(result.loss for result in results),
        accuracy=fmean(result.accuracy for result in results),
        sample_count=results[0].sample_count,
        label_count=results[0].label_count,
        measured_peak_bytes=results[0].measured_peak_bytes,
        scores=tuple(PathScore(loss=result.loss, accuracy=result.accuracy) for result in results),
    )


def _find_path(links: Sequence[Link], operators: Sequence[str]) -> Path:
    """Find a path by the operators of its choices."""
    choices = [link.name for link in links if link.open]
    if len(operators) != len(choices):
        raise ProtocolError(f"a path names {len(operators)} operators, but the subspace has {len(choices)} choices")
    named = dict(zip(choices, operators, strict=True))
    path = tuple(stage for stage in list_stages(links) if stage.operator.name == named.get(stage.link, ""))
    if len(path) != len(links):
        known = {(stage.link, stage.operator.name) for stage in path}
        unknown = next(choice for choice in named.items() if choice not in known)
        raise ProtocolError(
            f"a path names the operator {unknown[1]!r:.80} of {unknown[0]!r:.80}, which the subspace lacks"
        )
    return path


def _load(job: Job[Evaluate], loaded: Loaded, links: Sequence[Link], paths: Sequence[Path], *, drops: bool) -> None:
    """Load the operators of the paths, if the largest path fits the memory limit."""
    used = {(stage.link, stage.operator.name) for path in paths for stage in path}
    needed = tuple(
        Link(
            name=link.name,
            operators=tuple(operator for operator in link.operators if (link.name, operator.name) in used),
        )
        for link in links
    )
    held_bytes = loaded.layout.chain.plan_memory(links).held_bytes
    for path in paths:
        needed_bytes = held_bytes + max(stage.operator.kept_bytes + stage.operator.peak_bytes for stage in path)
        if needed_bytes > job.memory_limit_bytes:
            raise MemoryLimitError(needed_bytes=needed_bytes, limit_bytes=job.memory_limit_bytes)
    if loaded.load(needed, job, drops=drops) != needed:
        why = next(iter(loaded.refused.values()))
        raise LoadError(f"a path of the population cannot be run: {why}")


def _check_settings(settings: EvaluationSettings, layout: EvaluationLayout) -> None:
    """Compare a task's batch size and kind of labels with its program; raises ProtocolError if they differ."""
    classes = TASK_KINDS[settings.objective].over_classes
    if classes != (layout.label.dtype == "I64"):
        raise ProtocolError(
            f"the task's objective is {settings.objective!r}, but its program takes labels of {layout.label.dtype}"
        )
    if settings.batch_size != layout.batch_size:
        raise ProtocolError(
            f"the task's batch size is {settings.batch_size}, but its program takes {layout.batch_size}"
        )


def _make_batches(dataset: Dataset, layout: EvaluationLayout) -> Iterator[tuple[Mapping[str, Array], Labels, bool]]:
    """Yield for each batch the fed values, the labels of its real samples, and whether it is the last."""
    count = len(dataset)
    starts = range(0, count, layout.batch_size)
    whole = split_batch(np.arange(count), np.ones(count, np.float32), layout.batch_size)
    for start, (indices, mask) in zip(starts, whole, strict=True):
        labels = dataset.labels[indices]
        fed = {layout.input.name: dataset.inputs[indices], layout.label.name: labels, layout.sample_mask.name: mask}
        yield fed, labels[mask > 0], start == starts[-1]


class LabelSums:
    """The sums over the batches of one evaluation."""

    def __init__(self, layout: EvaluationLayout, settings: EvaluationSettings) -> None:
        self._layout = layout
        self._loss = 0.0
        self._correct = 0.0
        self._labels = 0
        outputs = layout.label.limit or layout.label.shape[-1]
        self._tally = MetricTally(TASK_KINDS[settings.objective], outputs, by_class=settings.per_class)

    def add(self, read: Mapping[str, Array], labels: Labels) -> None:
        """Add the outputs of a batch, with the labels of its real samples.

        Raises:
            DivergedError: its loss is not finite.
            TrainingError: the program counted a wrong number of labels.
        """
        layout = self._layout
        loss, correct, count = (float(read[name]) for name in (layout.loss, layout.correct, layout.count))
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of a batch is {loss}, so the model cannot be evaluated")
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
        """Compute the means; a data set has at least one label that counts.

        Raises:
            TrainingError: they are impossible values.
        """
        loss = self._loss / self._labels
        totals = self._tally.totals(self._loss)
        if loss < -_ROUNDING or not 0 <= self._correct <= self._labels:
            raise TrainingError(
                f"the program reported a loss of {loss:g} and {self._correct:g} correct labels of {self._labels}, "
                "which is impossible; use targets from 0 to 1, or export it again"
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
