"""What an agent says of a task whose deadline has come, by what it was waiting for."""

from agent.agent_cases import announce, connected, one, train_task

from subfleet.agent.actions import Keep
from subfleet.agent.events import TimePassed


def test_a_task_whose_blobs_have_not_come_is_refused_for_the_link() -> None:
    agent = connected()
    agent.hear(announce(1, "train"))
    agent.hear(train_task())
    agent.now_s += 60.0
    assert one(agent.see(TimePassed()), Keep).message.reason == "link"
