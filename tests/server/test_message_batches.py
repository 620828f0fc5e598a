"""Messages that arrive together decide what they decide one after the other."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS, context_of, measuring, profile, refusal, telemetry, training

from subfleet.protocol.messages import Presence
from subfleet.rounds.coordinator import step
from subfleet.rounds.signals import Action, Event, Messages, Tick
from subfleet.rounds.state import RunState

PLAN = context_of()


def apply(state: RunState, *events: Event) -> tuple[RunState, list[Action]]:
    actions = list[Action]()
    for event in events:
        state, more = step(PLAN, state, event, 1.0)
        actions += more
    return state, actions


@given(st.permutations(CLIENTS), st.integers(0, len(CLIENTS)))
def test_telemetry(order: list[str], together: int) -> None:
    begun, messages = measuring(PLAN), [telemetry(PLAN, name) for name in order]
    one_by_one, replies = apply(begun, *messages, Tick())
    state, actions = apply(begun, Messages(messages=tuple(messages[:together])), *messages[together:], Tick())
    assert state == one_by_one
    assert len(actions) == len(replies)


def test_arrivals_and_refusals() -> None:
    joins = [
        message
        for name in CLIENTS
        for message in (Presence(client_id=name, session_id=f"{name}-1", online=True), profile(name))
    ]
    assert apply(RunState(), Messages(messages=tuple(joins)), Tick())[0] == apply(RunState(), *joins, Tick())[0]
    begun = training(PLAN)
    answers = [refusal(PLAN, begun, name) for name in CLIENTS]
    together, one_by_one = apply(begun, Messages(messages=tuple(answers)))[0], apply(begun, *answers)[0]
    assert together.phase == one_by_one.phase
    assert {name: client.refusals for name, client in together.clients.items()} == {
        name: client.refusals for name, client in one_by_one.clients.items()
    }


def test_heartbeats_move_nothing() -> None:
    state = measuring(PLAN)
    beats = [Presence(client_id=name, session_id=f"{name}-1", online=True) for name in CLIENTS]
    after, actions = apply(state, Messages(messages=tuple(beats)))
    assert actions == []
    assert replace(after, live=state.live) == state
