"""The inputs of a training program that depend on data and settings, and the sums of its outputs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError, DivergedError, ProtocolError, TrainingError
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.task import Calibrate, Score, Train
from subfleet.protocol.training import TrainingSettings
from subfleet.tasks import Dataset, StepOrigin, draw_round_part, iter_batches, split_batch, step_random
from subfleet.tasks.dataset import Labels
from subfleet.tasks.transforms.augmentation import augment, draw_augmentation
from subfleet.trainers.layouts import COEFFICIENTS, StepLayout
from subfleet.trainers.runtime import Array

_Indices = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.float32]
_Look = Callable[[_Indices, _Mask], Array]
"""Takes indices of a part's samples and its mask; returns the inputs to feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """One run of the program: a batch, or a part of one.

    Attributes:
        origin: the step that it is part of; epochs count from 0.
        fed: values by input name.
        count: labels that count in it.
        batch_count: labels that count in its whole batch.
        ends_batch: whether the optimiser takes its step in it.
        last: whether it is the last call of the training.
    """

    origin: StepOrigin
    fed: Mapping[str, Array]
    count: float
    batch_count: float
    ends_batch: bool
    last: bool


def check_settings(settings: TrainingSettings, layout: StepLayout) -> None:
    """Compare a task's settings with its program.

    Raises:
        ProtocolError: they do not fit each other.
    """
    part_size = settings.micro_batch_size or settings.batch_size
    if part_size != layout.batch_size:
        raise ProtocolError(f"the task's batch size is {part_size}, but its program takes {layout.batch_size}")
    if part_size < settings.batch_size and not layout.accumulates:
        raise ProtocolError(
            f"the task's batches of {settings.batch_size} come in parts of {part_size}, but its program cannot sum "
            "gradients"
        )
    problem = settings.augmentation.problem_with(layout.input.shape[1:])
    if problem is not None:
        raise ProtocolError(f"the task does not fit its program: {problem}")
    accepted = {value.name for value in layout.coefficients}
    for name in COEFFICIENTS:
        if getattr(settings, name) and name not in accepted:
            raise ProtocolError(f"the task's {name} is {getattr(settings, name)}, but its program has no such term")


def compute_constants(
    settings: TrainingSettings, layout: StepLayout, dataset: Dataset, weights: Mapping[str, Array]
) -> dict[str, Array]:
    """Compute the inputs that are the same in every step, by name.

    Args:
        settings: learning rate and coefficients.
        layout: the program's layout.
        dataset: determines the classes that the client holds.
        weights: the weights before the first step, by tensor name.
    """
    values: dict[str, Array] = {layout.learning_rate.name: np.array(settings.learning_rate, np.float32)}
    values |= {value.name: np.array(getattr(settings, value.name), np.float32) for value in layout.coefficients}
    values |= {value.name: weights[value.tensor] for value in (*layout.anchors, *layout.frozen)}
    if layout.class_mask is not None:
        mask = np.zeros(layout.class_mask.shape, np.float32)
        counts = dataset.class_counts()
        mask[: len(counts)] = counts > 0
        values[layout.class_mask.name] = mask
    return values


def make_calls(job: Job[Train | Calibrate], layout: StepLayout, dataset: Dataset) -> Iterator[ProgramCall]:
    """Yield all runs of the program for a job, in order."""
    settings = job.work.settings
    if isinstance(job.work, Train):
        dataset = _take_round_part(job, dataset)
    remaining = settings.step_count(len(dataset))
    epoch = 0
    while remaining:
        look = _make_look(job, dataset, epoch)
        batches = iter_batches(
            len(dataset),
            settings.batch_size,
            seed=settings.seed,
            round_number=job.round,
            client_id=job.client_id,
            epoch=epoch,
        )
        for step, (indices, mask) in enumerate(islice(batches, remaining)):
            remaining -= 1
            origin = StepOrigin(
                seed=settings.seed, round_number=job.round, client_id=job.client_id, epoch=epoch, step=step
            )
            parts = split_batch(indices, mask, layout.batch_size)
            yield from _make_batch_calls(layout, dataset.labels, look, parts, origin, last=not remaining)
        epoch += 1


def make_scoring_batches(
    job: Job[Score], layout: StepLayout, dataset: Dataset
) -> Iterator[Sequence[Mapping[str, Array]]]:
    """Yield the inputs of each scored batch, in parts; no part lets the optimiser take a step.

    The batches are the first ones of the client's epoch 0 in round 0, equally large and without shared samples: they
    are smaller if there are too few samples. Images are not augmented.

    Raises:
        DataError: there are fewer samples than batches.
        ProtocolError: the program does not sum gradients.
    """
    if layout.apply is None:
        raise ProtocolError("the program does not sum gradients, which scores need; export it with accumulate")
    settings, batch_count = job.work.settings, job.work.batches
    size = min(settings.batch_size, len(dataset) // batch_count)
    if size < 1:
        raise DataError(f"{job.data!r} has {len(dataset)} samples, but a score needs at least {batch_count}; use more")
    seed = settings.seed
    batches = iter_batches(len(dataset), size, seed=seed, round_number=0, client_id=job.client_id, epoch=0)
    stay = {layout.apply.name: np.array(0, np.float32)}
    for step, (indices, mask) in enumerate(islice(batches, batch_count)):
        origin = StepOrigin(seed=seed, round_number=0, client_id=job.client_id, epoch=0, step=step)
        parts = split_batch(indices, mask, layout.batch_size)
        calls = _make_batch_calls(layout, dataset.labels, _make_plain_look(dataset), parts, origin, last=False)
        yield [{**call.fed, **stay} for call in calls]


def _take_round_part(job: Job[Train | Calibrate], dataset: Dataset) -> Dataset:
    """Select the samples of a round of training."""
    count = job.work.settings.round_count(len(dataset))
    if count == len(dataset):
        return dataset
    part = draw_round_part(
        len(dataset), count, seed=job.work.settings.seed, round_number=job.round, client_id=job.client_id
    )
    return dataset.take(part)


def _make_look(job: Job[Train | Calibrate], dataset: Dataset, epoch: int) -> _Look:
    """Make the function that reads samples in an epoch, with random augmentation if the task asks for it.

    Samples are not augmented for measuring norms, like the samples of later predictions.
    """
    settings = job.work.settings
    if settings.augmentation.name == "none" or not isinstance(job.work, Train):
        return _make_plain_look(dataset)
    draws = draw_augmentation(
        len(dataset), seed=settings.seed, round_number=job.round, client_id=job.client_id, epoch=epoch
    )

    def look(part: _Indices, mask: _Mask) -> Array:
        images = np.asarray(dataset.inputs[part], np.float32)
        real = mask > 0
        images[real] = augment(images[real], draws[part[real]], settings.augmentation)
        return images

    return look


def _make_plain_look(dataset: Dataset) -> _Look:
    return lambda part, _: dataset.inputs[part]


def _make_batch_calls(
    layout: StepLayout,
    labels: Labels,
    look: _Look,
    batch: Iterable[tuple[_Indices, _Mask]],
    origin: StepOrigin,
    *,
    last: bool,
) -> Iterator[ProgramCall]:
    """Yield the calls of a batch's parts; `last` marks the last batch."""
    parts = list(batch)
    counts = [_count_labels(labels[part], part_mask) for part, part_mask in parts]
    for index, (part, part_mask) in enumerate(parts):
        ends_batch = index == len(parts) - 1
        scalars = {layout.batch_weight: sum(counts), layout.apply: float(ends_batch)}
        # Not bound to a name, so that it is freed before the next call is made.
        yield ProgramCall(
            origin=origin,
            fed={
                layout.input.name: look(part, part_mask),
                layout.label.name: labels[part],
                layout.sample_mask.name: part_mask,
                **_draw_random(layout, origin, index),
                **{value.name: np.array(number, np.float32) for value, number in scalars.items() if value},
            },
            count=counts[index],
            batch_count=sum(counts),
            ends_batch=ends_batch,
            last=ends_batch and last,
        )


def _count_labels(labels: Labels, mask: npt.NDArray[np.float32]) -> float:
    """Count the labels of real samples, without indices below 0."""
    real = labels[mask > 0]
    return float(np.count_nonzero(real >= 0)) if real.dtype == np.int64 else float(real.size)


def _draw_random(layout: StepLayout, origin: StepOrigin, part: int) -> dict[str, Array]:
    return {
        value.name: step_random(value.shape, origin, index=index, part=part)
        for index, value in enumerate(layout.random)
    }


@dataclass(slots=True, kw_only=True)
class Tally:
    """The sums over the steps of one job; loss, correct, squares and count are those of the last epoch.

    Attributes:
        whole: whether they cover all steps: if a job is given in steps, its last epoch may be a single batch.
    """

    whole: bool = False
    step_count: int = 0
    loss_sum: float = 0.0
    correct_sum: float = 0.0
    square_sum: float | None = None
    count_sum: float = 0.0
    train_seconds: float = 0.0
    epoch: int = 0

    def take(self, call: ProgramCall, read: Mapping[str, Array], layout: StepLayout) -> None:
        """Add the outputs of a call.

        Raises:
            DivergedError: its loss is not finite.
        """
        if call.origin.epoch != self.epoch and not self.whole:
            self.epoch = call.origin.epoch
            self.loss_sum = self.correct_sum = self.count_sum = 0.0
            self.square_sum = None
        loss = float(read[layout.loss])
        if not math.isfinite(loss):
            raise DivergedError(f"the loss was {loss} in step {self.step_count + 1}; lower the learning rate")
        self.step_count += call.ends_batch
        count = float(read[layout.count]) if layout.count else call.count
        self.loss_sum += loss * (call.batch_count if layout.accumulates else count)
        self.correct_sum += float(read[layout.correct])
        if layout.squares:
            self.square_sum = (self.square_sum or 0.0) + float(read[layout.squares])
        self.count_sum += count

    def end(self, train_seconds: float) -> None:
        """Set the time of the steps.

        Raises:
            TrainingError: the program counted no label in the last epoch.
        """
        self.train_seconds = train_seconds
        if not self.count_sum > 0:
            raise TrainingError(f"the program counted {self.count_sum:g} labels in all; it must be exported again")

    def result(
        self, *, sample_count: int, measured_peak_bytes: int, operator_examples: OperatorExamples = ()
    ) -> TrainResult:
        """Make the result of the job; call `end` first."""
        return TrainResult(
            sample_count=sample_count,
            step_count=self.step_count,
            loss=self.loss_sum / self.count_sum,
            accuracy=self.correct_sum / self.count_sum,
            measured_peak_bytes=measured_peak_bytes,
            train_seconds=self.train_seconds,
            square_loss=None if self.square_sum is None else self.square_sum / self.count_sum,
            operator_examples=operator_examples,
        )
