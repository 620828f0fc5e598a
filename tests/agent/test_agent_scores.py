"""The agent's transitions while it scores candidates: the actions that each event leads to."""

from dataclasses import replace

import pytest
from agent.agent_cases import (
    SCORES,
    Agent,
    announce,
    blob,
    connected_agent,
    deploy_task,
    find_action,
    score_task,
    train_task,
)

from subfleet.agent.actions import Fetch, Keep, MeasureForTask, Prune, Publish, Save, Settle, StartWork, StopWork
from subfleet.agent.outcomes import ScoringEnded
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.messages import Ack, Scores, Task, Update, decode, encode

FIRST = score_task().submodels[0]


def ack(of: str) -> Ack:
    return Ack(of=of, status="accepted")


def duplicate(task: Task) -> Publish:
    """The answer to a task that was received before."""
    message_id = f"ack.s1.{task.message_id}"
    return Publish(message=Ack(of=task.message_id, status="duplicate", message_id=message_id))


def test_candidates_from_task_to_ack() -> None:
    agent = connected_agent()
    agent.hear(announce(1, "train"))
    task = score_task()
    expected = {blob("program"), blob("weights s1 a"), blob("weights s1 b")}
    assert {action.blob for action in agent.hear(task) if isinstance(action, Fetch)} == expected
    actions = agent.fetch_all()
    assert find_action(actions, MeasureForTask)
    assert (find_action(actions, StartWork).task, find_action(actions, StartWork).memory_limit_bytes) == (task, 1000)
    assert agent.state.saved.blobs == {ref.sha256 for ref in expected}
    agent.now_s += 7.0
    actions = agent.score(task)
    scores = find_action(actions, Keep).message
    assert isinstance(scores, Scores)
    assert (scores.task_id, scores.scores, scores.seconds) == ("s1", SCORES, 7.0)
    assert find_action(actions, Save).saved.scores == (scores,)
    assert find_action(actions, Prune).keep == frozenset(), "scored blobs are not kept for later rounds"
    assert find_action(agent.hear(ack(scores.message_id)), Settle).message_id == scores.message_id


def test_a_repeated_scoring_task_is_a_duplicate_and_the_training_follows_in_the_same_round() -> None:
    agent = connected_agent()
    agent.train(score_task())
    assert find_action(agent.hear(score_task()), Publish) == duplicate(score_task())
    agent.score(score_task())
    assert agent.hear(score_task()) == (duplicate(score_task()),)
    assert find_action(agent.train(train_task()), StartWork).task.work.TYPE == "train"
    assert isinstance(find_action(agent.finish(train_task()), Keep).message, Update)


def test_a_training_replaces_a_scoring_and_its_scores_are_discarded() -> None:
    agent = connected_agent()
    agent.train(score_task())
    assert find_action(agent.train(train_task()), StopWork).task_id == "s1"
    actions = agent.score(score_task())
    assert not any(isinstance(action, Keep) for action in actions)
    assert agent.state.running is None


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (score_task(submodels=(FIRST, replace(FIRST, program=deploy_task().programs[0]))), "runtime"),
        (score_task(planned_peak_bytes=1001), "memory"),
    ],
)
def test_candidates_that_the_device_cannot_try_are_refused(task: Task, reason: str) -> None:
    agent = connected_agent()
    actions = agent.train(task)
    assert find_action(actions, Keep).message.reason == reason
    assert not any(isinstance(action, StartWork) for action in actions)


def test_scores_of_an_earlier_round_are_not_sent_again() -> None:
    agent = connected_agent()
    agent.train(score_task())
    scores = find_action(agent.score(score_task()), Keep).message
    assert not any(isinstance(action, Settle) for action in agent.hear(announce(1, "train")))
    assert find_action(agent.hear(announce(2)), Settle).message_id == scores.message_id


def test_a_restart_sends_saved_scores_again_and_repeats_unanswered_scorings() -> None:
    agent = connected_agent()
    agent.train(score_task())
    restarted = connected_agent(saved=agent.state.saved)
    assert find_action(restarted.hear(announce(1, "train")) + restarted.fetch_all(), StartWork).task == score_task()
    scores = find_action(restarted.score(score_task()), Keep).message
    restarted_twice = Agent(saved=restarted.state.saved)
    assert restarted_twice.first == (Keep(message=scores),)


def test_reasons_with_any_characters_can_be_sent() -> None:
    agent = connected_agent()
    agent.train(score_task())
    candidate = CandidateScore(score=None, reason="no image: \udcff\0.png" + "x" * 5000)
    scores = find_action(agent.step(ScoringEnded(task_id="s1", scores=(candidate, candidate))), Keep).message
    assert decode(encode(scores)) == scores
