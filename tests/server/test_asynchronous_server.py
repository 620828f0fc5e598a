"""What a server makes of old changes, and what it keeps while devices train on old versions."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.aggregating import aggregate_clients
from server.asynchronous_cases import Run, buffered
from server.coordinator_cases import prepared, telemetry
from server.random_cases import build_update
from server.server_rig import World, config, fleet
from torch import Tensor

from subfleet.arrays import encode_arrays
from subfleet.elastic.building import build_module
from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState
from subfleet.protocol.messages import Update
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import AcceptedUpdate, ClientState
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.in_memory import Faults

# --- the mean ---------------------------------------------------------------------------------------------------------


def stored(context: RunContext, blobs: BlobStore, client: ClientState, value: float) -> ClientState:
    """The client with an update that changes every element by a value."""
    assert client.task is not None
    shapes = context.network.shapes(client.task.architecture)
    content = encode_arrays({name: np.full(shape, value, np.float32) for name, shape in shapes.items()})
    update = replace(build_update(context, client.task), blob=blobs.add(content))
    return replace(client, stage="done", trained=AcceptedUpdate(update=update))


@pytest.mark.parametrize("staleness", ["inverse_sqrt", "none"])
def test_changes_count_by_their_staleness(tmp_path: Path, staleness: Any) -> None:
    run = Run(buffered(buffer=2, concurrency=3, staleness=staleness), max_client_fraction=1.0)
    run.send()
    clients, blobs = run.state.clients, BlobStore(tmp_path)
    fresh, old = (stored(run.context, blobs, clients[name], value) for name, value in (("ada", 1.0), ("bob", 2.0)))
    assert fresh.task is not None
    fresh = replace(fresh, task=replace(fresh.task, round=4))
    network = run.context.network
    before = ModelState(shared=build_module(network, network.full_architecture()).state_dict())
    after = aggregate_clients(run.context, blobs, before, 4, (fresh, old)).state
    factor = 0.5 if staleness == "inverse_sqrt" else 1.0
    for client in (fresh, old):
        assert client.architecture is not None
        assert network.parameter_count(client.architecture) == sum(map(Tensor.numel, before.shared.values()))
    for name, tensor in before.shared.items():
        moved: Tensor = after.shared[name] - tensor
        assert moved.numpy() == pytest.approx((1.0 + factor * 2.0) / 2, abs=1e-6)


def test_a_stale_part_moves_the_newest_model_where_it_holds_it(tmp_path: Path) -> None:
    run = Run(buffered(buffer=1, concurrency=3), max_client_fraction=1.0)
    run.apply(telemetry(run.context, "ada", 1, memory_bytes=4000))
    run.apply(prepared(run.context, run.state, "ada"))
    blobs = BlobStore(tmp_path)
    part = stored(run.context, blobs, run.state.clients["ada"], 1.0)
    network = run.context.network
    assert part.architecture is not None
    assert part.architecture != network.full_architecture()
    newest = ModelState(shared=build_module(network, network.full_architecture()).state_dict())
    after = aggregate_clients(run.context, blobs, newest, 2, (part,)).state
    moved = {name: after.shared[name] - tensor for name, tensor in newest.shared.items()}
    held = extract(network, part.architecture, moved)
    assert all(tensor.numpy() == pytest.approx(1 / math.sqrt(2), abs=1e-6) for tensor in held.values())
    assert sum(int((tensor != 0).sum()) for tensor in moved.values()) == sum(tensor.numel() for tensor in held.values())


# --- a server with real sessions --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_of_old_versions_stay_as_long_as_a_device_trains_on_them(tmp_path: Path) -> None:
    held = {"bob": True}
    devices = fleet()
    devices["bob"] = replace(
        devices["bob"], says=lambda message: None if held["bob"] and isinstance(message, Update) else message
    )
    settings = config(asynchronous=buffered(buffer=1, concurrency=2), rounds=9, deploy_targets=())
    world = World(tmp_path, settings, devices)
    world.run(until=lambda: bool(tasks := world.devices["bob"].tasks) and world.server.state.round > tasks[0].round + 1)
    task = world.server.state.clients["bob"].task
    assert task is not None
    down_bytes, _ = world.journal.load_bytes(world.server.state)["bob"]
    assert down_bytes > task.weights[0].size_bytes, "bytes of earlier rounds go on, too"
    weights = BlobStore(tmp_path / "state" / "blobs")
    assert weights.has(task.weights[0])
    world.kill_server()
    world.turn()
    assert weights.has(task.weights[0]), "a restarted server keeps them, too"
    held["bob"] = False
    world.run()
    assert not weights.has(task.weights[0])
    rows = [row for record in world.server.result().rounds for row in record.clients if row.client_id == "bob"]
    assert max(row.staleness for row in rows) >= 2


@pytest.mark.long
def test_a_server_killed_at_any_moment_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings = config(asynchronous=buffered(buffer=3, concurrency=3), deploy_targets=())
    calm = World(tmp_path / "calm", settings, fleet())
    calm.run()
    plain = World(tmp_path / "plain", replace(settings, asynchronous=None), fleet())
    plain.run()
    assert calm.model_bytes() == plain.model_bytes()
    world, generator, kills = World(tmp_path / "killed", settings, fleet(), order=1), random.Random(1), 0
    for _ in range(4000):
        if world.server.finished:
            break
        if kills < 6 and generator.random() < 0.5:
            world.broker.cut("server", mend_after_s=None)
            world.kill_server()
            kills += 1
        world.turn()
    assert kills >= 3
    assert world.model_bytes() == calm.model_bytes()


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 5])
def test_every_update_counts_whatever_is_lost_doubled_or_killed(tmp_path: Path, seed: int) -> None:
    settings = config(asynchronous=buffered(buffer=2, concurrency=3), rounds=6)
    world = World(tmp_path, settings, fleet(), order=seed, faults=Faults(seed=seed, loss=0.1, double=0.1, delay_s=0.5))
    generator, kills = random.Random(seed), 0
    for _ in range(4000):
        if world.server.finished:
            break
        if kills < 12 and generator.random() < 0.1:
            world.broker.cut("server", mend_after_s=None)
            world.kill_server()
            kills += 1
        world.turn()
    rounds = world.server.result().rounds
    assert [[row.status for row in record.clients] for record in rounds] == [["aggregated"] * 2] * 6
