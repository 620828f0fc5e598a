"""Clients that are alive but never answer: rounds wait until the deadline once, briefly once, and then no more."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    prepared,
    refusal,
    telemetry,
    update,
)
from server.punctuality_cases import (
    CONTEXT,
    DEADLINES,
    LOOSE,
    OTHERS,
    after_misses,
    aggregate_round,
    close_after,
    count_misses,
    hand_out_tasks,
    rounds_without_cyd,
    tick,
    train_clients,
    with_record,
)
from server.server_rig import World, config, fleet

from subfleet.protocol.answers import Answer
from subfleet.protocol.messages import Message, Presence
from subfleet.rounds.awaiting import get_punctuality
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import PUNCTUAL, Punctuality
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import RequestDone, Withdraw
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest
from subfleet.serving.attendance import is_unawaited
from subfleet.serving.narration import describe_step
from subfleet.settings.sections import Deadlines

# --- records ------------------------------------------------------------------------------------------------------


def test_after_the_second_miss_rounds_wait_only_at_powers_of_two_from_8_on() -> None:
    records = [after_misses(count) for count in range(70)]
    assert [count for count, record in enumerate(records) if record.awaited] == [0, 1, 8, 16, 32, 64]
    assert [count for count, record in enumerate(records) if not record.extra] == [0, 1]


@pytest.mark.parametrize(
    ("punctuality", "patience_s"),
    [
        (after_misses(0), 160.0),
        (after_misses(0, 1.0), 160.0),
        (after_misses(1), 40.0),
        (after_misses(8), 40.0),
        (after_misses(1, 30.0), 60.0),
        (after_misses(1, 30.0, 20.0), 60.0),
        (after_misses(1, 30.0, 20.0, 20.0, 20.0), 40.0),
        (after_misses(1, 1.0), 10.0),
        (after_misses(1, 90.0), 160.0),
    ],
)
def test_the_patience_follows_from_the_last_durations(punctuality: Punctuality, patience_s: float) -> None:
    assert punctuality.patience_s(160.0) == patience_s


def test_an_answer_resets_all_misses() -> None:
    assert after_misses(5, 3.0).after_answer(4.0) == Punctuality(missed=0, took_s=(3.0, 4.0))
    assert PUNCTUAL.after_answer(-1.0).took_s == (0.0,)


# --- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [CONTEXT, replace(CONTEXT, config=replace(CONTEXT.config, clients_per_round=3))])
def test_a_round_waits_until_its_deadline_once_and_a_quarter_once_and_then_no_longer(context: RunContext) -> None:
    state, now_s = measuring(context), 2.0
    reasons = (
        (600.0, "no answer came in time"),
        (150.0, "no answer came in 150 s; it has not answered its last task, and the round waits no longer"),
        (0.0, "it has not answered its last 2 tasks, and the round does not wait for it"),
        (0.0, "it has not answered its last 3 tasks, and the round does not wait for it"),
    )
    for count, (seconds, reason) in enumerate(reasons, 1):
        state = train_clients(context, hand_out_tasks(context, state, now_s), now_s, *OTHERS)
        state = close_after(context, state, seconds) if seconds else state
        assert (state.phase, state.clients["cyd"].stage, state.clients["cyd"].reason) == (
            "aggregate",
            "missing",
            reason,
        )
        assert (count_misses(state, "cyd"), count_misses(state, "ada")) == (count, 0)
        now_s += seconds + 1
        state = aggregate_round(context, state, now_s)
        assert state.phase == "measure"


def test_an_extra_is_waited_for_after_its_eighth_miss() -> None:
    state = with_record(measuring(CONTEXT), "cyd", "training", after_misses(7))
    state = train_clients(CONTEXT, hand_out_tasks(CONTEXT, state, 2.0), 3.0, *OTHERS)
    state = aggregate_round(CONTEXT, state, 4.0)
    state = train_clients(CONTEXT, hand_out_tasks(CONTEXT, state, 5.0), 6.0, *OTHERS)
    state = aggregate_round(CONTEXT, close_after(CONTEXT, state, 150.0), 160.0)
    assert train_clients(CONTEXT, hand_out_tasks(CONTEXT, state, 161.0), 162.0, *OTHERS).phase == "aggregate"


def test_patience_starts_with_the_task_and_follows_earlier_durations() -> None:
    state = hand_out_tasks(CONTEXT, measuring(CONTEXT), 2.0)
    state = train_clients(CONTEXT, state, 52.0, *CLIENTS)
    assert get_punctuality(state, "cyd", "training") == Punctuality(took_s=(50.0,))
    state = aggregate_round(CONTEXT, state, 60.0)
    state = train_clients(CONTEXT, hand_out_tasks(CONTEXT, state, 61.0), 62.0, *OTHERS)
    state = aggregate_round(CONTEXT, close_after(CONTEXT, state, 600.0), 700.0)
    for name in CLIENTS:
        state, _ = step(CONTEXT, state, telemetry(CONTEXT, name, state.round), 701.0)
    for name in CLIENTS:
        state, _ = step(CONTEXT, state, prepared(CONTEXT, state, name), 711.0)
    state = train_clients(CONTEXT, state, 712.0, *OTHERS)
    state = close_after(CONTEXT, state, 10.0 + 100.0)
    assert state.clients["cyd"].reason.startswith("no answer came in 100 s;")


def test_a_task_in_preparation_is_awaited_and_an_unsent_one_is_not_missed() -> None:
    state = with_record(measuring(CONTEXT), "cyd", "training", after_misses(1))
    for name in CLIENTS:
        state, _ = step(CONTEXT, state, telemetry(CONTEXT, name, state.round), 2.0)
    for name in OTHERS:
        state, _ = step(CONTEXT, state, prepared(CONTEXT, state, name), 2.0)
    state = close_after(CONTEXT, train_clients(CONTEXT, state, 3.0, *OTHERS), 600.0)
    assert (state.phase, count_misses(state, "cyd")) == ("aggregate", 1)


def test_a_timely_answer_of_an_extra_counts_and_makes_it_awaited_again() -> None:
    state = hand_out_tasks(CONTEXT, rounds_without_cyd(CONTEXT, 2), 1203.0)
    assert is_unawaited(state, "cyd")
    state = train_clients(CONTEXT, state, 1204.0, "ada", "cyd")
    assert (state.phase, state.clients["cyd"].stage, count_misses(state, "cyd")) == ("train", "done", 0)
    state = train_clients(CONTEXT, state, 1205.0, "bob")
    assert state.phase == "aggregate"
    state = aggregate_round(CONTEXT, state, 1206.0)
    state = train_clients(CONTEXT, hand_out_tasks(CONTEXT, state, 1207.0), 1208.0, *OTHERS)
    close_after(CONTEXT, state, 600.0)


def test_the_task_of_an_extra_is_withdrawn_when_the_round_closes() -> None:
    state = hand_out_tasks(CONTEXT, rounds_without_cyd(CONTEXT, 2), 1203.0)
    task = state.clients["cyd"].task
    assert task is not None
    state = train_clients(CONTEXT, state, 1204.0, "ada")
    _, actions = step(
        CONTEXT,
        state,
        RequestDone(request=CheckRequest(update=update(CONTEXT, state, "bob")), result=ChangeSize()),
        1205.0,
    )
    assert Withdraw(task_id=task.task_id) in actions


def test_a_refusal_does_not_reset_a_miss() -> None:
    """Otherwise a client that refuses one task and is silent about the next would cost a deadline in every round."""
    state = hand_out_tasks(CONTEXT, rounds_without_cyd(CONTEXT, 2), 1203.0)
    state, _ = step(CONTEXT, state, refusal(CONTEXT, state, "cyd"), 1204.0)
    assert state.clients["cyd"].stage == "preparing"
    state, _ = step(CONTEXT, state, prepared(CONTEXT, state, "cyd"), 1204.0)
    state = train_clients(CONTEXT, state, 1205.0, *OTHERS)
    assert (state.phase, count_misses(state, "cyd")) == ("aggregate", 3)


def test_a_round_of_extras_alone_waits_for_one_until_the_deadline() -> None:
    state = measuring(CONTEXT)
    for name in CLIENTS:
        state = with_record(state, name, "training", after_misses(3))
    state = hand_out_tasks(CONTEXT, state, 2.0)
    assert {client.stage for client in state.clients.values()} == {"out"}
    assert train_clients(CONTEXT, state, 500.0, "bob").phase == "aggregate"
    late = close_after(CONTEXT, state, 600.0)
    assert (late.phase, late.attempt, count_misses(late, "bob")) == ("waiting", 1, 3)


def test_a_round_that_nobody_answers_counts_as_no_miss() -> None:
    """The server itself may have been unreachable; otherwise the whole fleet would become extras."""
    late = close_after(CONTEXT, hand_out_tasks(CONTEXT, measuring(CONTEXT), 2.0), 600.0)
    assert (late.phase, late.attempt) == ("waiting", 1)
    assert [count_misses(late, name) for name in CLIENTS] == [0, 0, 0]


def test_an_extra_is_awaited_if_all_others_refuse() -> None:
    state = hand_out_tasks(CONTEXT, rounds_without_cyd(CONTEXT, 2), 1203.0)
    for name in OTHERS:
        refused = replace(state.clients[name], stage="refused", reason="no data")
        state = replace(state, clients=MappingProxyType({**state.clients, name: refused}))
    assert tick(CONTEXT, state, 1700.0).phase == "train"


def test_a_round_that_closes_at_its_quorum_has_not_waited_for_the_others() -> None:
    state = hand_out_tasks(LOOSE, measuring(LOOSE), 2.0)
    state = train_clients(LOOSE, state, 3.0, *OTHERS)
    assert (state.phase, count_misses(state, "cyd")) == ("aggregate", 0)
    assert state.clients["cyd"].reason == "the round closed at its quorum"


def test_a_quorum_is_a_fraction_of_the_awaited_clients() -> None:
    state = hand_out_tasks(LOOSE, with_record(measuring(LOOSE), "cyd", "training", after_misses(2)), 2.0)
    state = train_clients(LOOSE, state, 3.0, "ada")
    assert (state.phase, count_misses(state, "bob"), count_misses(state, "cyd")) == ("aggregate", 0, 3)


@pytest.mark.parametrize("farewell", ["it was stopped", ""])
def test_a_client_that_leaves_with_a_task_has_missed_it_with_its_reason(farewell: str) -> None:
    """Otherwise a client that says goodbye shortly before each deadline would cost a round its whole time."""
    state = train_clients(CONTEXT, hand_out_tasks(CONTEXT, measuring(CONTEXT), 2.0), 3.0, *OTHERS)
    goodbye = Presence(client_id="cyd", session_id="cyd-1", online=False, reason=farewell)
    state, _ = step(CONTEXT, state, goodbye, 590.0)
    state = tick(CONTEXT, state, 602.0)
    words = f"it said goodbye ({farewell})" if farewell else "the broker reported a broken connection (its will)"
    assert (state.phase, count_misses(state, "cyd")) == ("aggregate", 1)
    assert state.clients["cyd"].reason == f"no answer came in time: {words}"


def test_a_client_that_said_goodbye_in_a_loose_run_has_missed_its_task() -> None:
    state = train_clients(LOOSE, hand_out_tasks(LOOSE, measuring(LOOSE), 2.0), 3.0)
    state, _ = step(LOOSE, state, Presence(client_id="cyd", session_id="cyd-1", online=False, reason="off"), 4.0)
    assert state.clients["cyd"].stage == "missing"
    assert count_misses(train_clients(LOOSE, state, 5.0, *OTHERS), "cyd") == 1


def test_a_restart_does_not_reset_misses() -> None:
    state = rounds_without_cyd(CONTEXT, 2)
    state, _ = step(CONTEXT, state, Presence(client_id="cyd", session_id="cyd-2", online=True), 1204.0)
    assert count_misses(state, "cyd") == 2


# --- models, and messages to people -------------------------------------------------------------------------------


@pytest.mark.parametrize(("misses", "seconds"), [(0, 300.0), (1, 75.0), (3, 75.0)])
def test_deployments_are_awaited_briefly_after_missed_trainings(misses: int, seconds: float) -> None:
    context = context_of(min_clients=2, rounds=1, deadlines=DEADLINES, deploy_targets=("onnx",))
    state = train_clients(context, hand_out_tasks(context, measuring(context), 2.0), 3.0, *CLIENTS)
    state = aggregate_round(context, state, 4.0)
    assert state.phase == "deploy"
    for name in CLIENTS:
        known = after_misses(misses, 1.0) if name == "cyd" else after_misses(9)
        state = with_record(state, name, "training", known)
    for name in OTHERS:
        done = replace(state.clients[name], stage="done")
        state = replace(state, clients=MappingProxyType({**state.clients, name: done}))
    assert close_after(context, state, seconds).phase == "finished"


def sentences(before: RunState, after: RunState) -> Iterator[str]:
    return describe_step(CONTEXT, before, after)


def test_people_are_told_once_when_a_client_is_no_longer_awaited_and_when_it_is_again() -> None:
    state = hand_out_tasks(CONTEXT, measuring(CONTEXT), 2.0)
    messages, before = list[str](), state
    for count in range(12):
        state = with_record(state, "cyd", "training", after_misses(count))
        messages += sentences(before, state)
        before = state
    assert messages == [
        "client cyd has not answered its last 2 tasks; the run does not wait for it until it answers again"
    ]
    state = with_record(state, "cyd", "training", after_misses(0, 1.0))
    assert list(sentences(before, state)) == ["client cyd has answered its last task, and the run waits for it again"]


def test_a_screen_does_not_say_that_a_round_waits_for_an_extra() -> None:
    state = hand_out_tasks(CONTEXT, with_record(measuring(CONTEXT), "cyd", "training", after_misses(2)), 2.0)
    assert [is_unawaited(state, name) for name in CLIENTS] == [False, False, True]
    assert not is_unawaited(tick(CONTEXT, rounds_without_cyd(CONTEXT, 2), 1204.0), "cyd"), "it may still send telemetry"


def drop_answers(message: Message) -> Message | None:
    """It sends heartbeats and telemetry and accepts tasks, but never answers one."""
    return None if isinstance(message, Answer) else message


@pytest.mark.slow
def test_a_run_with_a_mute_device_has_short_rounds_from_the_third_on(tmp_path: Path) -> None:
    deadlines = Deadlines(join_s=1e4, measure_s=1e4, round_s=40.0, lease_s=1e4, linger_s=0.0)
    world = World(tmp_path, config(rounds=5, deploy_targets=(), deadlines=deadlines), fleet())
    world.devices["cyd"].behaviour.says = drop_answers
    world.run()
    seconds = [record.seconds or 0.0 for record in world.notes.records]
    assert len(seconds) == 5
    assert 40.0 <= seconds[0] < 50.0
    assert 10.0 <= seconds[1] < 20.0
    assert max(seconds[2:]) < 10.0
    assert {row.client_id: row.status for row in world.notes.records[-1].clients} == {
        "ada": "aggregated",
        "bob": "aggregated",
        "cyd": "missing: it has not answered its last 4 tasks, and the round does not wait for it",
    }
    assert sum("does not wait for it" in text for text in world.notes.messages) == 1
