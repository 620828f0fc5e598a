"""Results that no message takes: a program or a plug-in may give any number. Evaluations check themselves."""

from dataclasses import replace
from typing import Any

import pytest
from agent.agent_cases import RESULT, blob, connected, one, train_task

from subfleet.agent.actions import Keep
from subfleet.agent.events import TrainingEnded
from subfleet.protocol.messages import Refusal


@pytest.mark.parametrize("odd", [{"sample_count": -1}, {"loss": 1e300}, {"square_loss": -1.0}])
def test_a_training_with_one_is_refused(odd: dict[str, Any]) -> None:
    agent = connected()
    agent.train(train_task())
    refusal = one(agent.step(TrainingEnded(task_id="t1", result=replace(RESULT, **odd), blob=blob("u"))), Keep).message
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "failed"
    assert refusal.detail.startswith("the result cannot be sent: ")
    assert agent.state.current is None
