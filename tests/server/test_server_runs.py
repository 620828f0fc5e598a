"""Whole runs: a real server, real journal, real aggregation; only exporter and trainers are fakes."""

import random
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrices import mostly_long
from server.fake_device import PLENTY_BYTES, Behaviour
from server.server_rig import World, config, fleet, losing_actions

from subfleet.aggregation.checkpoint import load_checkpoint
from subfleet.elastic.building import init_state
from subfleet.export.quantisation.models import samples_of
from subfleet.export.requests import InferRequest, TrainRequest
from subfleet.journal.places import Places
from subfleet.protocol.errors import ConfigError, ExportError, FileError
from subfleet.protocol.memory_plan import Packing
from subfleet.protocol.messages import Task
from subfleet.protocol.readings import Reading
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.run import Run
from subfleet.settings.sections import Deadlines
from subfleet.tasks import read_dataset
from subfleet.transport.in_memory import Faults

pytestmark = pytest.mark.slow

SMALL, LARGE = 14_000, 10**9


def mixed_fleet() -> dict[str, Behaviour]:
    """One device has memory that grows between the rounds, one has little, and one has much."""
    return {
        "ada": Behaviour(sample_count=7, memory_budget_bytes=lambda number: SMALL if number == 1 else LARGE),
        "bob": Behaviour(sample_count=20, memory_budget_bytes=lambda _: SMALL),
        "cyd": Behaviour(sample_count=33),
    }


def finish(world: World) -> World:
    world.run()
    return world


def final_bytes(folder: Path, settings: Run | None = None, **options: Any) -> bytes:
    return finish(World(folder, settings or config(), mixed_fleet(), **options)).model_bytes()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final model of an undisturbed run."""
    return final_bytes(tmp_path_factory.mktemp("calm"))


def test_a_run_ends_with_every_device_aggregated_and_deployed(tmp_path: Path) -> None:
    world = finish(World(tmp_path, config(), fleet()))
    result = world.server.result()
    assert result.finished
    assert [record.round for record in result.rounds] == [1, 2] == [record.round for record in world.notes.records]
    assert [record.log_time_s for record in result.rounds] == [0.0, 10.0]
    assert all(row.status == "aggregated" for record in result.rounds for row in record.clients)
    assert {model.client_id: model.status for model in result.deployed} == dict.fromkeys(world.devices, "deployed")
    assert all(model.path.is_file() for model in result.deployed)
    world.turn()
    assert all(device.rounds[-1].phase == "finished" for device in world.devices.values())


def test_devices_get_the_largest_submodel_that_fits_now(tmp_path: Path) -> None:
    world = finish(World(tmp_path, config(), mixed_fleet()))
    first, second = ({row.client_id: row for row in record.clients} for record in world.server.result().rounds)
    ids, later = ({name: row.architecture_id for name, row in rows.items()} for rows in (first, second))
    assert ids["ada"] == ids["bob"] == later["bob"] != ids["cyd"]
    assert later["ada"] == later["cyd"]
    candidates = world.context.first.candidates
    for row in (*first.values(), *second.values()):
        smaller = [candidate for candidate in candidates if candidate.training_memory_bytes["onnx"] <= row.budget_bytes]
        assert row.architecture_id == smaller[-1].architecture.architecture_id


def test_the_order_of_arrival_does_not_matter(tmp_path: Path, calm: bytes) -> None:
    for order in range(1, 4):
        assert final_bytes(tmp_path / str(order), order=order) == calm


@pytest.mark.parametrize("seed", mostly_long(range(3), 0, 1))
def test_losses_doubles_and_delays_do_not_matter(tmp_path: Path, calm: bytes, seed: int) -> None:
    faults = Faults(seed=seed, loss=0.2, double=0.2, delay_s=1.5)
    assert final_bytes(tmp_path, faults=faults, order=seed) == calm


def test_cut_links_do_not_matter(tmp_path: Path, calm: bytes) -> None:
    world, generator = World(tmp_path, config(), mixed_fleet()), random.Random(3)
    for turn in range(4000):
        if world.server.finished:
            break
        if turn % 3 == 0:
            world.broker.cut(generator.choice([*world.devices, "server"]), mend_after_s=0.5)
        world.turn()
    assert world.model_bytes() == calm


@pytest.mark.parametrize("seed", mostly_long(range(6), 0, 1, 2))
def test_a_server_killed_at_any_moment_ends_with_the_same_bits(tmp_path: Path, calm: bytes, seed: int) -> None:
    generator, kills = random.Random(seed), 0
    world = World(tmp_path, config(), mixed_fleet(), order=seed)
    for _ in range(4000):
        if world.server.finished:
            break
        if kills < 12 and generator.random() < 0.6:
            world.broker.cut("server", mend_after_s=None)
            world.kill_server()
            kills += 1
        world.turn()
    assert kills >= 3
    assert world.model_bytes() == calm
    assert len(world.server.result().rounds) == 2
    assert {model.status for model in world.server.result().deployed} == {"deployed"}


def test_a_server_that_dies_between_journal_and_action_does_it_again(tmp_path: Path, calm: bytes) -> None:
    world = World(tmp_path, config(), mixed_fleet())
    changes = 0
    for turn in range(1000):
        if world.server.finished:
            break
        if turn % 3 < 2:
            world.turn()
            continue
        before = world.server.state.phase
        with losing_actions():
            world.turn()
        changes += world.server.state.phase != before
        world.kill_server()
    assert changes > 3
    assert world.model_bytes() == calm


def test_a_device_that_comes_back_in_a_strict_run_takes_part(tmp_path: Path, calm: bytes) -> None:
    world = World(tmp_path, config(), mixed_fleet())
    world.run(until=lambda: bool(world.devices["cyd"].tasks))
    device = world.devices.pop("cyd")
    for _ in range(20):
        world.turn()
    assert world.server.state.phase == "train"
    world.devices["cyd"] = world.new_device("cyd", device.behaviour, start=2)
    world.devices["cyd"].open()
    assert finish(world).model_bytes() == calm


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    world = finish(World(tmp_path, config(), fleet()))
    before = world.server.result()
    world.kill_server()
    assert world.server.finished
    assert world.server.result() == before


def test_a_changed_configuration_does_not_resume_a_run(tmp_path: Path) -> None:
    world = World(tmp_path, config(), fleet())
    training = replace(world.settings.training, learning_rate=0.05)
    world.settings = replace(world.settings, seed=1, training=training, keep_rounds=9)
    changed = r"since it was started: seed from 0 to 1, training.learning_rate from 0.1 to 0.05; restore the settings"
    with pytest.raises(ConfigError, match=changed):
        world.new_server()


def test_a_second_server_leaves_the_folder_alone(tmp_path: Path) -> None:
    world = World(tmp_path, config(), fleet())
    with Places(tmp_path / "state").lock(), pytest.raises(FileError, match="in use by another server"):
        world.new_server().run(threading.Event())


def test_a_change_of_zero_changes_no_bit(tmp_path: Path) -> None:
    world = finish(World(tmp_path, config(), fleet(scale=0.0)))
    result = world.server.result()
    state = load_checkpoint(tmp_path / "state" / "checkpoints", 2, world.journal.checkpoint_sha256(2) or "missing")
    start = init_state(world.context.network, 0)
    assert result.rounds[-1].clients[0].status == "aggregated"
    assert all(state[name].view(torch.int32).equal(start[name].view(torch.int32)) for name in start)


def test_elements_that_no_client_held_keep_their_bits(tmp_path: Path) -> None:
    fleet_of_small = fleet(memory_budget_bytes=lambda _: SMALL)
    world = finish(World(tmp_path, config(), fleet_of_small))
    state = load_checkpoint(tmp_path / "state" / "checkpoints", 2, world.journal.checkpoint_sha256(2) or "missing")
    start = init_state(world.context.network, 0)
    held = world.context.network.shapes(world.devices["ada"].tasks[0].architecture)
    moved = {name for name in start if not torch.equal(state[name], start[name])}
    assert moved == set(held)
    for name, shape in held.items():
        inside = tuple(slice(0, size) for size in shape)
        outside = torch.ones(start[name].shape, dtype=torch.bool)
        outside[inside] = False
        assert torch.equal(state[name][outside], start[name][outside])


def test_a_refusal_for_memory_brings_a_smaller_task(tmp_path: Path) -> None:
    devices = fleet()
    devices["ada"] = replace(
        devices["ada"],
        refuse=lambda task: ("memory", SMALL) if task.task_id.endswith("/0") and task.round == 1 else None,
    )
    world = finish(World(tmp_path, config(deploy_targets=()), devices))
    row = world.server.result().rounds[0].clients[0]
    assert (row.client_id, row.status) == ("ada", "aggregated")
    assert row.parameters < world.server.result().rounds[0].clients[1].parameters
    first, second = world.devices["ada"].tasks[:2]
    assert second.task_id.endswith("/1")
    assert second.budget.memory_bytes == SMALL < first.budget.memory_bytes


@pytest.mark.parametrize("mode", ["none", "static"])
def test_models_are_deployed_in_the_configured_precision_with_their_accuracy(tmp_path: Path, mode: str) -> None:
    world = World(tmp_path, config(rounds=1, deploy_quantisation=mode), fleet())
    models = finish(world).server.result().deployed
    requests = [request for request in world.exports.requests if isinstance(request, InferRequest)]
    assert {request.quantisation for request in requests} == {mode}
    # Samples of the evaluation data set the ranges; a model in float32 takes none.
    expected_sha256 = "" if mode == "none" else samples_of(read_dataset(config().data.test)).sha256
    assert {request.samples_sha256 for request in requests} == {expected_sha256}
    figures = {(model.max_abs_diff, model.quantised_accuracy, model.float_accuracy) for model in models}
    assert figures == ({(1e-6, None, None)} if mode == "none" else {(None, 0.75, 0.875)})


def test_attempts_are_limited_and_other_refusals_final(tmp_path: Path) -> None:
    devices = fleet()
    devices["ada"] = replace(devices["ada"], refuse=lambda _: ("memory", None))
    devices["bob"] = replace(devices["bob"], refuse=lambda _: ("data", None))
    world = finish(World(tmp_path, config(rounds=1, deploy_targets=(), max_attempts=2), devices))
    ada, bob, cyd = world.server.result().rounds[0].clients
    assert (ada.status, bob.status, cyd.status) == ("refused: memory: as told", "refused: data: as told", "aggregated")
    assert (len(world.devices["ada"].tasks), len(world.devices["bob"].tasks)) == (2, 1)


def test_the_programs_own_plan_decides(tmp_path: Path) -> None:
    """Programs of the whole width plan more than any device has, whatever the estimate: smaller submodels are tried."""
    world = World(
        tmp_path,
        config(rounds=1),
        fleet(),
        planned=lambda request: 2 * LARGE if request.architecture.axes == () else 1000,
    )
    rows = finish(world).server.result().rounds[0].clients
    narrow = [candidate for candidate in world.context.first.candidates if candidate.architecture.axes]
    expected = narrow[-1].architecture.architecture_id
    assert {(row.architecture_id, row.status) for row in rows} == {(expected, "aggregated")}
    assert all(row.planned_peak_bytes <= row.budget_bytes for row in rows)


def test_a_device_is_judged_by_the_width_of_its_kernels(tmp_path: Path) -> None:
    """Packings that come with a program count in that choice at once, and in all choices from the next round on."""
    wide = Behaviour(packing_width=32)
    world = World(tmp_path, config(rounds=2), {**fleet(), "ada": wide}, planned=lambda _: 1000)
    world.exports.packings = (Packing(width=32, more_bytes=2 * PLENTY_BYTES),)
    for record in finish(world).server.result().rounds:
        rows = {row.client_id: row for row in record.clients}
        assert rows["ada"].status.startswith("skipped")
        assert {row.planned_peak_bytes for name, row in rows.items() if name != "ada"} == {1000}
    assert not world.devices["ada"].tasks


@pytest.mark.parametrize(("micro_batch_size", "batch_size", "accumulate"), [(0, 8, False), (2, 2, True)])
def test_a_program_takes_micro_batches_and_recomputes_where_the_settings_say_so(
    tmp_path: Path, micro_batch_size: int, batch_size: int, accumulate: bool
) -> None:
    training = TrainingSettings(batch_size=8, micro_batch_size=micro_batch_size, recompute=accumulate)
    world = finish(World(tmp_path, config(rounds=1, training=training), fleet()))
    programs = {
        (r.batch_size, r.accumulate, r.recompute) for r in world.exports.requests if isinstance(r, TrainRequest)
    }
    assert programs == {(batch_size, accumulate, accumulate)}


def test_a_device_that_nothing_fits_is_skipped_with_the_reason(tmp_path: Path) -> None:
    devices = fleet()
    devices["ada"] = replace(devices["ada"], memory_budget_bytes=lambda _: 10)
    devices["bob"] = replace(devices["bob"], reading=lambda _: Reading(uplink_bps=8.0))
    world = finish(World(tmp_path, config(rounds=1, deploy_targets=()), devices))
    ada, bob, cyd = world.server.result().rounds[0].clients
    assert ada.status.startswith("skipped: no submodel fits: the smallest needs")
    assert bob.status.startswith("skipped: no submodel fits: the smallest moves")
    assert cyd.status == "aggregated"


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(runtimes=("tflite",)), "skipped: it runs tflite"),
        (Behaviour(input_shape=(7,)), "skipped: its samples have shape (7,), but the model takes (6,)"),
    ],
)
def test_a_device_that_cannot_take_part_is_skipped(tmp_path: Path, behaviour: Behaviour, reason: str) -> None:
    world = finish(World(tmp_path, config(rounds=1, deploy_targets=()), {**fleet(), "dot": behaviour}))
    rows = {row.client_id: row.status for row in world.server.result().rounds[0].clients}
    assert rows["dot"].startswith(reason)
    assert rows["ada"] == "aggregated"


def test_a_device_that_is_not_available_is_counted(tmp_path: Path) -> None:
    away = Behaviour(reading=lambda _: Reading(available=False))
    world = finish(World(tmp_path, config(rounds=1, deploy_targets=()), {**fleet(), "dot": away}))
    (record,) = world.server.result().rounds
    assert record.idle == {"skipped: the device is not available now": 1}
    assert record.left_out == "1 skipped: the device is not available now"
    assert (len(record.clients), record.due, record.not_drawn) == (3, 4, 0)


def test_a_failed_export_affects_only_its_devices(tmp_path: Path) -> None:
    def planned(request: TrainRequest) -> int:
        if request.target == "executorch":
            raise ExportError("no such lowering")
        return 1000

    world = World(tmp_path, config(rounds=1), {**fleet(), "dot": Behaviour(runtimes=("executorch",))}, planned=planned)
    rows = {row.client_id: row.status for row in finish(world).server.result().rounds[0].clients}
    assert rows["dot"] == "skipped: export failed: no such lowering"
    assert rows["ada"] == "aggregated"


def _fill_with_nan(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    return {name: np.full(array.shape, np.nan, dtype=np.float32) for name, array in weights.items()}


def _add_axis(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    return {name: np.zeros((*array.shape, 1), dtype=np.float32) for name, array in weights.items()}


def _rename_tensors(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    return {f"{name}.x": np.zeros_like(array) for name, array in weights.items()}


def _fill_with_1e38(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    return {name: np.full(array.shape, 1e38, dtype=np.float32) for name, array in weights.items()}


@pytest.mark.parametrize("change", [_fill_with_nan, _add_axis, _rename_tensors, _fill_with_1e38])
def test_a_bad_update_is_refused_and_never_aggregated(tmp_path: Path, change: Any) -> None:
    devices = fleet()
    with_bad = World(tmp_path / "bad", config(deploy_targets=()), {**devices, "eve": Behaviour(change=change)})
    statuses = {row.client_id: row.status for row in finish(with_bad).server.result().rounds[0].clients}
    assert statuses.pop("eve").startswith("refused: ")
    assert set(statuses.values()) == {"aggregated"}
    without = finish(World(tmp_path / "good", config(deploy_targets=()), devices))
    assert with_bad.model_bytes() == without.model_bytes()


def test_a_silent_device_is_missing_after_the_deadline(tmp_path: Path) -> None:
    deadlines = Deadlines(join_s=50, measure_s=10, round_s=30, deploy_s=20, lease_s=1e4, linger_s=0)
    world = World(tmp_path, config(deadlines=deadlines), fleet())
    world.run(until=lambda: bool(world.devices["cyd"].tasks))
    world.devices.pop("cyd")
    finish(world)
    first, second = ({row.client_id: row.status for row in record.clients} for record in world.server.result().rounds)
    assert first["cyd"] in ("missing: no answer came in time", "aggregated")
    assert second["cyd"] == "missing: no telemetry came in time"
    assert first["ada"] == second["ada"] == "aggregated"


def test_a_quorum_closes_a_round_without_the_slowest(tmp_path: Path) -> None:
    world = World(tmp_path, config(quorum=0.6, rounds=1, deploy_targets=()), fleet())
    world.run(until=lambda: world.server.state.phase == "train")
    slow = world.devices.pop("cyd")
    finish(world)
    statuses = {row.client_id: row.status for row in world.server.result().rounds[0].clients}
    assert statuses == {"ada": "aggregated", "bob": "aggregated", "cyd": "missing: the round closed at its quorum"}
    slow.step()


def test_a_run_without_enough_clients_fails_with_a_reason(tmp_path: Path) -> None:
    deadlines = Deadlines(join_s=20, linger_s=0)
    devices = {name: behaviour for name, behaviour in fleet().items() if name != "cyd"}
    world = finish(World(tmp_path, config(deadlines=deadlines), devices))
    assert world.server.state.phase == "failed"
    assert world.server.state.failure.startswith("only 2 of 3 clients were present after 20 s; start more clients")


def test_bytes_in_the_rows_are_the_bytes_that_were_published(tmp_path: Path) -> None:
    world = finish(World(tmp_path, config(rounds=1, deploy_targets=()), fleet()))
    for row in world.server.result().rounds[0].clients:
        task = world.devices[row.client_id].tasks[0]
        (weights,) = task.weights
        moved = weights.size_bytes + task.programs[0].blob.size_bytes
        assert row.bytes_down > moved
        assert row.bytes_up > weights.size_bytes
    assert sum(row.bytes_up for row in world.server.result().rounds[0].clients) <= world.line.received_bytes


def test_blobs_and_checkpoints_of_old_rounds_are_deleted(tmp_path: Path) -> None:
    world = finish(World(tmp_path, config(rounds=5, keep_rounds=2, deploy_targets=()), fleet()))
    checkpoints = sorted(path.name for path in (tmp_path / "state" / "checkpoints").iterdir())
    assert checkpoints == ["round-000004.safetensors", "round-000005.safetensors"]
    digests = {path.name for path in (tmp_path / "state" / "blobs").iterdir() if path.is_file()}
    assert digests >= world.journal.update_digests(since_round=4)
    assert not digests & (world.journal.update_digests(since_round=1) - world.journal.update_digests(since_round=4))
