"""The agent's folder: saved state survives a crash, only one agent uses it, and no file is written outside it."""

import errno
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent.agent_cases import RESULT, announce, blob, deploy_task, score_task, train_task

from subfleet.agent.outcomes import ScoringEnded, WorkFailed
from subfleet.agent.states import Saved
from subfleet.edge_client.store import KEPT_RUNS, AgentStore
from subfleet.edge_client.task_work import TrainingOutput
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.errors import DataError, FileError, MemoryLimitError, ProtocolError
from subfleet.protocol.jobs import Job, Trainer, TrainResult
from subfleet.protocol.messages import Deployed, Refusal, Task, Update
from subfleet.protocol.task import Score, Train

SAVED = Saved(
    round=announce(2, "train"),
    task=train_task(),
    updates=(
        Update(
            task_id="t0", run_id="run", round=1, client_id="pi", blob=blob("u"), sample_count=1, step_count=1, loss=0.1,
            accuracy=1.0, measured_peak_bytes=0, train_seconds=0.1, seconds=0.2, message_id="update.t0",
        ),
    ),
    refusals=(
        Refusal(task_id="t9", run_id="run", round=1, client_id="pi", reason="memory", detail="", available_bytes=5),
    ),
    deployed=(Deployed(task_id="d", run_id="run", client_id="pi", files=("a", "b")),),
    done=("t0", "t9", "d"),
    programs=(blob("p").sha256,),
)  # fmt: skip


def test_saved_state_is_loaded_by_the_next_start(tmp_path: Path) -> None:
    AgentStore(tmp_path).save(Saved())
    AgentStore(tmp_path).save(SAVED)
    AgentStore(tmp_path).blobs.add(b"u")
    assert AgentStore(tmp_path).load() == SAVED


def test_an_update_without_its_blob_is_dropped_and_its_task_may_be_repeated(tmp_path: Path) -> None:
    AgentStore(tmp_path).save(SAVED)
    assert AgentStore(tmp_path).load() == replace(SAVED, updates=(), done=("t9", "d"))


def test_a_new_folder_has_an_empty_state(tmp_path: Path) -> None:
    assert AgentStore(tmp_path / "a" / "b").load() == Saved()


def test_a_crash_while_saving_leaves_the_older_state(tmp_path: Path) -> None:
    store = AgentStore(tmp_path)
    store.save(SAVED)
    store.blobs.add(b"u")
    (tmp_path / "agent.json.part").write_bytes(b'{"half')
    assert store.load() == SAVED


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema":99}', b'{"schema":3,"task":7}', b"\xff\xfe"])
def test_a_state_file_that_cannot_be_read_is_set_aside(tmp_path: Path, content: bytes) -> None:
    store = AgentStore(tmp_path)
    (tmp_path / "agent.json").write_bytes(content)
    assert store.load() == Saved()
    assert (tmp_path / "agent.bad").read_bytes() == content
    assert not (tmp_path / "agent.json").exists()


def test_one_agent_holds_the_folder_and_empties_its_work(tmp_path: Path) -> None:
    with AgentStore.open(tmp_path) as store:
        half_written = [store.work_folder / "half", tmp_path / "blobs" / "half.tmp"]
        for path in half_written:
            path.write_bytes(b"x")
        with pytest.raises(FileError, match="in use by another agent"), AgentStore.open(tmp_path):
            pass
        assert all(path.exists() for path in half_written)
    with AgentStore.open(tmp_path):
        assert not any(path.exists() for path in half_written)


@pytest.mark.parametrize("name", ["", "lock", "work", "blobs", "agent.json"])
def test_a_broken_folder_is_one_sentence(tmp_path: Path, name: str) -> None:
    """A file in the place of a folder, or a folder in the place of a file."""
    broken = tmp_path / "state" / name if name else tmp_path / "state"
    if name in ("lock", "agent.json"):
        broken.mkdir(parents=True)
    else:
        broken.parent.mkdir(exist_ok=True)
        broken.write_text("")

    def load() -> None:
        with AgentStore.open(tmp_path / "state") as store:
            store.load()

    with pytest.raises(FileError, match=r"choose another|make it readable, or remove it"):
        load()


def test_a_full_disk_keeps_the_older_state_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AgentStore(tmp_path)
    store.save(Saved(done=("t1",)))

    def fail_sync(_number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail_sync)
    with pytest.raises(FileError, match="No space left on device"):
        store.save(Saved(done=("t1", "t2")))
    assert store.load().done == ("t1",)
    assert not list(tmp_path.glob("*.part"))


def test_only_a_damaged_blob_is_dropped(tmp_path: Path) -> None:
    store = AgentStore(tmp_path)
    good, bad = store.blobs.add(b"good"), store.blobs.add(b"bad")
    (tmp_path / "blobs" / bad.sha256).write_bytes(b"bax")
    for ref in (good, bad, blob("absent")):
        store.drop_damaged(ref)
    assert store.blobs.has(good)
    assert not store.blobs.has(bad)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="choose another"):
        AgentStore(tmp_path / "file")


def store_models(tmp_path: Path, **changes: Any) -> tuple[AgentStore, Task]:
    store = AgentStore(tmp_path)
    task = replace(deploy_task(), **changes)
    for program in task.programs:
        store.blobs.add(f"model {program.target}".encode())
    return store, task


def test_models_are_placed_in_the_folder_of_their_run(tmp_path: Path) -> None:
    store, task = store_models(tmp_path)
    assert store.place_models(task) == ("models/run/model.onnx", "models/run/model.pte")
    assert (tmp_path / "models" / "run" / "model.pte").read_bytes() == b"model executorch"


def place_models(tmp_path: Path, run_id: str, at_s: int) -> None:
    """Place models with a set modification time: the clock of a file system may be too coarse to order them."""
    store, task = store_models(tmp_path, run_id=run_id)
    store.place_models(task)
    os.utime(tmp_path / "models" / run_id, (at_s, at_s))


def test_the_models_of_the_last_runs_are_kept_and_older_ones_removed(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    for number in range(7):
        place_models(tmp_path, f"r{number}", number)
        assert (
            sorted(path.name for path in folder.iterdir()) == [f"r{index}" for index in range(number + 1)][-KEPT_RUNS:]
        )
    place_models(tmp_path, "r3", 7)  # a run with models placed again is the newest
    place_models(tmp_path, "r9", 8)
    assert sorted(path.name for path in folder.iterdir()) == ["r3", "r5", "r6", "r9"]
    assert all((folder / name / "model.onnx").read_bytes() == b"model onnx" for name in ("r3", "r5", "r6", "r9"))


def test_models_that_are_placed_again_count_as_the_newest(tmp_path: Path) -> None:
    place_models(tmp_path, "old", 1)
    store, task = store_models(tmp_path, run_id="old")
    store.place_models(task)
    assert (tmp_path / "models" / "old").stat().st_mtime > 1


def test_other_entries_in_the_models_folder_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "kept").write_text("")
    folder.mkdir()
    (folder / "link").symlink_to(foreign)
    (folder / "note").write_text("")
    for number in range(6):
        place_models(tmp_path, f"r{number}", number)
    assert (foreign / "kept").exists()
    assert {path.name for path in folder.iterdir()} == {"link", "note", "r2", "r3", "r4", "r5"}


@pytest.mark.parametrize("run_id", ["..", "../x", "a/b", ".hidden", "/etc"])
def test_no_run_id_leads_out_of_the_folder(tmp_path: Path, run_id: str) -> None:
    store, task = store_models(tmp_path / "state", run_id=run_id)
    with pytest.raises(ProtocolError, match="to name a folder"):
        store.place_models(task)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


@pytest.mark.parametrize("run_id", ["", "a\0b", "x" * 200])
def test_no_task_has_a_run_id_that_cannot_name_a_folder(run_id: str) -> None:
    with pytest.raises(ValueError, match="run_id"):
        train_task(run_id=run_id)


def test_a_model_of_an_unknown_target_or_without_its_blob_is_refused(tmp_path: Path) -> None:
    store, task = store_models(tmp_path)
    with pytest.raises(ProtocolError, match="target is 'fake'"):
        store.place_models(train_task())
    store.blobs.prune(set())
    with pytest.raises(FileError, match="not in"):
        store.place_models(task)


class EndingTrainer:
    """A trainer that waits to be stopped, or writes its output and then raises SystemExit."""

    target = "fake"
    suffix = ".fake"

    def __init__(self, *, hard: bool) -> None:
        self.hard = hard

    def describe(self, data: str) -> None:
        raise NotImplementedError

    def predict(self, model_path: Path, data: str, threads: int = 1) -> None:
        raise NotImplementedError

    def train(self, job: Job[Train], stopped: object) -> TrainResult:
        if self.hard:
            job.output_path.write_bytes(b"written")
            raise SystemExit(3)
        assert callable(stopped)
        while not stopped():
            threading.Event().wait(0.001)
        job.output_path.write_bytes(b"stopped")
        return RESULT


def make_worker(tmp_path: Path, *, hard: bool) -> TrainingWorker:
    store = AgentStore(tmp_path)
    store.work_folder.mkdir()
    store.blobs.add(b"program")
    store.blobs.add(b"weights t1")
    trainer: Trainer = EndingTrainer(hard=hard)  # type: ignore[assignment]  # only `train` is ever called
    return TrainingWorker({"fake": trainer}, blobs=store.blobs, work_folder=store.work_folder, data="d")


def test_the_worker_stops_on_request_and_trains_again_afterwards(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, hard=False)
    for _ in range(2):
        worker.start(train_task(), 1000)
        assert worker.outcome() is None
        worker.stop()
        worker.join(10.0)
        outcome = worker.outcome()
        assert isinstance(outcome, TrainingOutput)
        assert outcome.output_path.read_bytes() == b"stopped"
    assert worker.outcome() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("task_id", ["t1", "../t1", "t" * 384])
def test_a_thread_that_ends_in_any_way_has_an_outcome_and_leaves_no_file(tmp_path: Path, task_id: str) -> None:
    worker = make_worker(tmp_path / "state", hard=True)
    worker.start(train_task("t1", task_id=task_id), 1000)
    worker.join(10.0)
    outcome = worker.outcome()
    assert isinstance(outcome, WorkFailed)
    assert outcome.reason == "failed"
    assert not list((tmp_path / "state" / "work").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


class ScriptedScorer:
    """A trainer that returns or raises its results, one per candidate."""

    target = "fake"

    def __init__(self, *results: float | Exception) -> None:
        self.results = list(results)
        self.jobs: list[Job[Score]] = []

    def score(self, job: Job[Score], stopped: object) -> float:
        self.jobs.append(job)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (MemoryLimitError(needed_bytes=2000, limit_bytes=1000), "2000"),
        (MemoryError(), "MemoryError"),
        (DataError("no samples"), "no samples"),
        (math.nan, "the score is nan"),
    ],
)
def test_a_candidate_that_cannot_be_scored_does_not_affect_the_others(
    tmp_path: Path, first: float | Exception, reason: str
) -> None:
    trainer = ScriptedScorer(first, 2.5)
    outcome = run_scoring(tmp_path, trainer)
    assert isinstance(outcome, ScoringEnded)
    assert outcome.scores[1] == CandidateScore(score=2.5)
    assert outcome.scores[0].score is None
    assert reason in outcome.scores[0].reason
    assert [job.weights_path.read_bytes() for job in trainer.jobs] == [b"weights s1 a", b"weights s1 b"]
    assert {(job.work.batches, job.client_id, job.memory_limit_bytes) for job in trainer.jobs} == {(2, "pi", 1000)}


def run_scoring(tmp_path: Path, trainer: ScriptedScorer) -> object:
    store = AgentStore(tmp_path)
    for content in (b"program", b"weights s1 a", b"weights s1 b"):
        store.blobs.add(content)
    trainers: dict[str, Trainer] = {"fake": trainer}  # type: ignore[dict-item]  # only `score` is ever called
    worker = TrainingWorker(trainers, blobs=store.blobs, work_folder=store.work_folder, data="d")
    worker.start(score_task(), 1000)
    worker.join(10.0)
    return worker.outcome()


@pytest.mark.parametrize("error", [DataError("no samples"), RuntimeError("a plug-in's own")])
def test_a_task_without_a_scored_candidate_has_failed(tmp_path: Path, error: Exception) -> None:
    outcome = run_scoring(tmp_path, ScriptedScorer(error, error))
    assert isinstance(outcome, WorkFailed)
    assert outcome.reason == "failed"
    assert str(error) in outcome.detail


def test_a_task_with_missing_blobs_is_a_failure_of_its_program(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, hard=False)
    worker.start(train_task("t2"), 1000)
    worker.join(10.0)
    outcome = worker.outcome()
    assert isinstance(outcome, WorkFailed)
    assert outcome.reason == "program"
