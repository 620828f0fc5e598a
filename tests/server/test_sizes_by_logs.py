"""Methods that keep sizes for a whole run: the quantile of their logs that devices are asked for, and its use."""

from dataclasses import replace
from typing import Any

from server.coordinator_cases import CLIENTS, context_of, measuring, prepared, size_of, telemetry
from server.fake_device import PLENTY_BYTES

from subfleet.methods.fedfa import FedFA
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.readings import Budget, LogLow
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.assigning import build_question
from subfleet.rounds.coordinator import step
from subfleet.settings.fleet import MemoryLimits
from subfleet.settings.sections import LogClock


def _find_log_quantile(**changes: Any) -> float | None:
    context = context_of(**changes)
    info = build_round_info(context, measuring(context), 1.0)
    assert info is not None
    return info.log_quantile


def test_devices_are_asked_for_their_logs_where_sizes_are_kept_and_logs_are_replayed() -> None:
    clock = LogClock(start_s=0.0, step_s=60.0)
    assert _find_log_quantile(method=FedFA(), clock=clock) == 0.1
    assert _find_log_quantile(method=FedFA(), clock=clock, log_quantile=0.25) == 0.25
    assert _find_log_quantile(method=FedFA(choice="score"), clock=clock) == 0.1
    assert _find_log_quantile(method=FedFA(choice="declared"), clock=clock) is None
    assert _find_log_quantile(method=FedFA(), clock=None) is None
    assert _find_log_quantile(method=HeteroFL(), clock=clock) is None


def test_log_readings_are_bounded_by_the_runs_limits_and_passed_to_the_method() -> None:
    clock = LogClock(start_s=0.0, step_s=60.0)
    low = LogLow(memory_budget_bytes=4000, downlink_bps=800.0)
    for context, expected in (
        (
            context_of(method=FedFA(), clock=clock, memory_limits=MemoryLimits(every_device="3000")),
            Budget(memory_bytes=3000, downlink_bytes=1000),
        ),
        (context_of(method=HeteroFL(), clock=clock), None),
    ):
        state, _ = step(context, measuring(context), replace(telemetry(context, "ada"), log_low=low), 2.0)
        assert state.clients["ada"].offer.lasting == expected
        assert build_question(context, state, state.clients["ada"]).lasting == expected


def test_programs_of_kept_sizes_are_checked_against_the_log_but_for_the_smallest() -> None:
    context = context_of(method=FedFA(), clock=LogClock(start_s=0.0, step_s=60.0))
    state = measuring(context)
    for name in CLIENTS:
        # By the cost estimates the largest fits; the plans of programs are known when they are written.
        low = LogLow(memory_budget_bytes=PLENTY_BYTES // 2)
        state, _ = step(context, state, replace(telemetry(context, name), log_low=low), 2.0)
    sizes = [size.architecture_id for size in context.space]
    assert size_of(state.clients["ada"]) == sizes[-1]
    whole, more = PLENTY_BYTES // 2, PLENTY_BYTES // 2 + 1
    fitting, _ = step(context, state, prepared(context, state, "ada", planned_peak_bytes=whole), 2.0)
    assert fitting.clients["ada"].stage == "out"
    for index in reversed(range(len(sizes) - 1)):
        state, _ = step(context, state, prepared(context, state, "ada", planned_peak_bytes=more), 2.0)
        assert size_of(state.clients["ada"]) == sizes[index]
    state, _ = step(context, state, prepared(context, state, "ada", planned_peak_bytes=more), 2.0)
    assert state.clients["ada"].stage == "out"
