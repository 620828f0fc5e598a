"""The agent's transitions while it evaluates models: the actions that each event leads to."""

from dataclasses import replace

import pytest
from agent.agent_cases import (
    EVALUATION,
    Agent,
    announce,
    blob,
    connected_agent,
    deploy_task,
    evaluate_task,
    find_action,
    profile,
    train_task,
)

from subfleet.agent.actions import Fetch, Keep, MeasureForTask, Prune, Publish, Save, Settle, StartWork, StopWork
from subfleet.agent.outcomes import WorkFailed
from subfleet.agent.states import AgentSettings, Saved
from subfleet.protocol.messages import Ack, Evaluated, Refusal, Task, Update
from subfleet.protocol.schema import from_plain, to_plain


def ack(of: str) -> Ack:
    return Ack(of=of, status="accepted")


def duplicate(task: Task) -> Publish:
    """The answer to a task that was received before."""
    message_id = f"ack.s1.{task.message_id}"
    return Publish(message=Ack(of=task.message_id, status="duplicate", message_id=message_id))


def test_an_evaluation_from_task_to_ack() -> None:
    agent = connected_agent()
    agent.hear(announce(1, "train"))
    task = evaluate_task()
    assert {action.blob for action in agent.hear(task) if isinstance(action, Fetch)} == {
        blob("program"),
        blob("weights e1"),
    }
    actions = agent.fetch_all()
    assert find_action(actions, MeasureForTask)
    assert (find_action(actions, StartWork).task, find_action(actions, StartWork).memory_limit_bytes) == (task, 1000)
    agent.now_s += 7.0
    actions = agent.evaluate(task)
    message = find_action(actions, Keep).message
    assert message == Evaluated(
        task_id="e1",
        run_id="run",
        round=1,
        client_id="pi",
        loss=0.5,
        accuracy=0.75,
        sample_count=4,
        label_count=4,
        class_counts=(1, 3),
        class_correct=(0, 3),
        measured_peak_bytes=EVALUATION.measured_peak_bytes,
        seconds=7.0,
        message_id="evaluated.e1",
    )
    assert find_action(actions, Save).saved.evaluated == (message,)
    assert find_action(actions, Prune).keep == {blob("program").sha256}, (
        "weights are removed; the next round has the same program"
    )
    actions = agent.hear(ack(message.message_id))
    assert find_action(actions, Settle).message_id == message.message_id
    assert find_action(actions, Save).saved.evaluated == ()


def test_a_repeated_evaluation_task_is_done_once() -> None:
    agent = connected_agent()
    agent.train(evaluate_task())
    assert find_action(agent.hear(evaluate_task()), Publish) == duplicate(evaluate_task())
    agent.evaluate(evaluate_task())
    assert agent.hear(evaluate_task()) == (duplicate(evaluate_task()),)
    restarted = connected_agent(saved=agent.state.saved)
    restarted.hear(announce(1, "train"))
    assert restarted.hear(evaluate_task()) == (duplicate(evaluate_task()),), "and not again after a restart"


def test_a_training_follows_in_the_same_round_and_takes_the_place_of_an_evaluation() -> None:
    agent = connected_agent()
    agent.train(evaluate_task())
    agent.evaluate(evaluate_task())
    assert find_action(agent.train(train_task()), StartWork).task.work.TYPE == "train"
    assert isinstance(find_action(agent.finish(train_task()), Keep).message, Update)
    other = connected_agent()
    other.train(evaluate_task())
    assert find_action(other.train(train_task()), StopWork).task_id == "e1"
    actions = other.evaluate(evaluate_task())
    assert not any(isinstance(action, Keep) for action in actions)
    assert other.state.running is None


def test_a_device_without_held_out_data_refuses_at_once() -> None:
    agent = connected_agent(settings=AgentSettings(profile=replace(profile(), held_out_count=0)))
    agent.hear(announce(1, "train"))
    actions = agent.hear(evaluate_task())
    refusal = find_action(actions, Keep).message
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "data"
    assert refusal.detail == "this device has no held-out data to evaluate on; name some with --held-out when it joins"
    assert not any(isinstance(action, Fetch) for action in actions), "no blob is fetched for it"
    assert find_action(agent.train(train_task("t2")), StartWork).task.work.TYPE == "train"


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (evaluate_task(program=deploy_task().programs[0]), "runtime"),
        (evaluate_task(planned_peak_bytes=1001), "memory"),
    ],
)
def test_an_evaluation_that_the_device_cannot_do_is_refused(task: Task, reason: str) -> None:
    agent = connected_agent()
    actions = agent.train(task)
    assert find_action(actions, Keep).message.reason == reason
    assert not any(isinstance(action, StartWork) for action in actions)


def test_an_evaluation_that_fails_is_refused() -> None:
    agent = connected_agent()
    agent.train(evaluate_task())
    actions = agent.step(WorkFailed(task_id="e1", reason="data", detail="other classes"))
    assert (find_action(actions, Keep).message.reason, find_action(actions, Keep).message.detail) == (
        "data",
        "other classes",
    )


def test_an_evaluation_is_sent_until_its_ack_or_the_end_of_its_run() -> None:
    agent = connected_agent()
    agent.train(evaluate_task())
    message = find_action(agent.evaluate(evaluate_task()), Keep).message
    for info in (announce(1, "train"), announce(2), announce(3)):
        agent.hear(info)
    assert message in [entry.message for entry in agent.state.pending]
    settled = [action for action in agent.hear(announce(3, "finished")) if isinstance(action, Settle)]
    assert Settle(message_id=message.message_id) in settled


def test_a_restart_sends_saved_evaluations_again_and_repeats_unanswered_ones() -> None:
    agent = connected_agent()
    agent.train(evaluate_task())
    restarted = connected_agent(saved=agent.state.saved)
    assert find_action(restarted.hear(announce(1, "train")) + restarted.fetch_all(), StartWork).task == evaluate_task()
    message = find_action(restarted.evaluate(evaluate_task()), Keep).message
    restarted_twice = Agent(saved=restarted.state.saved)
    assert restarted_twice.first == (Keep(message=message),)


def test_an_evaluation_writes_nothing_to_the_disk_but_what_it_fetches() -> None:
    fetched_bytes = sum(part.size_bytes for part in evaluate_task().blobs)
    agent = connected_agent(room_bytes=fetched_bytes)
    assert find_action(agent.train(evaluate_task()), StartWork).task == evaluate_task()
    assert (
        find_action(connected_agent(room_bytes=fetched_bytes - 1).train(evaluate_task()), Keep).message.reason == "disk"
    )
    assert find_action(connected_agent(room_bytes=fetched_bytes).train(train_task()), Keep).message.reason == "disk"


def test_the_saved_state_has_no_evaluations_if_there_are_none() -> None:
    """An agent of an earlier release must be able to read the file."""
    assert "evaluated" not in to_plain(Saved())
    agent = connected_agent()
    agent.train(evaluate_task())
    agent.evaluate(evaluate_task())
    saved = agent.state.saved
    assert from_plain(Saved, to_plain(saved)) == saved
