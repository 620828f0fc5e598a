"""Programs run in a process of their own: their faults end that process alone, and the agent reports them."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent.agent_cases import PROGRAM, evaluate_task, score_task
from edge_client.worker_rig import LIMIT_BYTES, check_next_task, make_task, run_task, store_blob

from subfleet.agent.outcomes import EvaluationEnded, ScoringEnded, WorkFailed
from subfleet.edge_client.task_work import TrainingOutput
from subfleet.edge_client.worker_messages import Workplace
from subfleet.edge_client.worker_process import WorkerProcess
from subfleet.protocol.children import make_child_command
from subfleet.protocol.errors import BrokenError, DataError
from subfleet.protocol.messages import Task
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import TaskSubmodel

pytestmark = pytest.mark.slow


@pytest.fixture
def worker(workplace: Workplace) -> Iterator[WorkerProcess]:
    with WorkerProcess(workplace, stop_s=0.5) as worker_process:
        yield worker_process


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="only glibc has several heaps")
def test_all_threads_of_the_process_use_one_heap(worker: WorkerProcess, workplace: Workplace) -> None:
    outcome = run_task(worker, make_task(workplace, "count heaps"))
    assert isinstance(outcome, TrainingOutput)
    assert outcome.result.measured_peak_bytes == 1


def test_the_process_describes_its_data_and_does_every_kind_of_work(
    worker: WorkerProcess, workplace: Workplace
) -> None:
    assert worker.opened.target == "fake"
    assert worker.opened.data.class_counts == (1, 2)
    assert worker.opened.held_out == worker.opened.data
    first = worker.process_id
    check_next_task(worker, workplace)
    assert worker.held_bytes == 4711
    program, weights = replace(PROGRAM, blob=store_blob(workplace, "p")), store_blob(workplace, "w")
    candidate = TaskSubmodel(architecture=Architecture(), program=program, weights=weights)
    scored = score_task(submodels=(candidate, candidate))
    evaluated = evaluate_task(program=program, weights=weights)
    outcome = run_task(worker, scored)
    assert isinstance(outcome, ScoringEnded)
    assert [score.score for score in outcome.scores] == [1.5, 1.5]
    assert isinstance(run_task(worker, evaluated), EvaluationEnded)
    assert worker.process_id == first


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the data of a process")
def test_a_gigabyte_within_one_step_is_refused_by_the_system_under_a_limit_of_fifty_megabytes(
    worker: WorkerProcess, workplace: Workplace
) -> None:
    first = worker.process_id
    outcome = run_task(worker, make_task(workplace, "grow"))
    assert isinstance(outcome, WorkFailed)
    assert (outcome.reason, outcome.available_bytes) == ("memory", 20_000_000)
    assert "refused memory" in outcome.detail
    assert not list(workplace.work_folder.iterdir())
    # The process still works, and the limit ended with its task.
    assert worker.process_id == first
    assert isinstance(run_task(worker, make_task(workplace, "little")), TrainingOutput)
    outcome = run_task(worker, make_task(workplace, "grow"), 2 * 2**30)
    assert isinstance(outcome, TrainingOutput)


def test_a_step_without_an_end_is_ended_with_its_process_and_the_next_task_is_done(
    worker: WorkerProcess, workplace: Workplace
) -> None:
    worker.start(make_task(workplace, "hang"), LIMIT_BYTES)
    worker.join(0.3)
    assert worker.outcome() is None
    worker.stop()
    worker.join(30.0)
    outcome = worker.outcome()
    assert isinstance(outcome, WorkFailed)
    assert (outcome.reason, outcome.available_bytes) == ("failed", None)
    assert "did not stop within 0.5 s and was ended" in outcome.detail
    check_next_task(worker, workplace)


def test_a_task_that_stops_on_request_keeps_its_process(worker: WorkerProcess, workplace: Workplace) -> None:
    first = worker.process_id
    for _ in range(2):  # the second task has the same id
        worker.start(make_task(workplace, "wait"), LIMIT_BYTES)
        worker.join(0.1)
        assert worker.outcome() is None
        worker.stop()
        worker.join(30.0)
        outcome = worker.outcome()
        assert isinstance(outcome, TrainingOutput)
        assert outcome.result.loss == 0.25
    assert worker.process_id == first


@pytest.mark.parametrize(
    ("word", "reason", "available_bytes", "detail"),
    [
        ("SIGKILL", "memory", 20_000_000, "was ended by SIGKILL"),
        ("SIGSEGV", "failed", None, "was ended by SIGSEGV"),
        pytest.param("SIGABRT", "failed", None, "was ended by SIGABRT", marks=pytest.mark.long),
        ("exit", "failed", None, "ended with exit code 3"),
    ],
)
def test_a_process_that_dies_is_a_refusal_of_its_task_and_is_restarted(
    worker: WorkerProcess, workplace: Workplace, word: str, reason: str, available_bytes: int | None, detail: str
) -> None:
    first = worker.process_id
    outcome = run_task(worker, make_task(workplace, word))
    assert isinstance(outcome, WorkFailed)
    assert (outcome.reason, outcome.available_bytes) == (reason, available_bytes)
    assert outcome.detail == f"the worker process {detail}"
    assert not list(workplace.work_folder.iterdir())
    assert worker.process_id != first
    assert worker.held_bytes == 0
    check_next_task(worker, workplace)


@pytest.mark.parametrize(
    ("word", "reason", "detail"),
    [
        ("nan", "diverged", "the loss is nan"),
        ("odd", "failed", "the trainer's result is invalid"),
        ("raise", "failed", "ValueError: odd ? text"),
    ],
)
def test_an_invalid_result_of_a_trainer_fails_only_its_task(
    worker: WorkerProcess, workplace: Workplace, word: str, reason: str, detail: str
) -> None:
    first = worker.process_id
    outcome = run_task(worker, make_task(workplace, word))
    assert isinstance(outcome, WorkFailed)
    assert outcome.reason == reason
    assert detail in outcome.detail
    assert not list(workplace.work_folder.iterdir())
    assert worker.process_id == first


def test_output_of_a_library_does_not_disturb_reports(worker: WorkerProcess, workplace: Workplace) -> None:
    assert isinstance(run_task(worker, make_task(workplace, "say")), TrainingOutput)


def test_a_blob_that_is_gone_is_a_failure_of_the_program(worker: WorkerProcess, workplace: Workplace) -> None:
    task = make_task(workplace, "train")
    (workplace.blobs / task.programs[0].blob.sha256).unlink()
    outcome = run_task(worker, task)
    assert isinstance(outcome, WorkFailed)
    assert outcome.reason == "program"


def test_a_process_that_dies_between_two_tasks_costs_neither(worker: WorkerProcess, workplace: Workplace) -> None:
    check_next_task(worker, workplace)
    os.kill(worker.process_id, signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while worker.held_bytes and time.monotonic() < deadline_s:
        assert worker.outcome() is None
    assert worker.held_bytes == 0
    check_next_task(worker, workplace)


def test_a_restarted_process_without_its_data_refuses_the_task(workplace: Workplace, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    data.touch()
    with WorkerProcess(replace(workplace, data=str(data))) as worker:
        data.unlink()  # the data vanish while the device works
        assert isinstance(run_task(worker, make_task(workplace, "SIGSEGV")), WorkFailed)
        outcome = run_task(worker, make_task(workplace, "train"))
    assert isinstance(outcome, WorkFailed)
    assert outcome.reason == "data"
    assert "data.npz' cannot be used; name others" in outcome.detail


@pytest.mark.parametrize(
    ("data", "kind", "words"), [("data.npz", DataError, "'data.npz'"), ("death", BrokenError, "code 7")]
)
def test_an_error_that_prevents_all_work_is_raised_at_the_start(
    workplace: Workplace, data: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        WorkerProcess(replace(workplace, data=data))


AGENT = """
import json, sys, time
from pathlib import Path
sys.path[:] = json.loads(sys.argv[1])
from subfleet.edge_client.worker_process import WorkerProcess
from subfleet.edge_client.worker_messages import Workplace, decode_order
place = Workplace.of_line(sys.argv[2].encode())
order = decode_order(sys.argv[3].encode())
worker = WorkerProcess(place)
worker.start(order.task, order.memory_limit_bytes)
print(worker.process_id, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "word",
    [
        "wait",
        pytest.param(
            "hang",
            marks=pytest.mark.skipif(
                not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent"
            ),
        ),
    ],
)
def test_no_process_outlives_an_agent_that_was_killed(
    workplace: Workplace, word: str, line: Callable[..., bytes]
) -> None:
    arguments = [json.dumps(sys.path), workplace.line().decode(), line(make_task(workplace, word)).decode()]
    with subprocess.Popen([sys.executable, "-c", AGENT, *arguments], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        child = int(agent.stdout.readline())
        assert is_running(child)
        time.sleep(0.5)  # the task is running, or about to
        agent.kill()
    deadline_s = time.monotonic() + 30
    while is_running(child):
        assert time.monotonic() < deadline_s, "the process goes on without its agent"
        time.sleep(0.05)


def test_the_process_ends_with_its_standard_input(workplace: Workplace) -> None:
    command = make_child_command("subfleet.edge_client.worker_child", str(os.getpid()))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(workplace.line())
        child.stdin.flush()
        try:
            assert b"Opened" in child.stdout.readline()
            child.stdin.close()
            assert child.wait(30) == 0
        finally:
            child.kill()


@pytest.fixture
def line() -> Callable[..., bytes]:
    from subfleet.edge_client.worker_messages import Order, encode_line

    def encode_order(task: Task) -> bytes:
        return encode_line(Order(task=task, memory_limit_bytes=LIMIT_BYTES, data_bytes=0))

    return encode_order


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return bool(state != "Z")
