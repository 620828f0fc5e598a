"""The inputs of a program and the use of its outputs, by role, with a program that records everything."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainers.array_runtime import ArrayRuntime
from trainers.recording_program import CLASSES, TOKENS, VOCABULARY, WEIGHTS, Recorder, texts, write_recording_job

from subfleet.arrays import decode_arrays, encode_arrays, numpy_dtype
from subfleet.protocol.errors import DataError, MemoryLimitError, ProtocolError, SubfleetError, TrainingError
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.programs import Program
from subfleet.protocol.task import Train
from subfleet.protocol.training import ObjectiveSettings, TrainingSettings
from subfleet.tasks import Dataset, StepOrigin, iter_batches, step_random, write_npz
from subfleet.trainers.job_files import read_program
from subfleet.trainers.kept import Slot
from subfleet.trainers.memory_watch import MemoryWatch
from subfleet.trainers.runtime import RunArrays
from subfleet.trainers.training_job import train_job

SETTINGS = TrainingSettings(
    epochs=2,
    batch_size=4,
    learning_rate=0.05,
    objective=ObjectiveSettings(proximal=True, distillation="mutual"),
    proximal_mu=0.25,
    distillation_weight=0.5,
    seed=5,
)


def train(job: Job[Train], recorder: Recorder) -> TrainResult:
    return train_job(job, lambda: False, target="recording", runtime=ArrayRuntime(recorder.load), host=Slot())


def test_every_step_gets_the_values_of_its_roles(tmp_path: Path) -> None:
    dataset = texts(10)
    job = write_recording_job(tmp_path, dataset, SETTINGS)
    recorder = Recorder()
    train(job, recorder)
    assert recorder.loads == [2]
    expected = [
        (epoch, step, indices, mask)
        for epoch in range(2)
        for step, (indices, mask) in enumerate(
            iter_batches(10, 4, seed=5, round_number=3, client_id="device-1", epoch=epoch)
        )
    ]
    assert len(recorder.runs) == len(expected) == 6
    present_classes = np.isin(np.arange(CLASSES), dataset.labels).astype(np.float32)
    assert present_classes.tolist() == [1, 1, 1, 1, 0]
    for inputs, (epoch, step, indices, mask) in zip(recorder.runs, expected, strict=True):
        origin = StepOrigin(seed=5, round_number=3, client_id="device-1", epoch=epoch, step=step)
        assert inputs["tokens"].dtype == inputs["labels"].dtype == np.int64
        assert inputs["tokens"].tolist() == dataset.inputs[indices].tolist()
        assert inputs["labels"].tolist() == dataset.labels[indices].tolist()
        assert inputs["mask"].tolist() == mask.tolist()
        assert inputs["random.0"].tolist() == step_random((4, 4), origin).tolist()
        assert inputs["random.1"].tolist() == step_random((2,), origin, index=1).tolist()
        assert inputs["classes"].tolist() == present_classes.tolist()
        assert (inputs["rate"], inputs["proximal_mu"], inputs["distillation_weight"]) == (np.float32(0.05), 0.25, 0.5)
        assert inputs["first"].tolist() == np.asarray(WEIGHTS["w"]).tolist()


def test_weights_buffers_and_states_are_carried_and_the_first_two_are_sent(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    recorder = Recorder()
    train(job, recorder)
    first, second = recorder.runs[:2]
    assert first["w"].tolist() == [1, 2]
    assert first["mean"].tolist() == [0.5]
    assert (first["steps"], first["velocity"].tolist()) == (0, [0, 0])
    assert (second["steps"], recorder.runs[-1]["steps"]) == (1, 5)
    assert second["velocity"].any()
    assert second["w"].tolist() != first["w"].tolist()
    longer = Recorder()
    # One more step sees the values of the last step.
    train(replace(job, work=replace(job.work, settings=replace(SETTINGS, epochs=3))), longer)
    update = decode_arrays(job.output_path.read_bytes())
    train(job, recorder)
    update = decode_arrays(job.output_path.read_bytes())
    assert set(update) == {"w", "mean"}
    for name, start in WEIGHTS.items():
        expected = np.asarray(longer.runs[6][name], np.float32) - np.asarray(start, np.float32)
        assert update[name].tolist() == expected.tolist()
        assert update[name].any()


def test_loss_and_accuracy_are_over_the_labels_that_count_in_the_last_epoch(tmp_path: Path) -> None:
    dataset = texts(10)
    recorder = Recorder()
    result = train(write_recording_job(tmp_path, dataset, SETTINGS), recorder)
    counted = dataset.labels >= 0
    assert 10 < counted.sum() < counted.size
    assert result.loss == pytest.approx(np.mean(dataset.inputs[counted]), rel=1e-6)
    correct = sum(int((inputs["labels"][inputs["mask"] > 0] == 1).sum()) for inputs in recorder.runs[3:])
    assert result.accuracy == pytest.approx(correct / counted.sum())
    assert (result.sample_count, result.step_count) == (10, 6)


@pytest.mark.parametrize(("count", "part"), [(10, 1), (10, 2), (10, 3), (8, 2), (9, 2), (1, 2)])
def test_parts_of_batches_train_as_whole_ones(tmp_path: Path, count: int, part: int) -> None:
    dataset = texts(count)
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    whole, parts = Recorder(), Recorder()
    settings = replace(SETTINGS, micro_batch_size=part)
    first = write_recording_job(folders[0], dataset, SETTINGS)
    second = write_recording_job(folders[1], dataset, settings, batch_size=part, accumulate=True)
    results = [train(first, whole), train(second, parts)]
    assert len(parts.runs) == 2 * sum(-(-size // part) for size in [4] * (count // 4) + [count % 4] * (count % 4 > 0))
    assert all(inputs["mask"].any() for inputs in parts.runs)
    assert results[0].step_count == results[1].step_count == sum(inputs["apply"] == 1 for inputs in parts.runs)
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5)
    assert results[1].accuracy == pytest.approx(results[0].accuracy)
    change, other = (decode_arrays((folder / "update").read_bytes())["w"] for folder in folders)
    assert np.asarray(other, np.float64) == pytest.approx(np.asarray(change, np.float64), rel=1e-4)
    weights = [inputs["weight"] for inputs in parts.runs if inputs["apply"] == 1]
    assert weights == [(inputs["labels"][inputs["mask"] > 0] >= 0).sum() for inputs in whole.runs]
    if 4 % part == 0 and count % 4 == 0:
        random_numbers = np.concatenate([inputs["random.0"] for inputs in parts.runs])
        assert random_numbers.tolist() == np.concatenate([inputs["random.0"] for inputs in whole.runs]).tolist()


@pytest.mark.parametrize("part", [0, 2])
def test_an_error_of_an_infinite_loss_names_the_step(tmp_path: Path, part: int) -> None:
    class Diverging(Recorder):
        def load(self, program: Program, threads: int) -> RunArrays:
            run = super().load(program, threads)
            return lambda values: {**run(values), "loss": np.float32(np.nan if self.runs[2:] else 1.0)}

    settings = replace(SETTINGS, micro_batch_size=part)
    job = write_recording_job(tmp_path, texts(20), settings, batch_size=part, accumulate=part > 0)
    step = 2 if part else 3  # the third run is the first part of the second batch, or the third batch
    with pytest.raises(TrainingError, match=f"the loss was nan in step {step}; lower the learning rate"):
        train(job, Diverging())
    assert not job.output_path.exists()


def test_a_learning_rate_of_0_still_moves_running_statistics(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(5), replace(SETTINGS, learning_rate=0.0))
    train(job, Recorder())
    update = decode_arrays(job.output_path.read_bytes())
    assert not update["w"].any()
    assert update["mean"].any()


def _data(inputs: object, labels: object) -> Callable[[Job[Train]], Job[Train]]:
    def write(job: Job[Train]) -> Job[Train]:
        write_npz(Path(job.data), Dataset(inputs=np.array(inputs), labels=np.array(labels)))
        return job

    return write


def _weights(**weights: object) -> Callable[[Job[Train]], Job[Train]]:
    def write(job: Job[Train]) -> Job[Train]:
        job.weights_path.write_bytes(encode_arrays({name: np.array(w, np.float32) for name, w in weights.items()}))
        return job

    return write


def _settings(**changes: object) -> Callable[[Job[Train]], Job[Train]]:
    return lambda job: replace(job, work=replace(job.work, settings=replace(job.work.settings, **changes)))  # type: ignore[arg-type] # fields of TrainingSettings


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (_data([[0] * TOKENS], [[CLASSES] * TOKENS]), DataError, "a label .* is 5, but must be below 5"),
        (_data([[VOCABULARY] * TOKENS], [[0] * TOKENS]), DataError, "samples .* go up to 7, .* indices below 7"),
        (_data([[0] * TOKENS], [0]), DataError, r"labels .* the shape \(\) .* takes \(3,\)"),
        (
            _data(np.zeros((1, TOKENS), np.int64), np.zeros((1, TOKENS), np.float32)),
            DataError,
            "are floating point numbers, but the model takes",
        ),
        (_data(np.zeros((1, TOKENS), np.float32), np.zeros((1, TOKENS), np.int64)), DataError, "samples .* are F32"),
        (_weights(w=[1, 2]), ProtocolError, "first 'mean'"),
        (_weights(w=[1, 2], mean=[1, 2]), ProtocolError, "'mean' of the weights"),
        (_settings(batch_size=5), ProtocolError, "batch size is 5, but its program takes 4"),
        (_settings(micro_batch_size=2), ProtocolError, "batch size is 2, but its program takes 4"),
        (_settings(batch_size=8, micro_batch_size=4), ProtocolError, "cannot sum gradients"),
    ],
)
def test_inputs_that_do_not_fit_the_program_are_refused_before_a_step(
    tmp_path: Path, spoil: Callable[[Job[Train]], Job[Train]], error: type[SubfleetError], text: str
) -> None:
    recorder = Recorder()
    with pytest.raises(error, match=text):
        train(spoil(write_recording_job(tmp_path, texts(5), SETTINGS)), recorder)
    assert not recorder.runs
    assert not (tmp_path / "update").exists()


def test_a_program_is_loaded_within_a_limit_of_just_its_values_and_not_of_one_byte_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process of the tests grows by a page of memory at any time, which is more than these values.
    monkeypatch.setattr(MemoryWatch, "check", lambda _: None)
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    values = read_program(job.program_path, "recording").manifest.inputs
    least_bytes = sum(math.prod(value.shape) * numpy_dtype(value.dtype).itemsize for value in values)
    recorder = Recorder()
    with pytest.raises(MemoryLimitError) as caught:
        train(replace(job, memory_limit_bytes=least_bytes - 1), recorder)
    assert (caught.value.needed_bytes, recorder.loads) == (least_bytes, [])
    with suppress(MemoryLimitError):  # training takes more than its values
        train(replace(job, memory_limit_bytes=least_bytes), recorder)
    assert recorder.loads == [2]
