"""Figures of the log that a device replays, reported where a run asks for them."""

from dataclasses import replace

from agent.agent_cases import announce, connected_agent, find_action

from subfleet.agent.actions import Keep, MeasureForRound
from subfleet.protocol.readings import LogLow


def test_figures_of_a_log_are_reported_if_the_announcement_asks_for_them() -> None:
    agent = connected_agent()
    plain = find_action(agent.hear(announce(1)), Keep).message
    assert plain.log_low is None
    actions = agent.hear(announce(2, log_quantile=0.2))
    measure = find_action(actions, MeasureForRound)
    assert measure.info.log_quantile == 0.2
    low = LogLow(memory_budget_bytes=7, downlink_bps=8.0, uplink_bps=9.0)
    actions = agent.step(replace(agent.measured(measure), log_low=low))
    assert find_action(actions, Keep).message.log_low == low
