"""Training may be set in steps: the same number for clients with few samples and with many."""

import math
from dataclasses import replace

import numpy as np
import pytest
from trainers.test_augmented_feeding import COUNT, image_layout, job, photos

from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Train
from subfleet.protocol.training import AugmentationSettings, TrainingSettings
from subfleet.trainers.feeding import ProgramCall, make_calls

PER_EPOCH = math.ceil(COUNT / 4)


def task(**settings: float) -> Job[Train]:
    plain = job(AugmentationSettings())
    changed = replace(plain.work.settings, **{"epochs": 1, **settings})  # type: ignore[arg-type]
    return replace(plain, work=replace(plain.work, settings=changed))


def calls(training: Job[Train]) -> list[ProgramCall]:
    return list(make_calls(training, image_layout(4), photos()))


@pytest.mark.parametrize("steps", [1, 2, PER_EPOCH, PER_EPOCH + 1, 3 * PER_EPOCH + 2])
def test_steps_equal_the_first_steps_of_epochs(steps: int) -> None:
    actual, epochs = calls(task(local_steps=steps)), calls(task(epochs=4))
    assert len(actual) == steps
    assert [call.last for call in actual] == [False] * (steps - 1) + [True]
    for step, expected in zip(actual, epochs, strict=False):
        assert step.origin == expected.origin
        assert all(np.array_equal(step.fed[name], expected.fed[name]) for name in step.fed)


@pytest.mark.parametrize("steps", [1, PER_EPOCH, PER_EPOCH + 2])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_samples_are_counted_as_often_as_they_are_trained_on(steps: int, fraction: float) -> None:
    training = task(local_steps=steps, round_fraction=fraction)
    sample_passes = sum(float(np.sum(call.fed["mask"])) for call in calls(training))
    assert training.work.settings.sample_passes(COUNT) == sample_passes
    assert training.work.settings.passes_over(0) == 0
    assert TrainingSettings(epochs=3, round_fraction=fraction).sample_passes(COUNT) == 3 * math.ceil(fraction * COUNT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": -1}, "local_steps is -1, but must be 0 or more"),
        ({"local_steps": 20, "epochs": 2}, "set epochs = 1, or local_steps = 0"),
    ],
)
def test_steps_and_epochs_together_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**settings)  # type: ignore[arg-type]
