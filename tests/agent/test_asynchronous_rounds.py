"""Asynchronous rounds, in which a task goes on while the run's rounds change."""

from dataclasses import replace
from typing import Literal

from agent.agent_cases import Agent, announce, train_task

from subfleet.agent.actions import Keep, Publish, Settle, StartWork, StopWork
from subfleet.agent.events import LinkUp
from subfleet.protocol.messages import Ack, RoundInfo, Telemetry


def announce_open(number: int, phase: Literal["measure", "train", "finished"] = "train") -> RoundInfo:
    return replace(announce(number, phase), asynchronous=True)


def training() -> Agent:
    agent = Agent()
    agent.step(LinkUp())
    agent.hear(announce_open(1))
    agent.hear(announce_open(1, "measure"))
    agent.hear(train_task("t1", 1))
    assert any(isinstance(action, StartWork) for action in agent.fetch_all())
    return agent


def test_a_training_goes_on_while_rounds_change() -> None:
    agent = training()
    for number in (2, 3):
        assert not any(isinstance(action, StopWork) for action in agent.hear(announce_open(number)))
    assert agent.state.running == "t1"
    actions = agent.hear(announce(4, "train"))
    assert StopWork(task_id="t1") in actions, "after the last round nobody needs it"


def test_a_task_of_an_earlier_version_is_accepted_and_begun() -> None:
    agent = Agent()
    agent.step(LinkUp())
    agent.hear(announce_open(5))
    actions = agent.hear(train_task("t1", 3))
    assert [
        action.message.status for action in actions if isinstance(action, Publish) and isinstance(action.message, Ack)
    ] == ["accepted"]
    assert any(isinstance(action, StartWork) for action in agent.fetch_all())
    agent.hear(announce_open(6, "finished"))
    assert agent.state.current is None


def test_telemetry_is_kept_until_its_ack_or_the_next_round() -> None:
    agent = Agent()
    agent.step(LinkUp())
    agent.hear(announce_open(1))
    (kept,) = (action.message for action in agent.hear(announce_open(1, "measure")) if isinstance(action, Keep))
    assert isinstance(kept, Telemetry)
    assert kept.round == 1
    settled = Settle(message_id=kept.message_id)
    assert settled not in agent.hear(announce_open(1)), "the announcement to all is repeated"
    assert settled in agent.hear(announce_open(2))
