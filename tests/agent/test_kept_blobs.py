"""Blobs that a device keeps for later rounds."""

from agent.agent_cases import blob, connected_agent, find_action, train_task

from subfleet.agent.actions import Keep, Prune
from subfleet.agent.states import Saved
from subfleet.protocol.messages import Ack
from subfleet.protocol.schema import from_plain, to_plain


def test_frozen_weights_are_kept_for_later_rounds() -> None:
    """Also by the next process of the device."""
    agent, frozen = connected_agent(), blob("frozen")
    task = train_task("t1", frozen=frozen)
    assert [own.sha256 for own in task.blobs] == [blob(own).sha256 for own in ("program", "frozen", "weights t1")]
    agent.train(task)
    update = find_action(agent.finish(task), Keep).message
    actions = agent.hear(Ack(of=update.message_id, status="accepted"))
    assert find_action(actions, Prune).keep == {blob("program").sha256, frozen.sha256}
    saved = from_plain(Saved, to_plain(agent.state.saved), where="saved")
    assert saved.frozen == (frozen.sha256,)
    assert frozen.sha256 in saved.blobs
