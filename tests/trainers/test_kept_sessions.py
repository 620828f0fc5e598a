"""A session is kept for the next job with the same program, and its memory is counted."""

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from trainers.array_runtime import ArrayRuntime
from trainers.recording_program import Recorder, manifest, texts, write_recording_job
from trainers.softmax_program import BATCH, program, samples, weights, write_job

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.device_profiles.process_memory import release_free_memory
from subfleet.protocol.errors import FileError, MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
from subfleet.trainers.kept import Slot
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.memory_watch import MemoryWatch
from subfleet.trainers.onnx import OnnxTrainer
from subfleet.trainers.prediction import Model
from subfleet.trainers.program_layout import read_layout
from subfleet.trainers.runtime import Operands, RunProgram, Value
from subfleet.trainers.training_job import train_job

MEBIBYTE = 2**20
Array = npt.NDArray[np.generic]
SETTINGS = TrainingSettings(epochs=1, batch_size=4, learning_rate=0.05, seed=5)
ONNX_SETTINGS = TrainingSettings(epochs=2, batch_size=BATCH, learning_rate=0.1, seed=5)


@dataclass
class Bench:
    """A trainer's slot and the programs that it loaded."""

    recorder: Recorder = field(default_factory=Recorder)
    slot: Slot = field(default_factory=Slot)

    def train(self, job: Job[Train], *, stopped: bool = False) -> TrainResult:
        runtime = ArrayRuntime(self.recorder.load)
        return train_job(job, lambda: stopped, target="recording", runtime=runtime, host=self.slot)


def test_the_next_job_of_the_same_program_swaps_its_weights_in(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    bench = Bench()
    bench.train(job)
    first = job.output_path.read_bytes()
    job.weights_path.write_bytes(encode_arrays({"w": np.array([5, -5], np.float32), "mean": np.ones(1, np.float32)}))
    bench.train(replace(job, output_path=tmp_path / "kept"))
    fresh = Bench()
    fresh.train(replace(job, output_path=tmp_path / "fresh"))
    assert (bench.recorder.loads, fresh.recorder.loads) == ([2], [2])
    assert (tmp_path / "kept").read_bytes() == (tmp_path / "fresh").read_bytes() != first


def test_another_program_or_other_threads_replace_it(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    other = replace(job, program_path=tmp_path / "other")
    other.program_path.write_bytes(encode_program(Program(manifest=manifest(4, name="other"), body=b"-")))
    bench = Bench()
    for next_job in (job, other, job, replace(job, threads=1), replace(job, threads=1)):
        bench.train(next_job)
    assert bench.recorder.loads == [2, 2, 2, 1]


def test_a_file_that_changed_is_no_longer_the_program_that_was_kept(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    bench = Bench()
    bench.train(job)
    content = job.program_path.read_bytes()
    job.program_path.write_bytes(content[:-40])
    with pytest.raises(ProtocolError):
        bench.train(job)
    job.program_path.unlink()
    with pytest.raises(FileError, match="must be fetched again"):
        bench.train(job)
    job.program_path.write_bytes(content)
    bench.train(job)  # the restored file is the kept program
    assert bench.recorder.loads == [2]


def test_a_job_that_failed_keeps_nothing(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    bench = Bench()
    bench.train(job)
    with pytest.raises(TrainingError, match="stopped"):
        bench.train(job, stopped=True)
    assert bench.slot.held_bytes == 0
    bench.train(job)
    with pytest.raises(MemoryLimitError):
        bench.train(replace(job, memory_limit_bytes=0))
    bench.train(job)
    assert bench.recorder.loads == [2, 2, 2]


@dataclass
class Hoarder:
    """A runtime with programs that hold memory while they are loaded."""

    size_bytes: int
    created: list["weakref.ref[Hoard]"]
    name: str = "hoarder"

    def programs(self, threads: int) -> "Hoard":
        hoard = Hoard(np.ones(self.size_bytes, np.uint8))
        self.created.append(weakref.ref(hoard))
        return hoard

    def open_model(self, path: Path, body: bytes, threads: int) -> Model:
        raise NotImplementedError


@dataclass(eq=False)
class Hoard:
    """See `Programs`: these change nothing."""

    held: npt.NDArray[np.uint8]

    def open(self, package: Program) -> Callable[[str], RunProgram]:
        outputs = [value.name for value in package.manifest.outputs]

        def run(operands: Operands, fed: Mapping[str, Value], *, last: bool = False) -> Mapping[str, Value]:
            return {name: operands.spare.get(name, np.ones((), np.float32)) for name in outputs}

        return lambda _: run

    def hold(self, array: Array) -> Array:
        return array

    def twin(self, value: Array) -> Array:
        return value

    def array(self, value: Array) -> Array:
        return value


def hoard(job: Job[Train], slot: Slot, created: list["weakref.ref[Hoard]"], size_bytes: int) -> TrainResult:
    return train_job(job, lambda: False, target="recording", runtime=Hoarder(size_bytes, created), host=slot)


def loaded() -> Loaded:
    layout, programs = read_layout(manifest(4)), Hoard(np.ones(1, np.uint8))
    return Loaded(sha256="a", target="recording", threads=1, layout=layout, programs=programs)


@pytest.mark.slow
def test_memory_of_a_kept_session_is_known_and_counts_as_growth(tmp_path: Path) -> None:
    size_bytes = 64 * MEBIBYTE
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    slot, created = Slot(), []  # type: ignore[var-annotated] # see `hoard`
    first = hoard(job, slot, created, size_bytes)
    # The system allots whole pages, some were spare, and pages of files, which only the peak counts, may be dropped.
    assert 0.95 * size_bytes < slot.held_bytes <= first.measured_peak_bytes + 0.01 * size_bytes
    assert 0.95 * size_bytes < first.measured_peak_bytes < 1.25 * size_bytes
    second = hoard(job, slot, created, size_bytes)
    assert len(created) == 1
    assert 0.95 * size_bytes < second.measured_peak_bytes < 1.25 * size_bytes
    # A budget that was enough is still enough, and one that was too small is refused again.
    with pytest.raises(MemoryLimitError):
        hoard(replace(job, memory_limit_bytes=size_bytes // 2), slot, created, size_bytes)
    assert slot.held_bytes == 0
    gc.collect()
    assert created[0]() is None


def test_memory_of_a_session_is_counted_in_the_job_that_loaded_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    slot, created = Slot(), []  # type: ignore[var-annotated] # see `hoard`
    counted = iter((1000, 1500, 2000, 3000))
    monkeypatch.setattr(MemoryWatch, "measure_held_bytes", lambda _: next(counted))
    held_bytes = []
    for next_job in (job, job, job, replace(job, threads=1)):
        hoard(next_job, slot, created, MEBIBYTE)
        held_bytes.append(slot.held_bytes)
    # Other memory that a job leaves may be freed with the job; counting it each time would add it up.
    assert held_bytes == [1000, 1000, 1000, 1500]


def test_a_session_that_holds_much_of_its_limit_is_not_kept(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    slot, created = Slot(), []  # type: ignore[var-annotated] # see `hoard`
    before = MemoryWatch(2**40)
    hoard(replace(job, memory_limit_bytes=160 * MEBIBYTE), slot, created, 64 * MEBIBYTE)
    assert slot.held_bytes == 0
    release_free_memory()
    assert before.measure_held_bytes() < 16 * MEBIBYTE
    assert created[0]() is None


def test_an_old_session_is_gone_before_the_next_one_is_measured(tmp_path: Path) -> None:
    job = write_recording_job(tmp_path, texts(10), SETTINGS)
    slot, created = Slot(), []  # type: ignore[var-annotated] # see `hoard`
    hoard(job, slot, created, 64 * MEBIBYTE)
    small = hoard(replace(job, threads=1), slot, created, MEBIBYTE)
    assert created[0]() is None
    assert small.measured_peak_bytes < 16 * MEBIBYTE
    assert slot.held_bytes < 16 * MEBIBYTE


def test_onnx_runtime_keeps_its_session_and_trains_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    sizes: list[object] = []
    original = onnxruntime.InferenceSession

    def session(model: bytes, *arguments: object, **named: object) -> object:
        sizes.append(len(model))
        return original(model, *arguments, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    job = write_job(tmp_path, samples(20), settings=ONNX_SETTINGS)
    size = len(program().body)
    trainer = OnnxTrainer()
    trainer.train(job, lambda: False)
    first = job.output_path.read_bytes()
    job.weights_path.write_bytes(encode_arrays(weights(seed=7)))
    trainer.train(job, lambda: False)
    second = job.output_path.read_bytes()
    assert sizes.count(size) == 1
    OnnxTrainer().train(job, lambda: False)
    assert sizes.count(size) == 2
    assert job.output_path.read_bytes() == second != first
    # Results do not change when the session continues: no value of an update shares its memory.
    assert decode_arrays(second)["head.bias"].any()


def test_a_layout_is_kept_with_its_programs() -> None:
    slot, package = Slot(), loaded()
    slot.keep(package, held_bytes=5, limit_bytes=20)
    assert slot.held_bytes == 5
    session = slot.take("a", 1)
    assert session is not None
    assert session.loaded is package
    assert slot.take("a", 1) is None


@pytest.mark.parametrize(("held_bytes", "is_kept"), [(5, True), (6, False)])
def test_a_session_is_kept_that_holds_a_quarter_of_the_limit_and_no_byte_more(held_bytes: int, is_kept: bool) -> None:
    slot = Slot()
    slot.keep(loaded(), held_bytes=held_bytes, limit_bytes=20)
    assert (slot.held_bytes, slot.take("a", 1) is not None) == (held_bytes if is_kept else 0, is_kept)
