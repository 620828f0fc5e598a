"""Results that no message accepts: a program or a plug-in may return any number. Evaluations check their own values."""

from dataclasses import replace
from typing import Any

import pytest
from agent.agent_cases import RESULT, blob, connected_agent, find_action, train_task

from subfleet.agent.actions import Keep
from subfleet.agent.outcomes import TrainingEnded
from subfleet.protocol.messages import Refusal


@pytest.mark.parametrize("odd", [{"sample_count": -1}, {"loss": 1e300}, {"square_loss": -1.0}])
def test_a_training_with_an_invalid_result_is_refused(odd: dict[str, Any]) -> None:
    agent = connected_agent()
    agent.train(train_task())
    refusal = find_action(
        agent.step(TrainingEnded(task_id="t1", result=replace(RESULT, **odd), blob=blob("u"))), Keep
    ).message
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "failed"
    assert refusal.detail.startswith("the result cannot be sent: ")
    assert agent.state.current is None
