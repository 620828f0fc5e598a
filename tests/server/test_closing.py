"""The end of a round, step by step: aggregation, repeated aggregation, and exclusion from the next rounds."""

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


def context_for(names: Sequence[str] = FOUR, *, outliers: Any = "exclude", **more: Any) -> RunContext:
    settings = OutlierSettings(outliers=outliers, **more)
    return context_of(min_clients=len(names), rounds=9, outliers=settings)


def measure_round(context: RunContext, state: RunState, names: Sequence[str], now_s: float) -> RunState:
    """Announce the open round; every client reports its telemetry."""
    for name in names:
        state = join_client(context, state, name, now_s)
    assert state.phase == "measure"
    for name in names:
        state, _ = step(context, state, telemetry(context, name, state.round, attempt=state.attempt), now_s)
    return state


def train_round(
    context: RunContext, state: RunState, change_sizes: Mapping[str, float], *, now_s: float = 2.0
) -> tuple[RunState, tuple[Action, ...]]:
    """Every client has answered a round; each with a task has sent a change of the given size."""
    state = measure_round(context, state, tuple(change_sizes), now_s)
    participants = [name for name, client in state.clients.items() if client.open]
    for name in participants:
        state, _ = step(context, state, prepared(context, state, name), now_s)
    actions: tuple[Action, ...] = ()
    for name in participants:
        stored = RequestDone(
            request=CheckRequest(update=update(context, state, name)), result=ChangeSize(weights=change_sizes[name])
        )
        state, actions = step(context, state, stored, now_s)
    return state, actions


def finish_round(
    context: RunContext, state: RunState, loss: float, now_s: float = 3.0
) -> tuple[RunState, tuple[Action, ...]]:
    """Aggregate and evaluate the round."""
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=loss, sha256="a" * 64, refused={}),
    )
    return step(context, state, event, now_s)


def list_aggregated(actions: tuple[Action, ...]) -> list[str]:
    """Return the clients of the requested aggregation."""
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    return [client.client_id for client in aggregate.clients]


def list_outcomes(actions: tuple[Action, ...]) -> dict[str, str]:
    """Return the outcome of each client of a closed round."""
    (close,) = [action for action in actions if isinstance(action, Close)]
    return {
        client.client_id: f"{client.stage}: {client.reason}" if client.reason else client.stage
        for client in close.clients
    }


def test_a_change_far_outside_is_not_aggregated_and_costs_three_rounds() -> None:
    context = context_for()
    state, actions = train_round(context, RunState(), {**HONEST, "eve": 1e6})
    assert list_aggregated(actions) == ["ada", "bob", "cyd"]
    why = "its change of weights is 1e+06 times the median of the round; the limit is 5 times"
    state, actions = finish_round(context, state, 1.0)
    assert list_outcomes(actions) == {"ada": "done", "bob": "done", "cyd": "done", "eve": f"refused: {why}"}
    for number in (2, 3, 4):
        state, actions = train_round(context, state, {**HONEST, "eve": 1.0})
        assert state.round == number
        assert list_aggregated(actions) == ["ada", "bob", "cyd"]
        state, actions = finish_round(context, state, 1.0)
        assert list_outcomes(actions)["eve"] == f"skipped: left out until round 4: in round 1 {why}"
    state, actions = train_round(context, state, {**HONEST, "eve": 1.0})
    assert state.outliers.excluded == {}
    assert list_aggregated(actions) == ["ada", "bob", "cyd", "eve"]


def test_with_no_rounds_of_exclusion_the_next_round_is_open_to_it() -> None:
    context = context_for(exclusion_rounds=0)
    state, _ = train_round(context, RunState(), {**HONEST, "eve": 1e6})
    state, _ = finish_round(context, state, 1.0)
    _, actions = train_round(context, state, {**HONEST, "eve": 1.0})
    assert list_aggregated(actions) == list(FOUR)


def test_fewer_than_four_changes_are_compared_with_the_last_rounds() -> None:
    context = context_for(FOUR[1:], remembered_rounds=2)
    state = RunState()
    for size in (1e6, 1.0, 2.0):
        state, actions = train_round(context, state, dict.fromkeys(FOUR[1:], size))
        assert len(list_aggregated(actions)) == 3
        state, _ = finish_round(context, state, 1.0)
    assert [size.weights for size in state.outliers.changes] == [1.0, 2.0]
    _, actions = train_round(context, state, {"bob": 1.0, "cyd": 1.0, "eve": 10.1})
    assert list_aggregated(actions) == ["bob", "cyd"]


def test_where_all_are_far_outside_nobody_is_to_blame() -> None:
    context = context_for(FOUR[1:])
    state, _ = train_round(context, RunState(), dict.fromkeys(FOUR[1:], 1.0))
    state, _ = finish_round(context, state, 1.0)
    state, actions = train_round(context, state, dict.fromkeys(FOUR[1:], 1e6))
    assert not [action for action in actions if isinstance(action, (AggregationRequest, Close))]
    assert (state.phase, state.round, state.aggregated_round, state.attempt) == ("waiting", 2, 1, 1)
    assert state.outliers.excluded == {}
    assert (
        "bob, cyd, eve refused: its change of weights is 1e+06 times that of the last rounds"
        in state.failed_attempts.waits_for
    )


@pytest.mark.parametrize(
    ("announced", "claimed", "scaled"), [(50, 50, False), (49, 49, True), (10, 2**40, True), (2**40, 10, True)]
)
def test_the_samples_of_an_update_limit_the_size_of_its_change(announced: int, claimed: int, scaled: bool) -> None:
    """From five times the samples of the others on, a change smaller than the weights is not far outside."""
    settings, training = OutlierSettings(outliers="scale"), TrainingSettings(batch_size=64)  # one step for every client
    context = context_of(min_clients=4, rounds=9, outliers=settings, training=training)
    state = measure_round(context, RunState(), FOUR, 2.0)
    for name in FOUR:
        state, _ = step(context, state, prepared(context, state, name), 2.0)
    eve = replace(state.clients["eve"], offer=replace(state.clients["eve"].offer, sample_count=announced))
    state = replace(state, clients=MappingProxyType({**state.clients, "eve": eve}))
    actions: tuple[Action, ...] = ()
    for name in FOUR:
        far = name == "eve"
        answer = replace(update(context, state, name), sample_count=claimed) if far else update(context, state, name)
        change = ChangeSize(weights=0.9 if far else 0.01, held_weights=1.0)
        state, actions = step(context, state, RequestDone(request=CheckRequest(update=answer), result=change), 2.0)
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    assert [client.client_id for client in aggregate.clients if client.scale < 1] == (["eve"] if scaled else [])
    trained = state.clients["ada"].trained
    assert trained is not None
    assert trained.change.samples == 0, "it follows from other fields, and is not journaled twice"


@pytest.mark.parametrize(("outliers", "scale"), [("auto", 5e-6**4), ("scale", 5e-6**4), ("report", 1.0), ("off", 1.0)])
def test_a_change_far_outside_is_aggregated_as_configured(outliers: str, scale: float) -> None:
    context = context_for(outliers=outliers)
    state, actions = train_round(context, RunState(), {**HONEST, "eve": 1e6})
    assert list_aggregated(actions) == list(FOUR)
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    assert {client.client_id: client.scale for client in aggregate.clients} == {
        **dict.fromkeys(HONEST, 1.0),
        "eve": pytest.approx(scale),
    }
    reasons = {client.client_id: client.outlier for client in aggregate.clients if client.outlier}
    reason = "its change of weights is 1e+06 times the median of the round; the limit is 5 times"
    assert reasons == ({} if outliers == "off" else {"eve": reason})
    state, actions = finish_round(context, state, 1.0)
    assert set(list_outcomes(actions).values()) == {"done"}
    assert state.outliers.excluded == {}


def test_where_all_are_far_outside_all_are_scaled_alike() -> None:
    context = context_for(FOUR[1:], outliers="scale")
    state, _ = train_round(context, RunState(), dict.fromkeys(FOUR[1:], 1.0))
    state, _ = finish_round(context, state, 1.0)
    _, actions = train_round(context, state, dict.fromkeys(FOUR[1:], 20.0))
    (aggregate,) = [action for action in actions if isinstance(action, AggregationRequest)]
    assert [client.scale for client in aggregate.clients] == [0.25**4] * 3


@pytest.mark.parametrize(
    ("outliers", "loss", "goes_on"), [("report", 1e9, True), ("off", 1e9, True), ("off", math.nan, False)]
)
def test_a_diverged_round_stands_or_falls_as_a_whole_if_nobody_may_be_left_out(
    outliers: str, loss: float, goes_on: bool
) -> None:
    context = context_for(outliers=outliers)
    state, _ = train_round(context, RunState(), {**HONEST, "eve": 9.0})
    state, actions = finish_round(context, state, loss)
    assert not [action for action in actions if isinstance(action, AggregationRequest)]
    assert [action for action in actions if isinstance(action, Close)] == (list(actions[:1]) if goes_on else [])
    assert state.aggregated_round == (1 if goes_on else 0)


@pytest.mark.slow
def test_a_server_that_dies_before_a_scaled_aggregation_repeats_it_with_the_same_scale(tmp_path: Path) -> None:
    context = context_for(outliers="scale")
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=9))
    state, actions = train_round(context, RunState(), {**HONEST, "eve": 77.7})
    journal.save(RunState(), state)
    assert list_resume_actions(context, journal.load(9.0)) == tuple(
        action for action in actions if isinstance(action, AggregationRequest)
    )
    assert 0 < state.clients["eve"].scale < 1


@pytest.mark.parametrize("loss", [math.nan, math.inf, 12.0])
def test_an_aggregation_that_diverged_is_repeated_without_the_most_suspect(loss: float) -> None:
    context = context_for(FOUR[1:])
    state, actions = train_round(context, RunState(), {"bob": 1.0, "cyd": 1.1, "eve": 9.0})
    assert list_aggregated(actions) == ["bob", "cyd", "eve"]
    state, actions = finish_round(context, state, loss)
    assert list_aggregated(actions) == ["bob", "cyd"]
    assert (state.phase, state.aggregated_round) == ("aggregate", 0)
    state, actions = finish_round(context, state, 1.0)
    outcomes = list_outcomes(actions)
    assert (outcomes["bob"], outcomes["cyd"]) == ("done", "done")
    assert outcomes["eve"].startswith(f"refused: the model diverged to a loss of {loss:.3g}")
    assert outcomes["eve"].endswith("; the round succeeded without this update")
    assert set(state.last) == {"bob", "cyd"}
    assert set(state.outliers.excluded) == {"eve"}
    _, actions = train_round(context, state, dict.fromkeys(FOUR[1:], 1.0))
    assert list_aggregated(actions) == ["bob", "cyd"]


def test_suspects_double_each_time_in_the_order_of_their_change() -> None:
    names = tuple("abcdefgh")
    context = context_for(names, outliers="scale")
    state, actions = train_round(context, RunState(), {name: float(size) for size, name in enumerate(names, 1)})
    assert list_aggregated(actions) == list(names)
    for remaining in ("abcdefg", "abcdef", "abcd"):
        state, actions = finish_round(context, state, math.nan)
        assert list_aggregated(actions) == list(remaining)
    state, actions = finish_round(context, state, 1.0)
    assert [name for name, outcome in list_outcomes(actions).items() if outcome == "done"] == list("abcd")
    assert list_outcomes(actions)["h"].endswith("the round succeeded without 4 suspect updates")
    assert set(state.outliers.excluded) == set("efgh")


def test_a_model_that_diverges_whoever_is_left_out_ends_a_run_after_three_attempts() -> None:
    context = context_for(FOUR[1:])
    state = RunState()
    for number in (1, 2, 3):
        state, actions = train_round(context, state, dict.fromkeys(FOUR[1:], 1.0), now_s=100.0 * number)
        while state.phase == "aggregate":
            state, actions = finish_round(context, state, math.nan, 100.0 * number)
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


def test_a_successful_aggregation_forgets_the_attempts_before() -> None:
    context = context_for(FOUR[1:])
    state, _ = train_round(context, RunState(), dict.fromkeys(FOUR[1:], 1.0), now_s=100.0)
    while state.phase == "aggregate":
        state, _ = finish_round(context, state, math.nan, 100.0)
    assert state.outliers.spoiled == 1
    state, _ = train_round(context, state, dict.fromkeys(FOUR[1:], 1.0), now_s=200.0)
    state, _ = finish_round(context, state, 1.0, 200.0)
    assert (state.aggregated_round, state.outliers.spoiled) == (1, 0)


def test_a_loss_is_compared_with_the_last_one() -> None:
    context = context_for()
    state, _ = train_round(context, RunState(), {**HONEST, "eve": 1.0})
    state, _ = finish_round(context, state, 8.0)
    assert state.outliers.loss == 8.0
    state, _ = train_round(context, state, {**HONEST, "eve": 1.0})
    state, actions = finish_round(context, state, 79.0)
    assert set(list_outcomes(actions).values()) == {"done"}


@pytest.mark.slow
def test_a_server_that_dies_between_two_aggregations_aggregates_the_remaining_updates(tmp_path: Path) -> None:
    context = context_for(FOUR[1:])
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=9))
    state, _ = train_round(context, RunState(), {"bob": 1.0, "cyd": 1.1, "eve": 9.0})
    journal.save(RunState(), state)
    diverged, _ = finish_round(context, state, math.nan)
    journal.save(state, diverged)
    loaded = journal.load(9.0)
    assert loaded.clients == diverged.clients
    assert list_aggregated(list_resume_actions(context, loaded)) == ["bob", "cyd"]
    ended, actions = finish_round(
        context, replace(loaded, live=replace(loaded.live, members=diverged.live.members)), 1.0
    )
    journal.save(loaded, ended)
    assert journal.load(9.0).outliers == ended.outliers
    assert set(ended.outliers.excluded) == {"eve"}
    assert ended.outliers.loss == 1.0
    assert list_outcomes(actions)["eve"].startswith("refused: the model diverged")


def test_an_aggregation_that_fails_is_repeated_without_the_most_suspect() -> None:
    context = context_for()
    state, actions = train_round(context, RunState(), {"ada": 1.0, "bob": 1.1, "cyd": 1.0, "dan": 3.0})
    assert list_aggregated(actions) == ["ada", "bob", "cyd", "dan"]
    state, actions = step(
        context,
        state,
        RequestFailed(request=AggregationRequest(round=1, clients=()), reason="aggregation failed: KeyError: 'x'"),
        3.0,
    )
    assert list_aggregated(actions) == ["ada", "bob", "cyd"]
    state, actions = finish_round(context, state, 1.0)
    assert list_outcomes(actions)["dan"].startswith(
        "refused: aggregation failed: KeyError: 'x'; the round succeeded without"
    )


def test_an_aggregation_that_fails_whoever_is_left_out_ends_an_attempt_and_not_the_run() -> None:
    context = context_for()
    state, _ = train_round(context, RunState(), {"ada": 1.0, "bob": 1.1, "cyd": 1.0, "dan": 1.0})
    for _ in range(5):
        state, _ = step(
            context,
            state,
            RequestFailed(request=AggregationRequest(round=1, clients=()), reason="aggregation failed: MemoryError"),
            3.0,
        )
    assert (state.phase, state.attempt, state.failure) == ("waiting", 1, "")
    assert "MemoryError" in state.failed_attempts.waits_for
    late, actions = step(
        context, state, RequestFailed(request=AggregationRequest(round=1, clients=()), reason="too late"), 4.0
    )
    assert (late.failed_attempts, actions) == (state.failed_attempts, ())
