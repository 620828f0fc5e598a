"""A round trains on a fraction of a client's samples: the same one in each epoch, another one in each round."""

from dataclasses import replace

import numpy as np
import pytest
from trainers.test_augmented_feeding import COUNT, calibration, image_layout, job, photos

from subfleet.protocol.calibration import NormLayer
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Calibrate, Train
from subfleet.protocol.training import AugmentationSettings, TrainingSettings
from subfleet.trainers.feeding import make_calls

PLAIN = job(AugmentationSettings())


def epoch_samples(task: Job[Train | Calibrate]) -> list[list[int]]:
    """The samples of each epoch."""
    data = replace(photos(), labels=np.arange(COUNT))
    epochs: dict[int, list[int]] = {}
    for call in make_calls(task, image_layout(4), data):
        real = np.asarray(call.fed["mask"], np.float32) > 0
        epochs.setdefault(call.origin.epoch, []).extend(np.asarray(call.fed["labels"])[real].tolist())
    return [sorted(samples) for samples in epochs.values()]


def with_fraction(task: Job[Train], fraction: float) -> Job[Train]:
    return replace(task, work=replace(task.work, settings=replace(task.work.settings, round_fraction=fraction)))


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 11), (0.5, 6), (0.2, 3), (0.01, 1)])
def test_each_epoch_goes_over_the_same_part_of_that_share(fraction: float, count: int) -> None:
    first, second = epoch_samples(with_fraction(PLAIN, fraction))
    assert first == second
    assert len(set(first)) == len(first) == count == TrainingSettings(round_fraction=fraction).round_count(COUNT)


def test_rounds_and_clients_have_different_parts_that_cover_all_samples() -> None:
    rounds = [tuple(epoch_samples(replace(with_fraction(PLAIN, 0.2), round=number))[0]) for number in range(1, 40)]
    assert len(set(rounds)) > 10
    assert {sample for samples in rounds for sample in samples} == set(range(COUNT))
    other = replace(with_fraction(PLAIN, 0.5), client_id="device-2")
    assert epoch_samples(other) != epoch_samples(with_fraction(PLAIN, 0.5))


def test_the_last_call_of_a_part_is_known_as_the_last() -> None:
    calls = list(make_calls(with_fraction(PLAIN, 0.5), image_layout(4), photos()))
    assert [call.last for call in calls] == [False] * (len(calls) - 1) + [True]


def test_norms_are_measured_on_all_samples() -> None:
    """Also when a round trains on a fraction."""
    measuring = calibration(with_fraction(PLAIN, 0.2), NormLayer(name="n", positions=1, momentum=0.1))
    assert epoch_samples(measuring)[0] == list(range(COUNT))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="round_fraction is"):
        TrainingSettings(round_fraction=fraction)
