"""Whatever one client sends, the server goes on, and the other clients' updates count."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.fake_device import Behaviour
from server.server_rig import World, config, fleet

from subfleet.aggregation.aggregation import AggregatedModel, aggregate_model
from subfleet.aggregation.checking import Checker
from subfleet.methods import AnyMethod
from subfleet.methods.fedtrans import FedTrans
from subfleet.methods.oort import Oort
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Ack, Message, Presence, Profile, Refusal, Telemetry, Update, encode
from subfleet.protocol.readings import Reading
from subfleet.protocol.task import Task
from subfleet.protocol.topics import Topics
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import choose_networks
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest
from subfleet.serving import numerics
from subfleet.settings.sections import Deadlines
from subfleet.transport.base import Delivery, Transport
from subfleet.transport.partial_blob import count_partial_bytes

SAMPLES = 2**40
TOPICS = Topics("main")
NEVER_SENT = BlobRef.of(b"never sent")


def _statuses(world: World) -> dict[str, str]:
    return {row.client_id: row.status for row in world.server.result().rounds[0].clients}


def _has_open_task(world: World) -> bool:
    return any(client.stage == "out" for client in world.server.state.clients.values())


def _list_resent_topics(world: World, kind: str) -> list[str]:
    """The topics on which the server sends messages of a kind again when no device answers for a while."""
    watcher = world.broker.client("watcher")
    watcher.open((TOPICS.downlink("+", kind),))
    while watcher.poll(0.0) is not None:  # retained ones
        pass
    world.clock.now_s += 20.0
    world.server.step(0.0)
    return [event.topic for event in iter(lambda: watcher.poll(0.0), None) if isinstance(event, Delivery)]


def _connect_eve(world: World) -> Transport:
    eve = world.broker.client("eve")
    eve.open(())
    return eve


def _publish(eve: Transport, message: Message, **changes: object) -> None:
    plain = {**json.loads(encode(message)), **changes}
    eve.publish(f"subfleet/1/main/up/eve/{message.KIND}", json.dumps(plain, ensure_ascii=False).encode("utf-8"))


def _telemetry(run_id: str) -> Telemetry:
    return Telemetry(
        client_id="eve",
        session_id="s",
        run_id=run_id,
        round=77,
        log_time_s=None,
        reading=Reading(),
        memory_budget_bytes=1,
    )


def change_updates(**changes: Any) -> Callable[[Message], Message]:
    """A filter for a device's messages: its updates have other fields."""
    return lambda message: replace(message, **changes) if isinstance(message, Update) else message


def keep_heartbeats(message: Message) -> Message | None:
    """A filter for a device's messages: only heartbeats and profiles are sent."""
    return message if isinstance(message, Presence | Profile) else None


def update_for(task: Task, blob: BlobRef) -> Update:
    return Update(
        task_id=task.task_id,
        run_id=task.run_id,
        round=task.round,
        client_id=task.client_id,
        blob=blob,
        sample_count=10,
        step_count=1,
        loss=1.0,
        accuracy=0.5,
        measured_peak_bytes=900,
        train_seconds=0.1,
        seconds=0.2,
    )


@pytest.mark.slow
def test_an_id_that_no_ack_could_carry_is_dropped(tmp_path: Path) -> None:
    world = World(tmp_path, config(rounds=1, deploy_targets=()), fleet())
    _publish(_connect_eve(world), _telemetry(world.server.context.run_id), message_id="\u00e9" * 120_000)
    world.run()
    assert set(_statuses(world).values()) == {"aggregated"}


@pytest.mark.slow
def test_half_a_character_is_dropped_before_the_journal(tmp_path: Path) -> None:
    world = World(tmp_path, config(rounds=1, deploy_targets=()), fleet())
    profile: Profile = replace(world.devices["ada"].profile(), client_id="eve")
    payload = encode(profile).replace(b'"fake"', b'"\\ud800"')
    _connect_eve(world).publish("subfleet/1/main/up/eve/profile", payload)
    world.run()
    assert "eve" not in world.server.state.live.members


@pytest.mark.slow
@pytest.mark.parametrize("rate_bps", [1e300, 1.7e308])
def test_a_link_faster_than_any_number_is_a_fast_link(tmp_path: Path, rate_bps: float) -> None:
    devices = {**fleet(), "eve": Behaviour(reading=lambda _: Reading(downlink_bps=rate_bps, uplink_bps=rate_bps))}
    world = World(tmp_path, config(rounds=1, deploy_targets=()), devices)
    world.run(until=lambda: _has_open_task(world))
    world.kill_server()  # and it can be read back
    world.run()
    assert set(_statuses(world).values()) == {"aggregated"}


@pytest.mark.slow
def test_the_most_samples_that_clients_may_claim_can_be_weighed(tmp_path: Path) -> None:
    devices = {name: Behaviour(sample_count=SAMPLES) for name in ("ada", "bob", "cyd")}
    world = World(tmp_path, config(rounds=1, deploy_targets=()), devices)
    world.run()
    assert set(_statuses(world).values()) == {"aggregated"}


@pytest.mark.slow
def test_claimed_samples_are_bounded_as_the_table_shows(tmp_path: Path) -> None:
    devices = {**fleet(), "eve": Behaviour(sample_count=10)}
    world = World(tmp_path / "lying", config(rounds=1, deploy_targets=()), {**devices, "eve": Behaviour()})
    world.devices["eve"].behaviour.says = change_updates(sample_count=SAMPLES)
    world.run()
    rows = {row.client_id: row for row in world.server.result().rounds[0].clients}
    assert rows["eve"].status == "aggregated"
    assert (rows["eve"].sample_count, rows["eve"].weight, rows["eve"].share) == (SAMPLES, 10, 1 / 7)
    assert rows["eve"].lowered == f"it claims {SAMPLES} samples, but its profile has 10"
    assert rows["ada"].lowered == ""
    honest = World(tmp_path / "honest", config(rounds=1, deploy_targets=()), devices)
    honest.run()
    assert world.model_bytes() == honest.model_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [3.4e38, -3.4e38])
@pytest.mark.parametrize("method", [FedTrans(first="configured", gamma=1, delta=1, beta=1e9, stop_rounds=0), Oort()])
def test_a_loss_of_any_size_ends_no_run(method: AnyMethod, loss: float, tmp_path: Path) -> None:
    world = World(tmp_path, config(rounds=3, deploy_targets=(), method=method), {**fleet(), "eve": Behaviour()})
    world.devices["eve"].behaviour.says = change_updates(loss=loss)
    world.run(until=lambda: world.server.state.aggregated_round == 2)
    world.kill_server()  # and what is remembered can be read back
    world.run()
    assert set(_statuses(world).values()) == {"aggregated"}


@pytest.mark.slow
def test_a_profile_with_the_most_samples_counts_for_half_a_round(tmp_path: Path) -> None:
    devices = {**fleet(), "eve": Behaviour(sample_count=SAMPLES)}
    world = World(tmp_path, config(rounds=1, deploy_targets=()), devices)
    world.run()
    rows = {row.client_id: row for row in world.server.result().rounds[0].clients}
    assert (rows["eve"].weight, rows["eve"].share) == (60, 0.5)
    assert rows["eve"].lowered == "its share is capped at 0.5 of the round"
    assert (rows["cyd"].weight, rows["cyd"].lowered) == (33, "")


def test_an_ack_settles_only_its_senders_task(tmp_path: Path) -> None:
    world = World(tmp_path, config(), fleet())
    world.run(until=lambda: _has_open_task(world))
    tasks = [client.task for client in world.server.state.clients.values() if client.task is not None]
    assert tasks
    eve = _connect_eve(world)
    for task in tasks:
        _publish(eve, Ack(of=task.message_id, status="accepted"))
    world.server.step(0.0)
    topics = _list_resent_topics(world, "task")
    assert sorted(topics) == sorted(TOPICS.downlink(task.client_id, "task") for task in tasks)


@pytest.mark.slow
def test_a_client_that_offers_ever_new_updates_has_one_transfer(tmp_path: Path) -> None:
    world = World(tmp_path, config(rounds=1, deploy_targets=()), fleet())
    world.run(until=lambda: all(device.tasks for device in world.devices.values()))
    ada = world.devices.pop("ada")
    world.run(until=lambda: world.server.state.clients["ada"].stage == "out" and not _partials(world))
    (weights,) = ada.tasks[0].weights
    for number in range(20):
        blob = replace(BlobRef.of(b"%d" % number), size_bytes=weights.size_bytes)
        ada.send(update_for(ada.tasks[0], blob))
        world.turn()
    (partial,) = _partials(world)
    assert partial.stat().st_size <= count_partial_bytes(weights)
    assert _list_resent_topics(world, "request") == [TOPICS.downlink("ada", "request")]


def _partials(world: World) -> list[Path]:
    return list((world.folder / "state" / "blobs" / "partial").iterdir())


def _world_with_an_upload(folder: Path) -> World:
    """Ada offers an update and sends none of its bytes; the others have not answered yet."""
    deadlines = Deadlines(join_s=1e4, measure_s=1e4, round_s=60, deploy_s=1e4, lease_s=1e4, linger_s=0)
    world = World(folder, config(rounds=1, deploy_targets=(), deadlines=deadlines), fleet())
    world.run(until=lambda: all(device.tasks for device in world.devices.values()))
    ada = world.devices.pop("ada")
    world.run(until=lambda: world.server.state.clients["ada"].stage == "out" and not _partials(world))
    ada.send(update_for(ada.tasks[0], NEVER_SENT))
    world.turn()
    assert _has_partial(world)
    return world


def _has_partial(world: World) -> bool:
    return f"{NEVER_SENT.sha256}.part" in {path.name for path in _partials(world)}


@pytest.mark.slow
def test_an_upload_that_is_not_there_when_its_round_closes_is_deleted(tmp_path: Path) -> None:
    world = _world_with_an_upload(tmp_path)
    world.run(until=lambda: world.server.state.phase == "aggregate")
    assert _partials(world) == []
    assert _list_resent_topics(world, "request") == []


@pytest.mark.slow
def test_a_refused_task_takes_its_upload_with_it(tmp_path: Path) -> None:
    world = _world_with_an_upload(tmp_path)
    ada = world.broker.client("ada")
    ada.open(())
    task = next(client.task for client in world.server.state.clients.values() if client.stage == "out")
    assert task is not None
    refusal = Refusal(
        task_id=task.task_id, run_id=task.run_id, round=1, client_id="ada", reason="data", detail="no data"
    )
    ada.publish("subfleet/1/main/up/ada/refusal", encode(refusal))
    world.turn()
    assert not _has_partial(world)
    world.run(until=lambda: world.server.finished)
    assert _partials(world) == []
    assert _list_resent_topics(world, "request") == []


@pytest.mark.slow
def test_partial_uploads_of_a_killed_server_are_deleted_when_no_task_is_open(tmp_path: Path) -> None:
    world = _world_with_an_upload(tmp_path)
    world.kill_server()
    assert _has_partial(world), "devices go on with uploads to open tasks"
    world.run(until=lambda: world.server.finished)
    leftover = tmp_path / "state" / "blobs" / "partial" / f"{'a' * 64}.part"
    leftover.write_bytes(b"of an upload that nobody ended")
    (tmp_path / "state" / "blobs" / ("b" * 64)).write_bytes(b"of no round")
    world.kill_server()
    assert _partials(world) == []
    assert not (tmp_path / "state" / "blobs" / ("b" * 64)).exists()


@pytest.mark.slow
def test_clients_that_never_answer_do_not_block_a_run(tmp_path: Path) -> None:
    deadlines = Deadlines(join_s=50, measure_s=10, lease_s=1e4, linger_s=0)
    world = World(tmp_path, config(deadlines=deadlines), fleet())
    for device in world.devices.values():
        device.behaviour.says = keep_heartbeats
    began_s = world.clock()
    world.run()
    assert world.server.state.failure.startswith("no client answered the announcement of round 1 within 50 s")
    assert world.clock() - began_s < 50 + 2 * 10


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError("conv"), MemoryError(), ValueError("a shape")], ids=repr)
def test_failing_work_beside_the_loop_ends_its_request_and_not_the_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any exception, in the aggregation of one member's update or in the check of an update."""
    check = Checker.check

    def fail_aggregation(
        context: Any, blobs: Any, state: Any, request: AggregationRequest, *rest: Any
    ) -> AggregatedModel:
        if request.round == 1 and any(client.client_id == "cyd" for client in request.clients):
            raise error
        return aggregate_model(context, blobs, state, request, *rest)

    def fail_check(self: Checker, request: CheckRequest, *rest: Any) -> ChangeSize:
        update = request.update
        if update.client_id == "bob" and update.round == 2:
            raise error
        return replace(check(self, request, *rest), weights=3.0 if update.client_id == "cyd" else 1.0)

    monkeypatch.setattr("subfleet.aggregation.round_aggregator.aggregate_model", fail_aggregation)
    monkeypatch.setattr(Checker, "check", fail_check)
    world = World(tmp_path, config(rounds=3, deploy_targets=()), fleet())
    world.run()
    rounds = [{row.client_id: row.status for row in record.clients} for record in world.server.result().rounds]
    assert rounds[0].pop("cyd").startswith("refused: aggregation failed")
    assert rounds[1].pop("bob").startswith("refused: it could not be checked")
    rounds[1].pop("cyd", "")  # it is left out for some rounds
    assert {status for statuses in rounds[:2] for status in statuses.values()} == {"aggregated"}
    assert len(rounds) == 3


@pytest.mark.slow
def test_a_failed_choice_of_networks_ends_an_attempt_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RuntimeError("not today")]

    def fail_once(context: RunContext, state: RunState) -> Any:
        if failures:
            raise failures.pop()
        return choose_networks(context, state)

    monkeypatch.setattr(numerics, "choose_networks", fail_once)
    world = World(tmp_path, config(rounds=1, deploy_targets=(), method=FedTrans()), fleet())
    world.run()
    assert not failures
    assert set(_statuses(world).values()) == {"aggregated"}
