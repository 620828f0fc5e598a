"""Devices that fell silent: no round waits for them, and every round that they miss counts against participation."""

from dataclasses import replace
from types import MappingProxyType

import pytest
from server.coordinator_cases import (
    context_of,
    join_client,
    measuring,
    prepared,
    profile,
    run_with_members,
    telemetry,
    update,
)

from subfleet.journal.rows import build_round_record
from subfleet.link.traffic import Traffic
from subfleet.protocol.messages import Presence
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.members import list_expected
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.progress import Waiting
from subfleet.rounds.signals import AggregationRequest, Close, RequestDone, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest
from subfleet.settings.sections import Deadlines, LogClock

STRICT = context_of(min_clients=2, rounds=5)
OTHERS = ("ada", "bob")


def send_telemetry(context: RunContext, state: RunState, now_s: float, *names: str) -> RunState:
    """These clients send telemetry."""
    for name in names:
        state, _ = step(context, state, telemetry(context, name, state.round), now_s)
    return state


def close_round(context: RunContext, state: RunState, now_s: float, *names: str) -> tuple[RunState, Close]:
    """These clients train, and the round closes."""
    for name in names:
        state, _ = step(context, state, prepared(context, state, name), now_s)
    for name in names:
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            now_s,
        )
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    state, actions = step(context, state, event, now_s)
    return state, next(action for action in actions if isinstance(action, Close))


def report(context: RunContext, close: Close) -> tuple[float, dict[str, str]]:
    record = build_round_record(context, close, Traffic())
    return record.participation, {row.client_id: row.status for row in record.clients}


def after_a_miss(context: RunContext) -> tuple[RunState, Close, float]:
    """All clients joined, and one was not heard again in round 1."""
    state = send_telemetry(context, measuring(context), 2.0, *OTHERS)
    late = 2.0 + context.config.deadlines.measure_s
    state, _ = step(context, state, Tick(), late)
    assert state.phase == "train"
    return *close_round(context, state, late, *OTHERS), late


def presence(name: str, *, online: bool) -> Presence:
    return Presence(client_id=name, session_id=f"{name}-1", online=online)


def test_every_round_reports_silent_clients_without_waiting() -> None:
    state, close, now_s = after_a_miss(STRICT)
    assert report(STRICT, close)[0] == pytest.approx(2 / 3)
    for number in (2, 3):
        assert (state.phase, state.round) == ("measure", number)
        state = send_telemetry(STRICT, state, now_s, *OTHERS)
        assert state.phase == "train", "no client is awaited"
        state, close = close_round(STRICT, state, now_s, *OTHERS)
        share, rows = report(STRICT, close)
        assert share == pytest.approx(2 / 3)
        assert rows == dict.fromkeys(OTHERS, "aggregated") | {"cyd": "missing: it has been silent since round 1"}
    state, _ = step(STRICT, state, presence("cyd", online=True), now_s)
    assert "cyd" in list_expected(STRICT, state, now_s)
    _, close = close_round(STRICT, send_telemetry(STRICT, state, now_s, *OTHERS, "cyd"), now_s, *OTHERS, "cyd")
    assert report(STRICT, close)[0] == 1.0


def test_a_client_that_says_goodbye_is_not_silent() -> None:
    state, _, now_s = after_a_miss(STRICT)
    state, _ = step(STRICT, state, presence("cyd", online=False), now_s)
    _, close = close_round(STRICT, send_telemetry(STRICT, state, now_s, *OTHERS), now_s, *OTHERS)
    assert report(STRICT, close) == (1.0, dict.fromkeys(OTHERS, "aggregated"))


def test_silent_clients_open_no_round() -> None:
    context = context_of(min_clients=3, rounds=5)
    state = send_telemetry(context, measuring(context), 2.0, *OTHERS)
    late = 2.0 + context.config.deadlines.measure_s
    state, _ = step(context, state, Tick(), late)
    state, _ = close_round(context, state, late, *OTHERS)
    assert state.phase == "waiting"
    assert step(context, state, Tick(), late)[0].phase == "waiting"


def test_a_run_with_a_quorum_reports_clients_with_an_expired_lease() -> None:
    context = context_of(min_clients=2, rounds=5, quorum=0.99, deadlines=Deadlines(lease_s=5.0))
    state, _ = close_round(
        context, send_telemetry(context, measuring(context), 2.0, *OTHERS, "cyd"), 2.0, *OTHERS, "cyd"
    )
    assert (state.phase, state.round) == ("measure", 2)
    for name in OTHERS:
        state, _ = step(context, state, presence(name, online=True), 8.0)
    state = send_telemetry(context, state, 8.0, *OTHERS)
    _, close = close_round(context, state, 8.0, *OTHERS)
    share, rows = report(context, close)
    assert share == pytest.approx(2 / 3)
    assert rows["cyd"] == "missing: it has been silent since round 2"


def test_clients_of_a_journal_count_only_if_they_took_part_or_are_heard() -> None:
    """A run with a quorum does not wait for clients that only its journal knows."""
    context = context_of(min_clients=2, rounds=5, quorum=0.99)
    state, _ = close_round(
        context, send_telemetry(context, measuring(context), 2.0, *OTHERS, "cyd"), 2.0, *OTHERS, "cyd"
    )
    before = run_with_members(*map(profile, (*OTHERS, "cyd", "ghost")), noted_s=3.0)
    state = replace(
        state,
        at=Waiting(),
        round=1,
        profiles=before.profiles,
        live=replace(state.live, members=before.live.members),
        clients=MappingProxyType({}),
    )
    for name in OTHERS:
        state = join_client(context, state, name, 3.0)
    _, close = close_round(context, send_telemetry(context, state, 3.0, *OTHERS), 3.0, *OTHERS)
    assert report(context, close)[1] == dict.fromkeys(OTHERS, "aggregated") | {
        "cyd": "missing: it has been silent since round 2"
    }


def test_a_profile_alone_is_no_device() -> None:
    context = context_of(min_clients=2, rounds=5, quorum=0.99)
    state, _ = step(context, measuring(context), profile("ghost"), 2.0)
    _, close = close_round(context, send_telemetry(context, state, 2.0, *OTHERS, "cyd"), 2.0, *OTHERS, "cyd")
    assert "ghost" not in report(context, close)[1]


def test_a_client_that_never_took_part_is_forgotten_though_rounds_report_it() -> None:
    context = context_of(min_clients=2, rounds=5, deadlines=Deadlines(forget_s=100.0, round_s=1e4))
    state, _, now_s = after_a_miss(context)
    state = send_telemetry(context, state, now_s, *OTHERS)
    state, _ = step(context, state, Tick(), now_s + 101.0)
    assert state.phase == "train"
    assert set(state.live.members) == set(OTHERS)


def test_logs_are_replayed_at_once_despite_a_silent_client() -> None:
    context = context_of(min_clients=2, rounds=5, clock=LogClock(start_s=0.0, step_s=10.0))
    state, _, now_s = after_a_miss(context)
    for name in OTHERS:
        message = telemetry(context, name, state.round, memory_bytes=0)
        state, _ = step(context, state, message, now_s)
    assert (state.phase, state.attempt) == ("measure", 1)
    assert "cyd missing: it has been silent since round 1" in state.failed_attempts.waits_for
