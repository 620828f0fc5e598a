"""A device that evaluates, with a scripted server: rounds, power cuts, bad links and the errors of its worker."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from agent.agent_cases import EVALUATION, announce, evaluate_task
from edge_client.fleet_rig import WEIGHTS, FakeTrainer, Rig

from subfleet.agent.outcomes import WorkFailed
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.protocol.errors import DataError, LoadError, MemoryLimitError, ProtocolError, SubfleetError
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.messages import Evaluated, Refusal
from subfleet.transport.in_memory import Faults


def list_evaluations(rig: Rig) -> list[Evaluated]:
    return [message for message in rig.server.heard if isinstance(message, Evaluated)]


def is_settled(rig: Rig) -> bool:
    return bool(list_evaluations(rig)) and not rig.store.load().answers


def begin(rig: Rig) -> None:
    rig.server.announce(announce(1, "train"))
    rig.server.assign(rig.server.evaluate_task())


def test_a_task_is_answered_once_and_a_training_follows(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    begin(rig)
    rig.until(lambda: is_settled(rig))
    (message,) = set(list_evaluations(rig))
    assert (message.task_id, message.client_id, message.loss) == ("e1", "pi", EVALUATION.loss)
    assert (message.class_counts, message.class_correct) == (EVALUATION.class_counts, EVALUATION.class_correct)
    (job,) = rig.trainer.evaluations
    assert (job.data, job.memory_limit_bytes, job.work.settings) == (
        "h",
        1000,
        EvaluationSettings(batch_size=8, per_class=True),
    )
    assert not list(rig.store.work_folder.iterdir())
    rig.server.assign(rig.server.train_task())
    rig.until(lambda: "t1" in rig.server.updates)


def cut_while_it_works(rig: Rig) -> None:
    rig.trainer.gate.clear()
    begin(rig)
    rig.until(lambda: bool(rig.trainer.evaluations))


def cut_before_the_ack(rig: Rig) -> None:
    rig.server.hold = {"evaluated"}
    begin(rig)
    rig.until(lambda: bool(list_evaluations(rig)))
    rig.server.hold = set()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [cut_while_it_works, cut_before_the_ack])
def test_a_power_cut_loses_no_evaluation_and_doubles_none(tmp_path: Path, cut: Callable[[Rig], None]) -> None:
    rig = Rig(tmp_path)
    cut(rig)
    count = len(rig.trainer.evaluations)
    rig.kill()
    rig.trainer.gate.set()
    rig.start()
    rig.until(lambda: is_settled(rig))
    assert {message.message_id for message in list_evaluations(rig)} == {"evaluated.e1"}
    assert len(rig.trainer.evaluations) == (count + 1 if cut is cut_while_it_works else count)
    rig.server.assign(replace(rig.server.evaluate_task(), message_id="again"))
    for _ in range(100):
        rig.turn()
    assert len(rig.trainer.evaluations) <= count + 1, "an answered task is never done again"


@pytest.mark.slow
def test_a_bad_link_loses_and_doubles_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Faults(seed=3, loss=0.3, double=0.3))
    begin(rig)
    rig.until(lambda: is_settled(rig), seconds=2000.0)
    assert len(rig.trainer.evaluations) == 1
    assert len(set(list_evaluations(rig))) == 1


def run_evaluation(folder: Path, error: Exception | None, held_out: str | None = "h") -> object:
    store = AgentStore(folder)
    trainer = FakeTrainer(error=error)
    blobs = store.blobs.add(b"program"), store.blobs.add(WEIGHTS)
    task = evaluate_task(weights=blobs[1], program=replace(evaluate_task().programs[0], blob=blobs[0]))
    worker = TrainingWorker(
        {"fake": trainer}, blobs=store.blobs, work_folder=store.work_folder, data="d", held_out=held_out
    )
    worker.start(task, 1000)
    worker.join(10.0)
    return worker.outcome()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataError("other classes"), "data"),
        (LoadError("an older runtime"), "runtime"),
        (ProtocolError("another program"), "program"),
        (MemoryLimitError(needed_bytes=2000, limit_bytes=1000), "memory"),
        (MemoryError(), "memory"),
        (ValueError("loss is -1, but must be a number of 0 or more"), "failed"),
    ],
)
def test_a_failed_evaluation_has_its_reason(tmp_path: Path, error: SubfleetError, reason: str) -> None:
    outcome = run_evaluation(tmp_path, error)
    assert isinstance(outcome, WorkFailed)
    assert outcome.reason == reason


def test_a_worker_without_held_out_data_names_the_option(tmp_path: Path) -> None:
    outcome = run_evaluation(tmp_path, None, held_out=None)
    assert isinstance(outcome, WorkFailed)
    assert (outcome.reason, "--held-out" in outcome.detail) == ("data", True)


def test_an_evaluation_that_does_not_fit_any_more_is_refused_for_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.meter.free_bytes = 1280
    begin(rig)
    rig.until(lambda: bool(rig.server.of(Refusal)))
    (refusal,) = {message for message in rig.server.heard if isinstance(message, Refusal)}
    assert (refusal.reason, refusal.available_bytes) == ("memory", 400)
    assert rig.trainer.evaluations == []
