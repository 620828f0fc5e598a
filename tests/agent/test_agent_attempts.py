"""The agent when a round is attempted again under its number: each attempt has its own answer and its own tasks."""

from dataclasses import replace

from agent.agent_cases import announce, connected_agent, deploy_task, find_action, kinds, train_task

from subfleet.agent.actions import Fetch, Keep, MeasureForRound, Publish, Settle, StopWork
from subfleet.protocol.messages import Ack, RoundInfo


def announce_attempt(attempt: int = 1, phase: str = "measure", log_time_s: float = 20.0) -> RoundInfo:
    info = announce(1, phase, log_time_s=log_time_s)  # type: ignore[arg-type]  # one of its Literals
    return replace(info, attempt=attempt, message_id=f"run/1.{attempt}/{phase}")


def test_a_new_attempt_of_a_round_is_answered_at_its_new_log_time() -> None:
    agent = connected_agent()
    first = find_action(agent.hear(announce(1)), Keep).message
    actions = agent.hear(announce_attempt())
    assert find_action(actions, MeasureForRound).info.log_time_s == 20.0
    assert find_action(actions, Settle).message_id == first.message_id
    second = find_action(actions, Keep).message
    assert (second.round, second.attempt, second.log_time_s) == (1, 1, 20.0)
    assert second.message_id != first.message_id
    assert [entry.message for entry in agent.state.pending] == [second]


def test_an_announcement_of_an_earlier_attempt_is_stale() -> None:
    agent = connected_agent()
    agent.hear(announce_attempt(2))
    (telemetry,) = agent.state.pending
    for late in (announce_attempt(1, "train"), announce(1, "train"), announce(1)):
        assert agent.hear(late) == ()
    assert agent.state.pending == (telemetry,)


def test_a_task_of_an_earlier_attempt_is_refused_and_one_of_a_later_attempt_waits_for_its_announcement() -> None:
    agent = connected_agent()
    agent.hear(announce_attempt(1, "train"))
    old = find_action(agent.hear(train_task("old")), Publish).message
    assert isinstance(old, Ack)
    assert (old.status, old.reason) == ("refused", "a newer round is under way")
    early = train_task("early", attempt=2)
    assert not any(isinstance(action, Fetch) for action in agent.hear(early))
    assert any(isinstance(action, Fetch) for action in agent.hear(announce_attempt(2, "train")))
    assert kinds(agent.hear(train_task("late", attempt=1))) == ["Publish"]
    assert agent.state.current is not None
    assert agent.state.current.task == early


def test_a_training_of_an_earlier_attempt_is_stopped_when_the_next_attempt_is_announced() -> None:
    agent = connected_agent()
    task = train_task()
    agent.train(task)
    assert find_action(agent.hear(announce_attempt(1)), StopWork).task_id == task.task_id
    assert agent.state.current is None


def test_models_after_a_round_of_several_attempts_are_accepted() -> None:
    agent = connected_agent()
    agent.hear(announce_attempt(3, "train"))
    agent.hear(train_task("t", attempt=3))
    agent.hear(replace(deploy_task("d"), round=1, attempt=3))
    assert agent.state.current is not None
    assert agent.state.current.task.task_id == "d"
