"""Extra clients, which no round waits for: they get tasks beside the selected ones, and delay nobody."""

from dataclasses import replace

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    join_client,
    measuring,
    prepared,
    telemetry,
)
from server.punctuality_cases import (
    CONTEXT,
    DEADLINES,
    OTHERS,
    after_misses,
    aggregate_round,
    close_after,
    count_misses,
    hand_out_tasks,
    tick,
    train_clients,
    with_record,
)
from server.test_calibration import with_calibration

from subfleet.methods.oort import Oort
from subfleet.methods.selector import Selection, SelectionContext
from subfleet.protocol.messages import Presence
from subfleet.rounds.awaiting import get_punctuality
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import Punctuality
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.state import RunState
from subfleet.testing.rounds import with_steps

# --- selection ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [None, Oort()])
@pytest.mark.parametrize("drawn_count", [1, 2])
def test_extras_are_asked_beside_the_selected_clients(method: Oort | None, drawn_count: int) -> None:
    settings = {} if method is None else {"method": method}
    context = context_of(min_clients=2, rounds=40, deadlines=DEADLINES, clients_per_round=drawn_count, **settings)
    state = measuring(context)
    for name in ("dan", "eve", "fay"):
        state = join_client(context, state, name, 1.0)
    everyone, extras = (*CLIENTS, "dan", "eve", "fay"), ("cyd", "dan", "eve")
    for name, count in zip(extras, (2, 8, 9), strict=True):
        state = with_record(state, name, "training", after_misses(count))
    plain = replace(
        state,
        live=replace(
            state.live, members=PersistentMap({name: state.live.members[name] for name in ("ada", "bob", "fay")})
        ),
    )
    state = hand_out_tasks(context, state, 2.0, *everyone)
    chosen = {name for name, client in state.clients.items() if client.stage == "out"}
    assert len(chosen & set(extras)) == drawn_count
    without = hand_out_tasks(context, plain, 2.0, "ada", "bob", "fay")
    assert chosen - set(extras) == {name for name, client in without.clients.items() if client.stage == "out"}
    assert len(chosen) == 2 * drawn_count


def test_where_only_extras_are_there_the_method_chooses_among_them() -> None:
    selections = list[tuple[str, ...]]()

    def last_two(selecting: SelectionContext) -> Selection:
        selections.append(tuple(client.client_id for client in selecting.clients))
        return Selection(clients=("bob", "cyd"), memory=selecting.memory)

    context = replace(CONTEXT, roles=with_steps(CONTEXT.roles, select=last_two))
    state = measuring(context)
    for name in CLIENTS:
        state = with_record(state, name, "training", after_misses(2))
    state = hand_out_tasks(context, state, 2.0)
    assert selections == [CLIENTS]
    assert {name for name, client in state.clients.items() if client.stage == "out"} == {"bob", "cyd"}


def test_all_take_part_in_a_round_that_measures_norms() -> None:
    context = context_of(
        **with_calibration(min_clients=2, rounds=4, calibrate_every=1, deadlines=DEADLINES, clients_per_round=1)
    )
    state = hand_out_tasks(context, measuring(context), 2.0)
    (drawn,) = (name for name, client in state.clients.items() if client.stage == "out")
    state = aggregate_round(context, train_clients(context, state, 3.0, drawn), 4.0)
    assert context.config.calibrates(state.round)
    for name in ("bob", "cyd"):
        state = with_record(state, name, "training", after_misses(2))
    state = hand_out_tasks(context, state, 5.0)
    assert {client.stage for client in state.clients.values()} == {"out"}
    state = train_clients(context, state, 6.0, "ada")
    assert (state.phase, count_misses(state, "cyd")) == ("aggregate", 3)


# --- telemetry ----------------------------------------------------------------------------------------------------


def report_all_but_cyd(context: RunContext, state: RunState, now_s: float) -> RunState:
    """All clients but cyd send telemetry; cyd sends a heartbeat."""
    for name in OTHERS:
        state, _ = step(context, state, telemetry(context, name, state.round), now_s)
    beat = Presence(client_id="cyd", session_id="cyd-1", online=True)
    return step(context, state, beat, now_s + 0.1)[0]


LATE = (30.0, "no telemetry came in time")
AFTER_ONE = "no answer came in 7.5 s; it has not answered the last announcement, and the round waits no longer"


@pytest.mark.parametrize(
    ("min_clients", "second"), [(2, (7.5, AFTER_ONE)), (3, LATE)], ids=["enough are there", "a round wants all"]
)
def test_an_announcement_waits_for_telemetry_until_its_deadline_once_and_a_quarter_once(
    min_clients: int, second: tuple[float, str]
) -> None:
    context = replace(CONTEXT, config=replace(CONTEXT.config, min_clients=min_clients))
    state = measuring(context)
    third = (0.0, "it has not answered the last 2 announcements, and the round does not wait for it")
    for count, (seconds, reason) in enumerate((LATE, second, third), 1):
        assert state.phase == "measure"
        state = report_all_but_cyd(context, state, state.live.entered_s)
        state = close_after(context, state, seconds) if seconds else state
        assert (state.phase, state.clients["cyd"].reason, count_misses(state, "cyd", "telemetry")) == (
            "train",
            reason,
            count,
        )
        for name in OTHERS:
            state, _ = step(context, state, prepared(context, state, name), state.live.entered_s)
        state = aggregate_round(
            context, train_clients(context, state, state.live.entered_s, *OTHERS), state.live.entered_s + 1
        )
        state, _ = step(
            context, state, Presence(client_id="cyd", session_id="cyd-1", online=True), state.live.entered_s
        )


def test_telemetry_resets_the_misses() -> None:
    state = with_record(measuring(CONTEXT), "cyd", "telemetry", after_misses(2))
    state, _ = step(CONTEXT, state, telemetry(CONTEXT, "cyd"), 3.0)
    assert get_punctuality(state, "cyd", "telemetry") == Punctuality(took_s=(2.0,))
    state, _ = step(CONTEXT, state, telemetry(CONTEXT, "ada"), 3.0)
    assert state.phase == "measure"


def test_an_announcement_that_nobody_answers_is_missed_by_nobody() -> None:
    state = tick(CONTEXT, measuring(CONTEXT), 31.0)
    assert not state.clients
    assert [count_misses(state, name, "telemetry") for name in CLIENTS] == [0, 0, 0]


def test_where_only_extras_are_there_an_announcement_waits_until_its_deadline() -> None:
    state = measuring(CONTEXT)
    for name in CLIENTS:
        state = with_record(state, name, "telemetry", after_misses(2))
    state = tick(CONTEXT, state, 30.5)
    assert state.phase == "measure"
    state, _ = step(CONTEXT, state, telemetry(CONTEXT, "cyd"), 30.5)
    assert state.phase == "train"
