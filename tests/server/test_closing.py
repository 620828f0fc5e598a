"""The end of a round, step by step: what is aggregated, what is aggregated again, and who is left out of the next
rounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import context_of, join_client, prepared, telemetry, update

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, Close, RequestDone, RequestFailed
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest
from subfleet.settings.sections import OutlierSettings

FOUR = ("ada", "bob", "cyd", "eve")
HONEST = {"ada": 1.0, "bob": 1.1, "cyd": 0.9}


def context(names: Sequence[str] = FOUR, *, outliers: Any = "exclude", **more: Any) -> RunContext:
    settings = OutlierSettings(outliers=outliers, **more)
    return context_of(min_clients=len(names), rounds=9, outliers=settings)


def answered(context: RunContext, state: RunState, names: Sequence[str], now_s: float) -> RunState:
    """The open round is announced, and all have told what they can give."""
    for name in names:
        state = join_client(context, state, name, now_s)
    assert state.phase == "measure"
    for name in names:
        state, _ = step(context, state, telemetry(context, name, state.round, attempt=state.attempt), now_s)
    return state


def trained(
    context: RunContext, state: RunState, changes: Mapping[str, float], *, now_s: float = 2.0
) -> tuple[RunState, tuple[Action, ...]]:
    """Everybody has answered a round, and sent a change of a size where it was given a task."""
    state = answered(context, state, tuple(changes), now_s)
    given = [name for name, client in state.clients.items() if client.open]
    for name in given:
        state, _ = step(context, state, prepared(context, state, name), now_s)
    actions: tuple[Action, ...] = ()
    for name in given:
        stored = RequestDone(
            request=CheckRequest(update=update(context, state, name)), result=ChangeSize(weights=changes[name])
        )
        state, actions = step(context, state, stored, now_s)
    return state, actions


def after(context: RunContext, state: RunState, loss: float, now_s: float = 3.0) -> tuple[RunState, tuple[Action, ...]]:
    """The round is aggregated and evaluated."""
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=loss, sha256="a" * 64, refused={}),
    )
    return step(context, state, event, now_s)


def aggregation(actions: tuple[Action, ...]) -> list[str]:
    """Whose updates are aggregated."""
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    return [client.client_id for client in aggregate.clients]


def closed(actions: tuple[Action, ...]) -> dict[str, str]:
    """The clients of a closed round, each with what became of it."""
    (close,) = [action for action in actions if isinstance(action, Close)]
    return {
        client.client_id: f"{client.stage}: {client.reason}" if client.reason else client.stage
        for client in close.clients
    }


def test_a_change_far_outside_is_not_aggregated_and_costs_three_rounds() -> None:
    four = context()
    state, actions = trained(four, RunState(), {**HONEST, "eve": 1e6})
    assert aggregation(actions) == ["ada", "bob", "cyd"]
    why = "its change of weights is 1e+06 times the median of the round, but may be 5 times at most"
    state, actions = after(four, state, 1.0)
    assert closed(actions) == {"ada": "done", "bob": "done", "cyd": "done", "eve": f"refused: {why}"}
    for number in (2, 3, 4):
        state, actions = trained(four, state, {**HONEST, "eve": 1.0})
        assert state.round == number
        assert aggregation(actions) == ["ada", "bob", "cyd"]
        state, actions = after(four, state, 1.0)
        assert closed(actions)["eve"] == f"skipped: left out until round 4: in round 1 {why}"
    state, actions = trained(four, state, {**HONEST, "eve": 1.0})
    assert state.outliers.excluded == {}
    assert aggregation(actions) == ["ada", "bob", "cyd", "eve"]


def test_with_no_rounds_of_exclusion_the_next_round_is_open_to_it() -> None:
    four = context(exclusion_rounds=0)
    state, _ = trained(four, RunState(), {**HONEST, "eve": 1e6})
    state, _ = after(four, state, 1.0)
    _, actions = trained(four, state, {**HONEST, "eve": 1.0})
    assert aggregation(actions) == list(FOUR)


def test_fewer_than_four_are_held_against_the_last_rounds() -> None:
    three = context(FOUR[1:], remembered_rounds=2)
    state = RunState()
    for size in (1e6, 1.0, 2.0):
        state, actions = trained(three, state, dict.fromkeys(FOUR[1:], size))
        assert len(aggregation(actions)) == 3
        state, _ = after(three, state, 1.0)
    assert [size.weights for size in state.outliers.changes] == [1.0, 2.0]
    _, actions = trained(three, state, {"bob": 1.0, "cyd": 1.0, "eve": 10.1})
    assert aggregation(actions) == ["bob", "cyd"]


def test_where_all_are_far_outside_nobody_is_to_blame() -> None:
    three = context(FOUR[1:])
    state, _ = trained(three, RunState(), dict.fromkeys(FOUR[1:], 1.0))
    state, _ = after(three, state, 1.0)
    state, actions = trained(three, state, dict.fromkeys(FOUR[1:], 1e6))
    assert not [action for action in actions if isinstance(action, (AggregationRequest, Close))]
    assert (state.phase, state.round, state.aggregated_round, state.attempt) == ("waiting", 2, 1, 1)
    assert state.outliers.excluded == {}
    assert (
        "bob, cyd, eve refused: its change of weights is 1e+06 times that of the last rounds"
        in state.failed_attempts.waits_for
    )


@pytest.mark.parametrize(
    ("told", "claimed", "scaled"), [(50, 50, False), (49, 49, True), (10, 2**40, True), (2**40, 10, True)]
)
def test_samples_that_an_update_counts_tell_whether_its_training_was_long(
    told: int, claimed: int, scaled: bool
) -> None:
    """Five times the ten of the others; what is smaller than the weights is then not far."""
    settings, training = OutlierSettings(outliers="scale"), TrainingSettings(batch_size=64)  # one step for all
    four = context_of(min_clients=4, rounds=9, outliers=settings, training=training)
    state = answered(four, RunState(), FOUR, 2.0)
    for name in FOUR:
        state, _ = step(four, state, prepared(four, state, name), 2.0)
    eve = replace(state.clients["eve"], offer=replace(state.clients["eve"].offer, sample_count=told))
    state = replace(state, clients=MappingProxyType({**state.clients, "eve": eve}))
    actions: tuple[Action, ...] = ()
    for name in FOUR:
        far = name == "eve"
        sent = replace(update(four, state, name), sample_count=claimed) if far else update(four, state, name)
        change = ChangeSize(weights=0.9 if far else 0.01, held_weights=1.0)
        state, actions = step(four, state, RequestDone(request=CheckRequest(update=sent), result=change), 2.0)
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    assert [client.client_id for client in aggregate.clients if client.scale < 1] == (["eve"] if scaled else [])
    trained = state.clients["ada"].trained
    assert trained is not None
    assert trained.change.samples == 0, "it follows from the rest, and is in no journal twice"


@pytest.mark.parametrize(("outliers", "scale"), [("auto", 5e-6**4), ("scale", 5e-6**4), ("report", 1.0), ("off", 1.0)])
def test_a_change_far_outside_is_aggregated_as_the_run_says(outliers: str, scale: float) -> None:
    four = context(outliers=outliers)
    state, actions = trained(four, RunState(), {**HONEST, "eve": 1e6})
    assert aggregation(actions) == list(FOUR)
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    assert {client.client_id: client.scale for client in aggregate.clients} == {
        **dict.fromkeys(HONEST, 1.0),
        "eve": pytest.approx(scale),
    }
    why = {client.client_id: client.outlier for client in aggregate.clients if client.outlier}
    said = "its change of weights is 1e+06 times the median of the round, but may be 5 times at most"
    assert why == ({} if outliers == "off" else {"eve": said})
    state, actions = after(four, state, 1.0)
    assert set(closed(actions).values()) == {"done"}
    assert state.outliers.excluded == {}


def test_where_all_are_far_outside_all_are_scaled_alike() -> None:
    three = context(FOUR[1:], outliers="scale")
    state, _ = trained(three, RunState(), dict.fromkeys(FOUR[1:], 1.0))
    state, _ = after(three, state, 1.0)
    _, actions = trained(three, state, dict.fromkeys(FOUR[1:], 20.0))
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    assert [client.scale for client in aggregate.clients] == [0.25**4] * 3


@pytest.mark.parametrize(
    ("outliers", "loss", "goes_on"), [("report", 1e9, True), ("off", 1e9, True), ("off", math.nan, False)]
)
def test_where_nobody_may_be_left_out_a_round_that_diverged_stands_or_falls_as_a_whole(
    outliers: str, loss: float, goes_on: bool
) -> None:
    four = context(outliers=outliers)
    state, _ = trained(four, RunState(), {**HONEST, "eve": 9.0})
    state, actions = after(four, state, loss)
    assert not [action for action in actions if isinstance(action, AggregationRequest)]
    assert [action for action in actions if isinstance(action, Close)] == (list(actions[:1]) if goes_on else [])
    assert state.aggregated_round == (1 if goes_on else 0)


@pytest.mark.slow
def test_a_server_that_dies_before_a_scaled_aggregate_aggregates_with_the_same_scale(tmp_path: Path) -> None:
    four = context(outliers="scale")
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=9))
    state, actions = trained(four, RunState(), {**HONEST, "eve": 77.7})
    journal.save(RunState(), state)
    assert list_resume_actions(four, journal.load(9.0)) == tuple(
        one for one in actions if isinstance(one, AggregationRequest)
    )
    assert 0 < state.clients["eve"].scale < 1


@pytest.mark.parametrize("loss", [math.nan, math.inf, 12.0])
def test_a_aggregate_that_diverged_is_done_again_without_the_most_suspect(loss: float) -> None:
    three = context(FOUR[1:])
    state, actions = trained(three, RunState(), {"bob": 1.0, "cyd": 1.1, "eve": 9.0})
    assert aggregation(actions) == ["bob", "cyd", "eve"]
    state, actions = after(three, state, loss)
    assert aggregation(actions) == ["bob", "cyd"]
    assert (state.phase, state.aggregated_round) == ("aggregate", 0)
    state, actions = after(three, state, 1.0)
    said = closed(actions)
    assert (said["bob"], said["cyd"]) == ("done", "done")
    assert said["eve"].startswith(f"refused: the model diverged to a loss of {loss:.3g}")
    assert said["eve"].endswith(", but not without it")
    assert set(state.last) == {"bob", "cyd"}
    assert set(state.outliers.excluded) == {"eve"}
    _, actions = trained(three, state, dict.fromkeys(FOUR[1:], 1.0))
    assert aggregation(actions) == ["bob", "cyd"]


def test_suspects_are_twice_as_many_each_time_and_in_the_order_of_their_change() -> None:
    names = tuple("abcdefgh")
    eight = context(names, outliers="scale")
    state, actions = trained(eight, RunState(), {name: float(place) for place, name in enumerate(names, 1)})
    assert aggregation(actions) == list(names)
    for left in ("abcdefg", "abcdef", "abcd"):
        state, actions = after(eight, state, math.nan)
        assert aggregation(actions) == list(left)
    state, actions = after(eight, state, 1.0)
    assert [name for name, said in closed(actions).items() if said == "done"] == list("abcd")
    assert closed(actions)["h"].endswith("but not without 4 suspects")
    assert set(state.outliers.excluded) == set("efgh")


def test_a_model_that_diverges_whoever_is_left_out_ends_a_run_after_a_few_tries() -> None:
    three = context(FOUR[1:])
    state = RunState()
    for number in (1, 2, 3):
        state, actions = trained(three, state, dict.fromkeys(FOUR[1:], 1.0), now_s=100.0 * number)
        while state.phase == "aggregate":
            state, actions = after(three, state, math.nan, 100.0 * number)
        assert not [action for action in actions if isinstance(action, Close)]
        assert state.outliers.excluded == {}
        assert (state.aggregated_round, state.round) == (0, 1)
    assert state.phase == "failed"
    assert state.failure == (
        "round 1 could not be aggregated in 3 attempts (bob, cyd, eve refused: the model diverged to a loss of nan, "
        "whichever updates were left out); lower the learning rate and begin a new run, or repair the devices and "
        "start the server again"
    )
    assert state.outliers.spoiled == 0


def test_a_round_that_can_be_aggregated_forgets_the_tries_before() -> None:
    three = context(FOUR[1:])
    state, _ = trained(three, RunState(), dict.fromkeys(FOUR[1:], 1.0), now_s=100.0)
    while state.phase == "aggregate":
        state, _ = after(three, state, math.nan, 100.0)
    assert state.outliers.spoiled == 1
    state, _ = trained(three, state, dict.fromkeys(FOUR[1:], 1.0), now_s=200.0)
    state, _ = after(three, state, 1.0, 200.0)
    assert (state.aggregated_round, state.outliers.spoiled) == (1, 0)


def test_a_loss_is_held_against_the_last_one() -> None:
    four = context()
    state, _ = trained(four, RunState(), {**HONEST, "eve": 1.0})
    state, _ = after(four, state, 8.0)
    assert state.outliers.loss == 8.0
    state, _ = trained(four, state, {**HONEST, "eve": 1.0})
    state, actions = after(four, state, 79.0)
    assert set(closed(actions).values()) == {"done"}


@pytest.mark.slow
def test_a_server_that_dies_between_two_aggregates_aggregates_again_what_is_left(tmp_path: Path) -> None:
    three = context(FOUR[1:])
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=9))
    state, _ = trained(three, RunState(), {"bob": 1.0, "cyd": 1.1, "eve": 9.0})
    journal.save(RunState(), state)
    diverged, _ = after(three, state, math.nan)
    journal.save(state, diverged)
    loaded = journal.load(9.0)
    assert loaded.clients == diverged.clients
    assert aggregation(list_resume_actions(three, loaded)) == ["bob", "cyd"]
    ended, actions = after(three, replace(loaded, live=replace(loaded.live, members=diverged.live.members)), 1.0)
    journal.save(loaded, ended)
    assert journal.load(9.0).outliers == ended.outliers
    assert set(ended.outliers.excluded) == {"eve"}
    assert ended.outliers.loss == 1.0
    assert closed(actions)["eve"].startswith("refused: the model diverged")


def test_a_aggregate_that_cannot_be_made_is_made_without_the_most_suspect() -> None:
    four = context()
    state, actions = trained(four, RunState(), {"ada": 1.0, "bob": 1.1, "cyd": 1.0, "dan": 3.0})
    assert aggregation(actions) == ["ada", "bob", "cyd", "dan"]
    state, actions = step(
        four,
        state,
        RequestFailed(request=AggregationRequest(round=1, clients=()), reason="aggregation failed: KeyError: 'x'"),
        3.0,
    )
    assert aggregation(actions) == ["ada", "bob", "cyd"]
    state, actions = after(four, state, 1.0)
    assert closed(actions)["dan"].startswith("refused: aggregation failed: KeyError: 'x', but not without it")


def test_a_aggregate_that_cannot_be_made_whoever_is_left_out_ends_a_try_and_not_the_run() -> None:
    four = context()
    state, _ = trained(four, RunState(), {"ada": 1.0, "bob": 1.1, "cyd": 1.0, "dan": 1.0})
    for _ in range(5):
        state, _ = step(
            four,
            state,
            RequestFailed(request=AggregationRequest(round=1, clients=()), reason="aggregation failed: MemoryError"),
            3.0,
        )
    assert (state.phase, state.attempt, state.failure) == ("waiting", 1, "")
    assert "MemoryError" in state.failed_attempts.waits_for
    late, actions = step(
        four, state, RequestFailed(request=AggregationRequest(round=1, clients=()), reason="too late"), 4.0
    )
    assert (late.failed_attempts, actions) == (state.failed_attempts, ())
