"""Rounds in which a client does not answer."""

from dataclasses import replace
from types import MappingProxyType

from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    prepared,
    telemetry,
    update,
)

from subfleet.rounds.awaiting import get_punctuality
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import PUNCTUAL, Duty, Punctuality
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import AggregationRequest, RequestDone, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest
from subfleet.settings.sections import Deadlines

OTHERS = ("ada", "bob")
DEADLINES = Deadlines(measure_s=30.0, round_s=600.0, evaluate_s=300.0, deploy_s=300.0, lease_s=1e5)
CONTEXT = context_of(min_clients=2, rounds=40, deadlines=DEADLINES, deploy_targets=())
LOOSE = context_of(min_clients=2, rounds=40, deadlines=DEADLINES, deploy_targets=(), quorum=0.5)


def after_misses(count: int, *took_s: float) -> Punctuality:
    record = PUNCTUAL
    for seconds in took_s:
        record = record.after_answer(seconds)
    for _ in range(count):
        record = record.after_miss()
    return record


def with_record(state: RunState, name: str, duty: Duty, punctuality: Punctuality) -> RunState:
    member = replace(state.live.members[name], punctuality=MappingProxyType({duty: punctuality}))
    return replace(state, live=replace(state.live, members=state.live.members.with_items({name: member})))


def count_misses(state: RunState, name: str, duty: Duty = "training") -> int:
    return get_punctuality(state, name, duty).missed


def hand_out_tasks(context: RunContext, state: RunState, now_s: float, *names: str) -> RunState:
    """Clients report their telemetry, and each selected client is sent a task."""
    for name in names or CLIENTS:
        state, _ = step(context, state, telemetry(context, name, state.round, attempt=state.attempt), now_s)
    assert state.phase == "train"
    for name, client in sorted(state.clients.items()):
        if client.stage == "preparing":
            state, _ = step(context, state, prepared(context, state, name), now_s)
    return state


def train_clients(context: RunContext, state: RunState, now_s: float, *names: str) -> RunState:
    for name in names:
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            now_s,
        )
    return state


def aggregate_round(context: RunContext, state: RunState, now_s: float) -> RunState:
    assert state.phase == "aggregate"
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    return step(context, state, event, now_s)[0]


def tick(context: RunContext, state: RunState, now_s: float) -> RunState:
    return step(context, state, Tick(), now_s)[0]


def close_after(context: RunContext, state: RunState, seconds: float) -> RunState:
    """Return the state after the phase has closed, and check that it closes exactly after `seconds`."""
    phase, entered_s = state.phase, state.live.entered_s
    if seconds:
        state = tick(context, state, entered_s + seconds - 0.5)
        assert state.phase == phase
        state = tick(context, state, entered_s + seconds)
    assert state.phase != phase
    return state


def rounds_without_cyd(context: RunContext, count: int) -> RunState:
    """The others have answered in `count` rounds and cyd in none; the next round is open."""
    state, now_s = measuring(context), 2.0
    for _ in range(count):
        state = train_clients(context, hand_out_tasks(context, state, now_s), now_s, *OTHERS)
        now_s += context.config.deadlines.round_s
        state = tick(context, state, now_s) if state.phase == "train" else state
        state = aggregate_round(context, state, now_s)
    return state
