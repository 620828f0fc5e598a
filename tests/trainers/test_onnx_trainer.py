import errno
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from trainers.softmax_program import BATCH, CLASSES, FEATURES, MOMENTUM, SHAPE, program, samples, weights, write_job

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.protocol.errors import (
    DataError,
    FileError,
    LoadError,
    MemoryLimitError,
    NoRoomError,
    ProtocolError,
    SubfleetError,
    TrainingError,
)
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import Program, ValueInfo, encode_program
from subfleet.protocol.task import Train
from subfleet.protocol.training import ObjectiveSettings, TrainingSettings
from subfleet.tasks import Dataset, iter_batches, split_batch, write_npz
from subfleet.trainers import feeding
from subfleet.trainers.onnx import OnnxTrainer
from subfleet.trainers.program_layout import Path as ProgramPath
from subfleet.trainers.program_session import ProgramSession

SETTINGS = TrainingSettings(epochs=3, batch_size=BATCH, learning_rate=0.1, seed=5)


def never() -> bool:
    return False


def read_change(job: Job[Train]) -> dict[str, npt.NDArray[np.generic]]:
    return decode_arrays(job.output_path.read_bytes())


def reference(dataset: Dataset, job: Job[Train]) -> tuple[dict[str, npt.NDArray[np.float64]], float, float]:
    """The same training in float64, with a smaller last batch; also the last epoch's loss and accuracy."""
    start = {name: array.astype(np.float64) for name, array in weights().items()}
    new = {name: array.copy() for name, array in start.items()}
    momentum = {name: np.zeros_like(array) for name, array in new.items()}
    losses: list[float] = []
    correct = 0
    for epoch in range(job.work.settings.epochs):
        losses, correct = [], 0
        for indices, mask in iter_batches(
            len(dataset),
            BATCH,
            seed=job.work.settings.seed,
            round_number=job.round,
            client_id=job.client_id,
            epoch=epoch,
        ):
            real = indices[mask == 1]
            x, y = dataset.inputs[real].reshape(-1, FEATURES).astype(np.float64), dataset.labels[real]
            logits = x @ new["head.weight"] + new["head.bias"]
            probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            losses.extend(-np.log(probabilities[np.arange(len(y)), y]))
            correct += int((logits.argmax(1) == y).sum())
            errors = (probabilities - np.eye(CLASSES)[y]) / len(y)
            for name, gradient in (("head.weight", x.T @ errors), ("head.bias", errors.sum(0))):
                momentum[name] = MOMENTUM * momentum[name] + gradient
                new[name] = new[name] - job.work.settings.learning_rate * momentum[name]
    return {name: new[name] - start[name] for name in new}, float(np.mean(losses)), correct / len(dataset)


@pytest.mark.parametrize("count", [BATCH * 3, BATCH * 3 + 1, BATCH * 4 - 1, 1])
def test_training_equals_a_reference_on_true_batches(tmp_path: Path, count: int) -> None:
    dataset = samples(count)
    job = write_job(tmp_path, dataset, settings=SETTINGS)
    result = OnnxTrainer().train(job, never)
    expected, loss, accuracy = reference(dataset, job)
    actual = read_change(job)
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert np.abs(np.asarray(actual[name], np.float64) - array).max() < 2e-6
        assert np.abs(array).max() > 1e-3
    assert result.loss == pytest.approx(loss, abs=1e-6)
    assert result.accuracy == pytest.approx(accuracy, abs=1e-6)
    assert (result.sample_count, result.step_count) == (count, SETTINGS.epochs * -(-count // BATCH))
    assert result.train_seconds > 0


def test_learning_rate_0_gives_a_change_of_exact_zeros(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(20), settings=replace(SETTINGS, learning_rate=0.0))
    OnnxTrainer().train(job, never)
    for array in read_change(job).values():
        assert not array.any()


def test_training_a_round_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(21), settings=SETTINGS)
    trainer = OnnxTrainer()
    digests = set()
    for _ in range(3):
        trainer.train(job, never)
        digests.add(hashlib.sha256(job.output_path.read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize(
    "altered",
    [
        lambda job: replace(job, round=job.round + 1),
        lambda job: replace(job, client_id="device-2"),
        lambda job: replace(job, work=replace(job.work, settings=replace(job.work.settings, seed=6))),
    ],
)
def test_another_round_client_or_seed_gives_another_order(
    tmp_path: Path, altered: Callable[[Job[Train]], Job[Train]]
) -> None:
    job = write_job(tmp_path, samples(21), settings=SETTINGS)
    OnnxTrainer().train(job, never)
    first = job.output_path.read_bytes()
    OnnxTrainer().train(altered(job), never)
    assert job.output_path.read_bytes() != first


@pytest.mark.parametrize("shape", [SHAPE, (1, *SHAPE), (FEATURES,)])
def test_samples_are_fed_in_the_programs_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """An array (samples, time, features) is read as images of one channel, and vectors as vectors."""
    dataset, changes = samples(BATCH + 3), []
    job = write_job(tmp_path, dataset, settings=SETTINGS)
    for inputs in (dataset.inputs, dataset.inputs.reshape(-1, *shape)):
        OnnxTrainer().train(job, never)
        changes.append(job.output_path.read_bytes())
        np.savez(tmp_path / "data.npz", x=inputs, y=dataset.labels)
    OnnxTrainer().train(job, never)
    assert {*changes, job.output_path.read_bytes()} == {changes[0]}


def test_stopping_ends_between_steps_and_writes_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(40), settings=SETTINGS)
    answers = iter([False, False, True])
    with pytest.raises(TrainingError, match="stopped after 2 steps"):
        OnnxTrainer().train(job, lambda: next(answers))
    assert not job.output_path.exists()


def test_growth_beyond_the_limit_stops_training(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(40), settings=SETTINGS)
    with pytest.raises(MemoryLimitError) as caught:
        OnnxTrainer().train(replace(job, memory_limit_bytes=0, output_path=tmp_path / "other"), never)
    assert caught.value.needed_bytes > caught.value.limit_bytes == 0
    assert not (tmp_path / "other").exists()


def test_a_large_manifest_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(40), settings=SETTINGS)
    original = program()
    shape = (2**40, 2**20)

    def enlarge(values: tuple[ValueInfo, ...]) -> tuple[ValueInfo, ...]:
        return tuple(replace(value, shape=shape) if value.role == "optimiser_state" else value for value in values)

    manifest = replace(
        original.manifest, inputs=enlarge(original.manifest.inputs), outputs=enlarge(original.manifest.outputs)
    )
    job.program_path.write_bytes(encode_program(replace(original, manifest=manifest)))
    with pytest.raises(MemoryLimitError) as caught:
        OnnxTrainer().train(job, never)
    assert caught.value.needed_bytes > 2**60


def test_values_that_are_not_finite_are_no_update(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(40), settings=replace(SETTINGS, learning_rate=3e38))
    with pytest.raises(TrainingError, match="lower the learning rate"):
        OnnxTrainer().train(job, never)
    assert not job.output_path.exists()


def _without_state(job: Job[Train]) -> None:
    plain = program()
    outputs = tuple(value for value in plain.manifest.outputs if value.name != "bias_momentum_new")
    changed = Program(manifest=replace(plain.manifest, outputs=outputs), body=plain.body)
    job.program_path.write_bytes(encode_program(changed))


def _with_target(job: Job[Train]) -> None:
    plain = program()
    changed = Program(manifest=replace(plain.manifest, target="executorch"), body=plain.body)
    job.program_path.write_bytes(encode_program(changed))


def _with_body(job: Job[Train]) -> None:
    job.program_path.write_bytes(encode_program(Program(manifest=program().manifest, body=b"no model")))


def _with_weights(**changed: npt.NDArray[np.generic]) -> Callable[[Job[Train]], None]:
    def write(job: Job[Train]) -> None:
        names = {name.replace("_", "."): array for name, array in changed.items()}
        job.weights_path.write_bytes(encode_arrays({**weights(), **names}))

    return write


def _with_samples(*shape: int) -> Callable[[Job[Train]], None]:
    def write(job: Job[Train]) -> None:
        write_npz(Path(job.data), Dataset(inputs=np.zeros((4, *shape), np.float32), labels=np.zeros(4, np.int64)))

    return write


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (_without_state, ProtocolError, "must return every parameter"),
        (_with_target, ProtocolError, "must be 'onnx'"),
        (_with_body, LoadError, "is not an ONNX model"),
        (_with_weights(head_extra=np.zeros(1, np.float32)), ProtocolError, "first 'head.extra'"),
        (_with_weights(head_bias=np.zeros(CLASSES + 1, np.float32)), ProtocolError, "of shape"),
        (_with_weights(head_bias=np.zeros(CLASSES, np.float64)), ProtocolError, "float64"),
        (_with_samples(3, 2), DataError, "but the model takes"),
        (_with_samples(2, 4), DataError, "but the model takes"),
        (lambda job: job.weights_path.write_bytes(b"x" * 30), ProtocolError, "header"),
        (lambda job: job.weights_path.unlink(), FileError, "cannot be read"),
        (lambda job: job.program_path.unlink(), FileError, "cannot be read"),
        (lambda job: Path(job.data).unlink(), DataError, "cannot be opened"),
        (lambda job: job.output_path.mkdir(), FileError, "cannot be written"),
    ],
)
def test_errors_of_invalid_files_are_one_sentence(
    tmp_path: Path, spoil: Callable[[Job[Train]], None], error: type[SubfleetError], text: str
) -> None:
    job = write_job(tmp_path, samples(9), settings=SETTINGS)
    spoil(job)
    with pytest.raises(error, match=text) as caught:
        OnnxTrainer().train(job, never)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NoRoomError), (errno.EIO, FileError)])
def test_a_full_disk_has_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[FileError]
) -> None:
    def sync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    job = write_job(tmp_path, samples(BATCH), settings=SETTINGS)
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(FileError, match=f"cannot be written .{os.strerror(number)}") as raised:
        OnnxTrainer().train(job, never)
    assert raised.type is kind
    assert not [path for path in tmp_path.iterdir() if "update" in path.name]


def test_a_task_of_another_batch_size_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(9), settings=replace(SETTINGS, batch_size=BATCH + 1))
    with pytest.raises(ProtocolError, match="batch size is 9, but its program takes 8"):
        OnnxTrainer().train(job, never)


def test_a_term_that_the_program_lacks_is_refused(tmp_path: Path) -> None:
    objective = ObjectiveSettings(proximal=True)
    job = write_job(tmp_path, samples(9), settings=replace(SETTINGS, proximal_mu=0.5, objective=objective))
    with pytest.raises(ProtocolError, match=r"proximal_mu is 0\.5, but its program has no such term"):
        OnnxTrainer().train(job, never)


def test_describe_tells_counts_and_shapes(tmp_path: Path) -> None:
    dataset = Dataset(inputs=np.zeros((3, *SHAPE), np.float32), labels=np.array([2, 0, 2], np.int64))
    write_npz(tmp_path / "data.npz", dataset)
    summary = OnnxTrainer().describe(str(tmp_path / "data.npz"))
    assert (summary.sample_count, summary.input_shape, summary.class_counts) == (3, SHAPE, (1, 0, 2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ir_version": 99}, r"that onnx 9\.9, torch 8\.8 wrote: it is of ONNX IR version 99, .* reads \d\d at most"),
        ({"opset": 99}, r"ONNX Runtime \d+\.\d+\.\d+ refused .* of ONNX opset 99, .* reads \d\d at most"),
        ({"operator": "NoSuchOperator"}, "NoSuchOperator"),
    ],
)
def test_a_program_of_another_toolchain_names_both_versions(
    tmp_path: Path, change: dict[str, object], text: str
) -> None:
    job = write_job(tmp_path, samples(9), settings=SETTINGS)
    original = program()
    model = onnx.load_from_string(bytes(original.body))
    model.ir_version = change.get("ir_version", model.ir_version)
    model.opset_import[0].version = change.get("opset", 20)
    model.graph.node[0].op_type = change.get("operator", model.graph.node[0].op_type)
    versions = {"torch": "8.8", "onnx": "9.9"}
    changed = Program(manifest=replace(original.manifest, versions=versions), body=model.SerializeToString())
    job.program_path.write_bytes(encode_program(changed))
    with pytest.raises(LoadError, match=text) as caught:
        OnnxTrainer().train(job, never)
    assert "\n" not in str(caught.value)
    assert "onnxruntime_src" not in str(caught.value)


def test_a_program_that_contradicts_its_manifest_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(9), settings=SETTINGS)
    original = program()

    def widen(values: tuple[ValueInfo, ...]) -> tuple[ValueInfo, ...]:
        shape = (FEATURES + 1, CLASSES)
        return tuple(replace(value, shape=shape) if value.tensor == "head.weight" else value for value in values)

    manifest = replace(
        original.manifest, inputs=widen(original.manifest.inputs), outputs=widen(original.manifest.outputs)
    )
    job.program_path.write_bytes(encode_program(replace(original, manifest=manifest)))
    with pytest.raises(LoadError, match=r"inputs differ from its manifest, first in .*weight"):
        OnnxTrainer().train(job, never)


@pytest.mark.slow
def test_a_damaged_program_is_an_error_or_still_trains(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples(9), settings=SETTINGS)
    original = program()
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        body = bytearray(original.body)
        body[generator.integers(len(body))] ^= int(generator.integers(1, 256))
        job.program_path.write_bytes(encode_program(replace(original, body=bytes(body))))
        try:
            OnnxTrainer().train(job, never)
        except TrainingError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("threads", [1, 3])
def test_a_session_runs_on_the_threads_that_the_job_names(tmp_path: Path, threads: int) -> None:
    job = write_job(tmp_path, samples(9), settings=SETTINGS)
    trainer = OnnxTrainer()
    trainer.describe(job.data)
    before = len(list(Path("/proc/self/task").iterdir()))
    trainer.train(replace(job, threads=threads), never)
    # The session is kept with its pool, which includes the calling thread.
    assert len(list(Path("/proc/self/task").iterdir())) - before == threads - 1


def test_inputs_of_a_step_are_freed_before_the_next_ones_are_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan counts the memory of two batches at once."""
    last_inputs: list[weakref.ref[Any]] = []
    alive: list[int] = []
    step, split = ProgramSession.step, split_batch

    def watch_step(
        session: ProgramSession, path: ProgramPath, inputs: Mapping[str, Any], **settings: Any
    ) -> Mapping[str, Any]:
        last_inputs[:] = [weakref.ref(array) for array in inputs.values()]
        return step(session, path, inputs, **settings)

    def count_alive(*arguments: Any) -> Any:
        alive.append(sum(array() is not None for array in last_inputs))
        return split(*arguments)

    monkeypatch.setattr(ProgramSession, "step", watch_step)
    monkeypatch.setattr(feeding, "split_batch", count_alive)
    OnnxTrainer().train(write_job(tmp_path, samples(BATCH * 3), settings=SETTINGS), never)
    assert len(alive) == 3 * SETTINGS.epochs
    assert not any(alive)
