"""Costs of training: recorded for each client when a round closes, and summed over the rounds of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS, context_of, prepared, profile, telemetry, update
from server.server_rig import World, config, fleet

from subfleet.elastic.cost import estimate_cost
from subfleet.journal.records import ClientRow, RoundRecord, RunResult
from subfleet.journal.rows import build_round_record
from subfleet.journal.totals import RunCosts, Timing, sum_costs
from subfleet.link.traffic import Traffic
from subfleet.methods import AnyMethod
from subfleet.methods.adaptive import FedAdam
from subfleet.methods.fjord import FjORD
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.roles import Roles
from subfleet.protocol.calibration import Calibration, NormLayer
from subfleet.protocol.messages import Presence
from subfleet.protocol.readings import Budget, Reading
from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.protocol.task import Calibrate, Train, Work
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.selection import estimate_time
from subfleet.rounds.signals import AggregationRequest, Close, RequestDone
from subfleet.rounds.state import ClientState, Offer, RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest

NORMS = Calibration(norms=(NormLayer(name="norm", positions=1, momentum=0.1),))
PACE, DOWN_BPS, UP_BPS = 5e4, 8e4, 2e4
ROW = ClientRow(
    client_id="ada",
    device="pi",
    runtime="onnx",
    architecture="w1",
    architecture_id="0" * 16,
    parameters=1000,
    memory_free_bytes=None,
    budget_bytes=5000,
    downlink_budget_bytes=None,
    uplink_budget_bytes=None,
    update_bytes=4000,
    planned_peak_bytes=4500,
    measured_peak_bytes=0,
    bytes_down=900,
    bytes_up=400,
    seconds=1.0,
    loss=1.0,
    sample_count=10,
    status="aggregated",
    forward_macs=50,
    sample_passes=20,
    took_s=3.0,
    expected_training_s=1.0,
    expected_downlink_s=0.25,
    expected_uplink_s=0.5,
)
SKIPPED = replace(
    ROW, client_id="cyd", status="skipped: no", sample_passes=0, took_s=0.0, expected_training_s=0.0, bytes_up=0
)


def build_result(*rounds: RoundRecord, **changes: Any) -> RunResult:
    defaults: dict[str, Any] = {"method": "heterofl", "method_status": "exact", "deployed": (), "model_path": None}
    return RunResult(run_id="r", finished=True, accuracy=0.5, rounds=rounds, **{**defaults, **changes})


def record(number: int, seconds: float, *rows: ClientRow, model_bytes: int = 0) -> RoundRecord:
    return RoundRecord(
        round=number,
        accuracy=0.5,
        loss=1.0,
        seconds=seconds,
        log_time_s=None,
        clients=rows,
        model_bytes=model_bytes,
    )


# --- of a run ---------------------------------------------------------------------------------------------------------


def test_costs_by_hand() -> None:
    slow = replace(ROW, client_id="bob", forward_macs=70, took_s=9.0, expected_training_s=4.0, expected_uplink_s=2.75)
    rounds = (record(1, 10.0, ROW, slow, SKIPPED, model_bytes=700), record(2, 4.0, ROW, model_bytes=500))
    costs = sum_costs(build_result(*rounds))
    assert (costs.forward_macs, costs.training_macs) == (20 * (50 + 70 + 50), 3 * 20 * (50 + 70 + 50))
    assert (costs.bytes_down, costs.bytes_up, costs.storage_bytes, costs.paced) == (4 * 900, 3 * 400, 700, 1.0)
    assert costs.rounds == Timing.of([10.0, 4.0])
    assert costs.clients == Timing.of([3.0, 9.0, 3.0])
    assert costs.expected_rounds == Timing.of([7.0, 1.75]), "the slowest client decides"
    assert costs.expected_clients == Timing.of([1.75, 7.0, 1.75])


def test_the_seconds_of_a_logical_clock_are_not_reported() -> None:
    timed = build_result(record(1, 10.0, ROW))
    (standing,) = timed.without_measurements().rounds
    assert (standing.seconds, standing.clients[0].seconds, standing.clients[0].took_s) == (None, None, None)
    costs = sum_costs(timed.without_measurements())
    assert (costs.rounds, costs.clients) == (None, None)
    assert costs.expected_rounds == Timing(mean_s=1.75, deviation_s=0.0, count=1)


def test_nothing_is_expected_of_clients_without_figures() -> None:
    silent = replace(ROW, expected_training_s=0.0, expected_downlink_s=0.0, expected_uplink_s=0.0)
    costs = sum_costs(build_result(record(1, 1.0, silent)))
    assert (costs.expected_rounds, costs.expected_clients, costs.paced) == (None, None, 0.0)
    linked = replace(ROW, client_id="bob", expected_training_s=0.0)
    costs = sum_costs(build_result(record(1, 1.0, ROW, linked, silent)))
    assert costs.paced == pytest.approx(1 / 3)
    assert costs.expected_clients is not None
    assert costs.expected_clients.count == 2, "a client without figures does not count"


def test_a_run_without_a_round_has_cost_nothing() -> None:
    assert sum_costs(build_result()) == RunCosts()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_times_are_those_of_numpy(seconds: list[float]) -> None:
    timing = Timing.of(seconds)
    assert timing is not None
    assert timing.mean_s == pytest.approx(float(np.mean(seconds)))
    assert timing.deviation_s == pytest.approx(float(np.std(seconds)), abs=1e-6)
    assert Timing.of(()) is None


# --- of a client ------------------------------------------------------------------------------------------------------


def play_round(context: RunContext, *, samples: int = 10, pace: float | None = PACE) -> Close:
    """Play a first round in which every client trains, with known links and pace; bob's update is damaged."""
    state = RunState()
    for name in CLIENTS:
        state, _ = step(context, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(context, state, replace(profile(name), macs_per_s=pace), 1.0)
    reading = Reading(memory_free_bytes=10**9, downlink_bps=DOWN_BPS, uplink_bps=UP_BPS)
    for name in CLIENTS:
        state, _ = step(context, state, replace(telemetry(context, name), reading=reading), 2.0)
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), 2.0)
    for name in CLIENTS:
        answer = replace(update(context, state, name), sample_count=samples)
        state, _ = step(context, state, RequestDone(request=CheckRequest(update=answer), result=ChangeSize()), 5.5)
    event = RequestDone(
        request=AggregationRequest(round=1, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="a" * 64, refused={"bob": "too large"}, model_bytes=123),
    )
    _, actions = step(context, state, event, 6.0)
    return next(action for action in actions if isinstance(action, Close))


def build_record(context: RunContext, close: Close) -> RoundRecord:
    return build_round_record(context, close, Traffic())


def test_a_record_has_the_costs_of_training() -> None:
    epochs = 3
    context = context_of(communication_s=8.0, training=replace(config().training, epochs=epochs))
    round_record = build_record(context, play_round(context))
    assert round_record.model_bytes == 123
    for row in round_record.clients:
        size = next(size for size in context.space if size.architecture_id == row.architecture_id)
        cost = estimate_cost(context.network, size, batch_size=1)
        assert (row.forward_macs, row.sample_passes, row.network) == (cost.forward_macs, 10 * epochs, "")
        assert row.training_macs == 3 * cost.forward_macs * 10 * epochs, "a refused update counts too"
        assert row.took_s == 3.5
        assert row.expected_training_s == pytest.approx(row.training_macs / PACE)
        # The transfer at the bandwidth of the link.
        assert row.expected_downlink_s == pytest.approx(8 * cost.weight_bytes / DOWN_BPS)
        assert row.expected_uplink_s == pytest.approx(8 * row.update_bytes / UP_BPS)
        assert row.expected_s == row.expected_downlink_s + row.expected_training_s + row.expected_uplink_s
    assert [row.status for row in round_record.clients] == ["aggregated", "refused: too large", "aggregated"]


def test_samples_count_up_to_the_announced_number() -> None:
    context = context_of()
    epochs = context.config.training.epochs
    for samples, counted in ((10**6, 10), (4, 4)):
        rows = build_record(context, play_round(context, samples=samples)).clients
        assert {row.sample_passes for row in rows} == {counted * epochs}
    part = context_of(training=replace(context.config.training, round_fraction=0.3))
    for row in build_record(part, play_round(part)).clients:
        assert row.sample_passes == 3 * epochs, "of ten samples"
        assert row.expected_training_s == pytest.approx(row.training_macs / PACE)


def test_without_a_pace_links_alone_are_expected() -> None:
    context = context_of()
    for row in build_record(context, play_round(context, pace=None)).clients:
        assert row.expected_training_s == 0.0 < row.expected_downlink_s


def test_a_link_without_bandwidth_takes_long_but_a_finite_time() -> None:
    offer = Offer(budget=Budget(memory_bytes=1, downlink_bytes=0, uplink_bytes=1))
    client = ClientState(client_id="ada", device="pi", stage="answered", offer=offer)
    context = context_of()
    cost = replace(context.first.candidates[0], forward_macs=1, weight_bytes=10**12, update_bytes=2)
    estimate = estimate_time(context, client, cost, context.config.training)
    assert (estimate.downlink_s, estimate.uplink_s) == (1e9, 2 * context.config.communication_s)


def test_the_nested_submodel_of_self_distillation_is_trained_too() -> None:
    context = context_of(method=FjORD())
    roles: Roles = context.roles
    assert roles.training.for_round(context.config.training, 1).objective.distillation == "self"
    rows = build_record(context, play_round(context)).clients
    costs = {
        size.architecture_id: estimate_cost(context.network, size, batch_size=1).forward_macs for size in context.space
    }
    assert any(row.forward_macs > costs[row.architecture_id] for row in rows)


def calibrate(work: Work) -> Calibrate:
    assert isinstance(work, Train)
    return Calibrate(settings=work.settings, calibration=NORMS)


def test_measuring_norms_is_no_training() -> None:
    context = context_of()
    close = play_round(context)
    tasks = [
        replace(client.task, work=calibrate(client.task.work)) for client in close.clients if client.task is not None
    ]
    clients = tuple(replace(client, task=task) for client, task in zip(close.clients, tasks, strict=True))
    rows = build_record(context, replace(close, clients=clients)).clients
    assert {(row.sample_passes, row.training_macs, row.expected_s) for row in rows} == {(0, 0, 0.0)}
    assert all(row.forward_macs for row in rows)


def test_records_of_an_earlier_release_are_read() -> None:
    plain: dict[str, Any] = json.loads(canonical_json(record(1, 1.0, ROW)))
    for name in ("network", "forward_macs", "sample_passes", "took_s", "expected_training_s"):
        del plain["clients"][0][name]
    del plain["model_bytes"]
    (row,) = from_plain(RoundRecord, plain).clients
    assert (row.network, row.training_macs, row.took_s) == ("", 0, None)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "times"), [(HeteroFL(), 1), (FedAdam(), 3)])
def test_the_stored_model_has_the_size_of_its_tensors(tmp_path: Path, method: AnyMethod, times: int) -> None:
    """A server optimiser keeps its moments beside the weights."""
    world = World(tmp_path, config(rounds=1, method=method), fleet())
    while not world.server.finished:
        world.turn()
    result = world.server.result()
    assert [closed.model_bytes for closed in result.rounds] == [
        times * network.weight_bytes for network in result.networks
    ]
