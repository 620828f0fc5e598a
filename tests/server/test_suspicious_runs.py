"""Whole runs with a client that sends enormous updates: they go on with the others, with the same bits."""

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from server.coordinator_cases import context_of, training, update
from server.fake_device import Behaviour, small_change
from server.server_rig import World, config, fleet, losing_actions

from subfleet.aggregation import checking
from subfleet.aggregation.checking import Checker
from subfleet.aggregation.network_aggregation import NetworkAggregation
from subfleet.aggregation.updates import check_update
from subfleet.elastic.building import init_state
from subfleet.elastic.model_state import ModelState, unpack_state
from subfleet.programs.worker import Handler, Snapshot, Threads, Worker
from subfleet.protocol.messages import Task
from subfleet.reporting.results import build_summary
from subfleet.reporting.texts import describe_ending
from subfleet.rounds.signals import RequestFailed
from subfleet.rounds.work import CheckRequest
from subfleet.settings.run import Run
from subfleet.settings.sections import OutlierSettings
from subfleet.transport.blob_store import BlobStore

ROUNDS = 3


def magnify(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """A finite change of 10^6 times the weights."""
    return {name: (1e6 * array + 1e5).astype(np.float32) for name, array in weights.items()}


def exceed_limit(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    return {name: np.full(array.shape, 1e30, np.float32) for name, array in weights.items()}


def magnify_once(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    return magnify(weights, task) if task.round == 1 else small_change(weights, task.client_id, task.round, 0.1)


def settings(*, outliers: Any = "exclude", **more: Any) -> Run:
    return config(rounds=ROUNDS, deploy_targets=(), outliers=OutlierSettings(outliers=outliers, **more))


def statuses(world: World, client_id: str) -> list[str]:
    rounds = world.server.result().rounds
    return [row.status for record in rounds for row in record.clients if row.client_id == client_id]


def run_to_end(world: World) -> World:
    world.run()
    return world


def small_fleet() -> dict[str, Behaviour]:
    """Two devices: with one that is not honest, they are too few for a median of their own."""
    return {name: behaviour for name, behaviour in fleet().items() if name != "cyd"}


@pytest.mark.slow
@pytest.mark.parametrize("honest_fleet", [fleet, small_fleet], ids=["four", "three"])
def test_an_attacked_run_has_the_bits_of_the_honest_clients_alone(honest_fleet: Any, tmp_path: Path) -> None:
    honest = run_to_end(
        World(tmp_path / "honest", config(rounds=ROUNDS, deploy_targets=(), min_clients=2), honest_fleet())
    )
    attacked = run_to_end(
        World(tmp_path / "attacked", settings(), {**honest_fleet(), "eve": Behaviour(change=magnify)})
    )
    assert attacked.model_bytes() == honest.model_bytes()
    assert attacked.server.result().accuracy == honest.server.result().accuracy
    first, *later = statuses(attacked, "eve")
    words = "its change of weights is" if honest_fleet is fleet else "the model diverged to a loss of"
    assert first.startswith(f"refused: {words}")
    assert all(status.startswith(f"skipped: left out until round 4: in round 1 {words}") for status in later)
    assert set(statuses(attacked, "ada")) == {"aggregated"}
    assert [text for text in attacked.notes.messages if text.startswith("client eve is left out until round 4")]


@pytest.mark.slow
def test_by_default_a_far_update_is_scaled_and_reported(tmp_path: Path) -> None:
    honest = run_to_end(World(tmp_path / "honest", config(rounds=ROUNDS, deploy_targets=(), min_clients=2), fleet()))
    world = run_to_end(
        World(tmp_path / "attacked", settings(outliers="auto"), {**fleet(), "eve": Behaviour(change=magnify)})
    )
    result, status = world.server.result(), honest.server.result().method_status
    model = unpack_state(load(world.model_bytes()))
    for name, tensor in unpack_state(load(honest.model_bytes())).shared.items():
        assert torch.allclose(model.shared[name], tensor, rtol=0, atol=1e-6)
    for record in result.rounds:
        (eve,) = [row for row in record.clients if row.client_id == "eve"]
        assert eve.status == "aggregated"
        assert 0 < eve.scale < 1e-6
        assert eve.share < 1e-6
        assert eve.lowered.startswith(f"scaled by {eve.scale:.3g}, as its change of weights is ")
        assert record.left_out == ""
    altered = "updates scaled down: eve in 3 (of 3 rounds)"
    assert result.method_status == (altered if status == "exact" else f"{status}; {altered}")
    assert build_summary("x", result)["outliers"] == {"scaled": {"eve": 3}, "left_out": {}, "reported": {}}
    assert "Updates scaled down: eve in 3 (of 3 rounds)" in describe_ending(result)
    assert [
        text for text in world.notes.messages if text.startswith("the update of client eve in round 1 is scaled by ")
    ]


@pytest.mark.slow
def test_a_run_that_only_reports_outliers_has_the_bits_of_one_without_detection(tmp_path: Path) -> None:
    def enlarge_changes(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
        return {name: 300 * change for name, change in small_change(weights, task.client_id, task.round, 0.1).items()}

    devices = {**fleet(), "eve": Behaviour(change=enlarge_changes)}
    off, reporting = (
        run_to_end(World(tmp_path / name, settings(outliers=name), devices)) for name in ("off", "report")
    )
    assert reporting.model_bytes() == off.model_bytes()
    assert reporting.server.result().method_status == off.server.result().method_status
    reported = [row.outlier for record in reporting.server.result().rounds for row in record.clients if row.outlier]
    assert len(reported) == ROUNDS
    assert not any(row.outlier for record in off.server.result().rounds for row in record.clients)
    assert build_summary("x", reporting.server.result())["outliers"] == {
        "scaled": {},
        "left_out": {},
        "reported": {"eve": ROUNDS},
    }
    assert [
        text
        for text in reporting.notes.messages
        if text.startswith("the update of client eve in round 1 counts as it is: ")
    ]


@pytest.mark.slow
def test_a_client_comes_back_after_its_rounds_and_is_watched_again(tmp_path: Path) -> None:
    world = run_to_end(World(tmp_path, settings(exclusion_rounds=1), {**fleet(), "eve": Behaviour(change=magnify)}))
    assert [status.split(":")[0] for status in statuses(world, "eve")] == ["refused", "skipped", "refused"]
    world = run_to_end(
        World(tmp_path / "better", settings(exclusion_rounds=1), {**fleet(), "eve": Behaviour(change=magnify_once)})
    )
    assert [status.split(":")[0] for status in statuses(world, "eve")] == ["refused", "skipped", "aggregated"]


@pytest.mark.slow
@pytest.mark.parametrize("acts", [True, False], ids=["after", "before"])
def test_a_server_that_dies_between_detection_and_the_next_aggregate_ends_with_the_same_bits(
    acts: bool, tmp_path: Path
) -> None:
    devices = {**small_fleet(), "eve": Behaviour(change=magnify)}
    calm = run_to_end(World(tmp_path / "calm", settings(), devices))
    world = World(tmp_path / "killed", settings(), devices)
    world.run(until=lambda: world.server.state.phase == "aggregate")
    with nullcontext() if acts else losing_actions():
        world.turn()
    assert [client.client_id for client in world.server.state.clients.values() if client.stage == "suspect"] == ["eve"]
    world.kill_server()
    assert [client.client_id for client in world.server.state.clients.values() if client.stage == "suspect"] == ["eve"]
    world.run(until=lambda: world.server.state.aggregated_round == 1)
    world.kill_server()
    assert set(world.server.state.outliers.excluded) == {"eve"}
    world.run()
    assert world.model_bytes() == calm.model_bytes()
    assert statuses(world, "eve") == statuses(calm, "eve")


@pytest.mark.slow
def test_a_run_that_diverges_in_every_attempt_fails_with_a_reason(tmp_path: Path) -> None:
    world = World(tmp_path, settings(), fleet(change=magnify))
    world.run()
    assert world.server.state.phase == "failed"
    assert world.server.state.failure.startswith(
        "round 1 could not be aggregated in 3 attempts (ada, bob, cyd refused: the model diverged to a loss of "
    )
    assert world.server.result().rounds == ()


@pytest.mark.slow
def test_an_unusable_update_is_refused_on_arrival_and_each_round_is_aggregated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregates: list[ModelState] = []
    aggregate = NetworkAggregation.aggregate

    def record_aggregate(self: NetworkAggregation, *arguments: Any) -> Any:
        aggregates.append(aggregate(self, *arguments))
        return aggregates[-1]

    monkeypatch.setattr(NetworkAggregation, "aggregate", record_aggregate)
    world = run_to_end(World(tmp_path, settings(), {**fleet(), "eve": Behaviour(change=exceed_limit)}))
    refused = statuses(world, "eve")
    assert len(refused) == len(aggregates) == ROUNDS
    assert all("contains a change of 1.0000000150474662e+30, but must be finite and" in why for why in refused)
    (ack,) = {reply.status for name, reply in world.devices["eve"].acks.items() if name.startswith("update.")}
    assert ack == "refused"


@pytest.mark.slow
def test_the_loop_goes_on_while_an_update_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, released = threading.Event(), threading.Event()

    def check_slowly(*arguments: Any, **options: Any) -> Any:
        started.set()
        assert released.wait(60)
        return check_update(*arguments, **options)

    monkeypatch.setattr(checking, "check_update", check_slowly)
    world = World(tmp_path, settings(), fleet())
    finish, world.server.finish = world.server.finish, lambda **_: None  # type: ignore[method-assign]  # time does not stand
    # The first check is slow where nothing was loaded yet, and turns take nearly no time.
    world.run(until=lambda: started.wait(0.01))
    for _ in range(20):
        world.turn()
    assert {client.stage for client in world.server.state.clients.values()} == {"out"}
    released.set()
    world.server.finish = finish  # type: ignore[method-assign]
    world.run()
    assert {status for name in world.devices for status in statuses(world, name)} == {"aggregated"}


def test_an_update_that_is_offered_twice_is_checked_once(tmp_path: Path) -> None:
    context, blobs = context_of(), BlobStore(tmp_path)
    state = training(context)
    offered = replace(update(context, state, "ada"), blob=blobs.add(b"no container"))
    threads = Threads()
    duty = Handler(work=threads.work("check", Checker(context, blobs).check), failure="it could not be checked")
    worker, request = Worker({CheckRequest: duty}, threads), CheckRequest(update=offered)
    for _ in range(2):
        worker.begin(request, Snapshot(state=state, model=ModelState(shared=init_state(context.network, 0))))
    assert worker.requests == (request,)
    worker.finish(exports=True)
    (event,) = worker.events()
    assert isinstance(event, RequestFailed)
    assert not worker.events()
    worker.close()
