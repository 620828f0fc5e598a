"""A worker process whose trainer does what its program says, and tasks with such programs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from agent.agent_cases import PROGRAM, blob, train_task

from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.task_work import Outcome, TrainingOutput
from subfleet.edge_client.worker_messages import Workplace
from subfleet.edge_client.worker_process import WorkerProcess
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Task

LIMIT_BYTES = 50_000_000

# A trainer that follows the command in its program.
TRAINER = """
import ctypes, os, signal, sys, threading, time
from subfleet.protocol.errors import DataError, MemoryLimitError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, TrainResult

def result(**other):
    plain = dict(sample_count=3, step_count=1, loss=0.5, accuracy=1.0, train_seconds=0.1)
    return TrainResult(**{**plain, "measured_peak_bytes": os.getpid(), **other})

def hold(gigabytes):
    taken = []
    for _ in range(int(30 * gigabytes)):
        taken.append(bytearray(2**30 // 30))
    return taken

def count_heaps(path):
    libc, at_once = ctypes.CDLL(None), threading.Barrier(5)
    libc.fopen.restype = ctypes.c_void_p
    for _ in range(4):
        threading.Thread(target=lambda: (libc.malloc(1000), at_once.wait())).start()
    at_once.wait()
    file = ctypes.c_void_p(libc.fopen(os.fsencode(path), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return path.read_text().count("<heap nr=")

class Trainer:
    target, suffix, providers = "fake", ".fake", ("cpu",)
    held_bytes = 4711
    def describe_runtime(self):
        return "a test's"
    def describe(self, data):
        if data.endswith("data.npz") and not os.path.exists(data):
            raise DataError(f"the data {data!r} cannot be used; name others")
        if data == "death":
            os._exit(7)
        return DataSummary(sample_count=3, input_shape=(2,), class_counts=(1, 2), data_bytes=24)
    def train(self, job, stopped):
        word = job.program_path.read_text()
        job.output_path.write_text("written")
        if word == "grow":
            hold(1)
        elif word == "little":
            return result(measured_peak_bytes=len(hold(0.02)))
        elif word == "70 MB":
            return result(measured_peak_bytes=len(hold(0.07)))
        elif word == "count heaps":
            return result(measured_peak_bytes=count_heaps(job.output_path.with_name("heaps")))
        elif word == "hang":
            ctypes.PyDLL(None).sleep(600)  # which holds the interpreter
        elif word == "wait":
            while not stopped():
                time.sleep(0.01)
            return result(loss=0.25)
        elif word in ("SIGKILL", "SIGSEGV", "SIGABRT"):
            os.kill(os.getpid(), getattr(signal, word))
        elif word == "exit":
            sys.exit(3)
        elif word == "nan":
            return result(loss=float("nan"))
        elif word == "odd":
            return result(sample_count="many", train_seconds=object())
        elif word == "raise":
            raise ValueError("odd \\udcff text")
        elif word == "say":
            print("{}", flush=True)
            os.write(1, b"[]\\n")
        return result()
    def score(self, job, stopped):
        return 1.5
    def evaluate(self, job, stopped):
        return EvaluationResult(loss=0.5, accuracy=0.5, sample_count=2, label_count=2, measured_peak_bytes=0)
"""


def make_workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    packages = tmp_path / "packages"
    info = packages / "worker_of_a_test-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: worker-of-a-test\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[subfleet.trainers]\nfake = worker_of_a_test:Trainer\n", encoding="utf-8")
    (packages / "worker_of_a_test.py").write_text(TRAINER, encoding="utf-8")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = AgentStore(tmp_path / "state")
    store.work_folder.mkdir()
    store.blobs.add(b"weights")
    return Workplace(
        runtimes=("fake",),
        provider="cpu",
        data="good",
        held_out="also good",
        threads=1,
        blobs=store.blob_folder,
        work_folder=store.work_folder,
        log_level=30,
    )


def store_blob(workplace: Workplace, content: str) -> BlobRef:
    path = workplace.blobs / blob(content).sha256
    path.write_bytes(content.encode())
    return BlobRef.of(content.encode())


def make_task(workplace: Workplace, word: str) -> Task:
    program, weights = replace(PROGRAM, blob=store_blob(workplace, word)), store_blob(workplace, "weights")
    return train_task(f"task {word}", program=program, weights=weights, planned_peak_bytes=40_000_000)


def run_task(worker: WorkerProcess, task: Task, limit_bytes: int = LIMIT_BYTES) -> Outcome:
    worker.start(task, limit_bytes)
    worker.join(60.0)
    outcome = worker.outcome()
    assert outcome is not None
    assert worker.outcome() is None
    assert outcome.task_id == task.task_id
    return outcome


def check_next_task(worker: WorkerProcess, workplace: Workplace) -> None:
    outcome = run_task(worker, make_task(workplace, "train"))
    assert isinstance(outcome, TrainingOutput)
    assert outcome.output_path.read_text() == "written"
    assert outcome.result.measured_peak_bytes == worker.process_id != os.getpid()
