"""A device on which training kills the process, and a supervisor restarts it in the same folder each time."""

import json
import logging
from pathlib import Path

import pytest
from agent.agent_cases import announce
from edge_client.fleet_rig import Rig

from subfleet.agent.states import Saved
from subfleet.agent.survival import Survival
from subfleet.edge_client.store import AgentStore
from subfleet.protocol.errors import FileError
from subfleet.protocol.messages import Refusal, Telemetry
from subfleet.protocol.schema import to_plain


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def begin(rig: Rig, number: int = 1, name: str = "t1", *, evaluates: bool = False) -> None:
    """Take a task to its work, and suspend it there."""
    rig.trainer.gate.clear()
    rig.server.announce(announce(number, "train"))
    rig.server.assign(rig.server.evaluate_task(name, number) if evaluates else rig.server.train_task(name, number))
    rig.until(lambda: count_works(rig) == 1)


def refusals(rig: Rig) -> list[Refusal]:
    by_id = {message.message_id: message for message in rig.server.heard if isinstance(message, Refusal)}
    return list(by_id.values())


def budget_of(rig: Rig, number: int) -> int:
    rig.server.announce(announce(number))
    rig.until(lambda: any(isinstance(message, Telemetry) and message.round == number for message in rig.server.heard))
    return next(
        message.memory_budget_bytes
        for message in rig.server.heard
        if isinstance(message, Telemetry) and message.round == number
    )


def count_works(rig: Rig) -> int:
    """How often work was begun, over all processes."""
    return len(rig.trainer.jobs) + len(rig.trainer.evaluations)


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_task_that_kills_its_process_is_begun_twice_and_the_next_round_hears_of_less(
    rig: Rig, evaluates: bool
) -> None:
    assert budget_of(rig, 1) == 1000
    begin(rig, evaluates=evaluates)
    for _ in range(10):
        count = count_works(rig)
        rig.kill()
        rig.start()
        rig.until(lambda count=count: count_works(rig) > count or bool(refusals(rig)))  # type: ignore[misc]  # the loop's own value
        for _ in range(20):
            rig.turn()
    assert count_works(rig) == 2
    (refusal,) = refusals(rig)
    assert (refusal.task_id, refusal.reason, refusal.available_bytes) == ("t1", "memory", 250)
    rig.until(lambda: not rig.store.load().answers)
    assert budget_of(rig, 2) == 250
    rig.kill()
    rig.start()
    assert budget_of(rig, 3) == 265


@pytest.mark.slow
def test_a_session_that_is_closed_at_work_has_not_died(rig: Rig) -> None:
    begin(rig)
    for count in range(2, 7):
        rig.session.close()
        assert rig.store.load().survival == Survival()
        rig.start()
        rig.until(lambda count=count: count_works(rig) == count)  # type: ignore[misc]  # the loop's own value
    rig.trainer.gate.set()
    rig.until(lambda: "t1" in rig.server.updates)
    assert refusals(rig) == []


def test_a_training_that_ended_just_before_the_close_is_answered_by_the_next_start(rig: Rig) -> None:
    begin(rig)
    rig.trainer.gate.set()
    rig.worker.join(5.0)
    rig.session.close()
    assert [update.task_id for update in rig.store.load().updates] == ["t1"]
    rig.start()
    rig.until(lambda: "t1" in rig.server.updates)
    assert count_works(rig) == 1


def test_a_session_says_goodbye_although_the_disk_cannot_be_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin(rig)

    def fail_save(_self: AgentStore, _saved: Saved) -> None:
        raise FileError("the state file cannot be written")

    monkeypatch.setattr(AgentStore, "save", fail_save)
    with caplog.at_level(logging.WARNING):
        rig.session.close()
    rig.server.turn()
    goodbyes = [message for message in rig.server.heard if getattr(message, "reason", "") == "it was stopped"]
    assert len(goodbyes) == 1
    assert "the stop of the task cannot be saved" in caplog.text
    rig.worker.join(5.0)
    assert rig.worker.outcome() is not None, "its work is stopped"


def test_a_state_file_of_an_earlier_release_is_read(rig: Rig) -> None:
    rig.play_round()
    rig.until(lambda: not rig.store.load().answers)
    path = rig.folder / "device" / "agent.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    assert "survival" not in state
    assert state == {"schema": 3, **to_plain(rig.store.load())}
    rig.kill()
    rig.start()
    rig.play_round(2, "t2")
