"""Results that no message takes: a program or a plug-in may give any number."""

from dataclasses import replace
from typing import Any

import pytest
from agent.agent_cases import EVALUATION, RESULT, blob, connected, evaluate_task, one, train_task

from subfleet.agent.actions import Keep
from subfleet.agent.events import EvaluationEnded, Trained
from subfleet.protocol.messages import Refusal


@pytest.mark.parametrize("odd", [{"sample_count": -1}, {"loss": 1e300}, {"square_loss": -1.0}])
def test_a_training_with_one_is_refused(odd: dict[str, Any]) -> None:
    agent = connected()
    agent.train(train_task())
    refusal = one(agent.step(Trained(task_id="t1", result=replace(RESULT, **odd), blob=blob("u"))), Keep).message
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "failed"
    assert refusal.detail.startswith("the result cannot be sent: ")
    assert agent.state.job is None


@pytest.mark.parametrize("odd", [{"label_count": -1}, {"class_counts": (1, 3), "class_correct": (2, 3)}])
def test_an_evaluation_with_one_is_refused(odd: dict[str, Any]) -> None:
    agent = connected()
    agent.train(evaluate_task())
    event = EvaluationEnded(task_id=evaluate_task().task_id, result=replace(EVALUATION, **odd))
    refusal = one(agent.step(event), Keep).message
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("the result cannot be sent: ")
