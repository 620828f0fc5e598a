"""The reason that an agent reports when the deadline of a task passes."""

from agent.agent_cases import announce, connected_agent, find_action, train_task

from subfleet.agent.actions import Keep
from subfleet.agent.events import TimePassed


def test_a_task_without_its_blobs_at_its_deadline_is_refused_for_the_link() -> None:
    agent = connected_agent()
    agent.hear(announce(1, "train"))
    agent.hear(train_task())
    agent.now_s += 60.0
    assert find_action(agent.see(TimePassed()), Keep).message.reason == "link"
