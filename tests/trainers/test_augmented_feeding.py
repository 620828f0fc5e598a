"""Training images are augmented at random, by the task alone; padding, scores and measured norms are not augmented."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from trainers.recording_program import manifest

from subfleet.protocol.calibration import Calibration, NormLayer
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.task import Calibrate, Score, Train
from subfleet.protocol.training import AugmentationSettings, TrainingSettings
from subfleet.tasks import Dataset
from subfleet.tasks.transforms.augmentation import augment, draw_augmentation
from subfleet.trainers.feeding import check_settings, make_calls, make_scoring_batches
from subfleet.trainers.layouts import StepLayout, read_step_layout

COUNT, SHAPE = 11, (2, 5, 6)
BOTH = AugmentationSettings(name="crop_and_flip", padding=2)
NORM = NormLayer(name="norm", positions=30, momentum=0.1)
Images = npt.NDArray[np.float32]


def photos() -> Dataset:
    images = np.random.default_rng(0).random((COUNT, *SHAPE), np.float32) + 1
    return Dataset(inputs=images, labels=np.arange(COUNT) % 3)


def image_layout(batch_size: int, shape: tuple[int, ...] = SHAPE) -> StepLayout:
    plain = manifest(batch_size, accumulate=True)
    fed = {
        "tokens": ValueInfo(name="tokens", role="input", shape=(batch_size, *shape), dtype="F32"),
        "labels": ValueInfo(name="labels", role="label", shape=(batch_size,), dtype="I64"),
    }
    return read_step_layout(replace(plain, inputs=tuple(fed.get(value.name, value) for value in plain.inputs)))


def job(augmentation: AugmentationSettings = BOTH, **changed: Any) -> Job[Train]:
    settings = TrainingSettings(epochs=2, batch_size=4, augmentation=augmentation, seed=7)
    return Job(
        work=Train(settings=replace(settings, **changed)),
        program_path=Path("program"),
        weights_path=Path("weights"),
        output_path=Path("update"),
        data="data",
        round=3,
        client_id="device-1",
        memory_limit_bytes=2**30,
    )


def fed_images(
    task: Job[Train], part_size: int = 4, data: Dataset | None = None
) -> Iterator[tuple[int, Images, Images]]:
    """The epoch, images and sample mask of each run."""
    for call in make_calls(task, image_layout(part_size), data or photos()):
        yield call.origin.epoch, np.asarray(call.fed["tokens"], np.float32), np.asarray(call.fed["mask"], np.float32)


def calibration(job: Job[Train], norm: NormLayer) -> Job[Calibrate]:
    """A calibration on the data and settings of a training."""
    values = {field.name: getattr(job, field.name) for field in fields(job)}
    work = Calibrate(settings=job.work.settings, calibration=Calibration(norms=(norm,)))
    return Job(**{**values, "work": work})


def augmented_samples(task: Job[Train | Calibrate], part_size: int = 4) -> dict[tuple[int, int], bytes]:
    """The bytes of each sample in each epoch; labels identify the samples."""
    data = replace(photos(), labels=np.arange(COUNT))
    return {
        (call.origin.epoch, int(label)): image.tobytes()
        for call in make_calls(task, image_layout(part_size), data)
        for image, label, real in zip(call.fed["tokens"], call.fed["labels"], call.fed["mask"], strict=True)
        if real
    }


def test_samples_are_augmented_by_their_own_draws_in_each_epoch() -> None:
    images = np.asarray(photos().inputs, np.float32)
    seen = augmented_samples(job())
    for epoch in range(2):
        draws = draw_augmentation(COUNT, seed=7, round_number=3, client_id="device-1", epoch=epoch)
        expected = augment(images, draws, BOTH)
        assert [seen[epoch, sample] for sample in range(COUNT)] == [image.tobytes() for image in expected]


def test_the_same_task_is_fed_the_same_bits_in_parts_of_any_size() -> None:
    whole = augmented_samples(job())
    assert augmented_samples(job()) == whole
    assert augmented_samples(job(), part_size=3) == whole
    assert augmented_samples(job(batch_size=5)) == whole


@pytest.mark.parametrize("changed", [{"round": 4}, {"client_id": "device-2"}])
def test_another_round_or_client_sees_other_images(changed: dict[str, Any]) -> None:
    assert augmented_samples(replace(job(), **changed)) != augmented_samples(job())
    assert augmented_samples(job(seed=8)) != augmented_samples(job())


def test_padding_is_not_augmented_and_the_data_do_not_change() -> None:
    data = photos()
    before = np.asarray(data.inputs, np.float32).copy()
    plain = list(fed_images(job(AugmentationSettings()), data=data))
    augmented = list(fed_images(job(), data=data))
    padded = 0
    for (_, images, mask), (_, plain_images, same_mask) in zip(augmented, plain, strict=True):
        assert np.array_equal(mask, same_mask)
        assert np.array_equal(images[mask == 0], plain_images[mask == 0])
        assert not np.array_equal(images[mask > 0], plain_images[mask > 0])
        padded += int((mask == 0).sum())
    assert padded == 2
    assert np.array_equal(data.inputs, before)


def test_measured_and_scored_samples_are_not_augmented() -> None:
    measuring = calibration(job(), NORM)
    assert augmented_samples(measuring) == augmented_samples(job(AugmentationSettings()))
    task = job()
    score = Job(
        work=Score(settings=task.work.settings, batches=2),
        program_path=task.program_path,
        weights_path=task.weights_path,
        data="data",
        client_id=task.client_id,
        memory_limit_bytes=2**30,
        output_path=Path("unused"),
    )
    images = {image.tobytes() for image in np.asarray(photos().inputs, np.float32)}
    parts = [fed for parts in make_scoring_batches(score, image_layout(4), photos()) for fed in parts]
    assert {np.asarray(image).tobytes() for fed in parts for image in fed["tokens"]} <= images


def test_samples_that_cannot_be_augmented_are_refused_before_a_step() -> None:
    with pytest.raises(ProtocolError, match=r"does not fit its program: augmentation .* needs images"):
        check_settings(job().work.settings, image_layout(4, shape=(6,)))
    with pytest.raises(ProtocolError, match="choose a smaller padding"):
        check_settings(job().work.settings, image_layout(4, shape=(1, 2, 9)))
    check_settings(job().work.settings, image_layout(4))
    check_settings(job(AugmentationSettings()).work.settings, image_layout(4, shape=(6,)))
