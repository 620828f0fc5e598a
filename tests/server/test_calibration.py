"""Calibration rounds, in which devices measure the running statistics of norms: schedule, tasks and aggregation."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    prepared,
    refusal,
    replies,
    select_requests,
    telemetry,
    update,
)
from server.fake_device import small_change
from server.server_rig import MODEL, World, config, fleet

from subfleet.aggregation.aggregation import AggregatedModel
from subfleet.aggregation.calibration import calibrate_model, check_sums
from subfleet.arrays import encode_arrays
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.norm_layers import norm_layers
from subfleet.elastic.running_statistics import NormMoments, pool_statistics
from subfleet.methods import AnyMethod
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fjord import FjORD
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.standalone import Standalone
from subfleet.protocol.calibration import Calibration, NormLayer, name_sums
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.messages import Task
from subfleet.protocol.task import Calibrate
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, RequestDone, SendTask
from subfleet.rounds.state import AcceptedUpdate, ClientState, RunState, Submodel
from subfleet.rounds.work import AggregatedRound, CheckRequest, TaskRequest
from subfleet.settings.run import Run
from subfleet.testing.submodels import have_same_bits
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.in_memory import Faults

BATCH_NORM = replace(MODEL, norm="batch")


def with_calibration(**changes: Any) -> dict[str, Any]:
    return {"model": BATCH_NORM, "norms": "calibrated", **changes}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rounds=st.integers(1, 40), every=st.integers(0, 12))
def test_norms_are_measured_every_few_rounds_and_after_the_last(rounds: int, every: int) -> None:
    run = config(**with_calibration(rounds=rounds, calibrate_every=every, learning_rate_decay=0.9))
    plain = config(rounds=rounds, learning_rate_decay=0.9)
    numbers = range(1, run.total_rounds + 1)
    trained = [number for number in numbers if not run.calibrates(number)]
    assert len(trained) == rounds == plain.total_rounds
    assert not any(plain.calibrates(number) for number in numbers)
    assert run.calibrates(run.total_rounds)
    lengths = [
        len(list(group)) for is_calibration, group in itertools.groupby(numbers, run.calibrates) if not is_calibration
    ]
    assert lengths[:-1] == [every] * (len(lengths) - 1)
    assert not every or lengths[-1] <= every
    assert [run.compute_training(number) for number in trained] == [
        plain.compute_training(number + 1) for number in range(rounds)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norms": "calibrated"}, "norms are 'calibrated' with model.norm 'group' and micro_batch_size 0, but devices"),
        (
            with_calibration(training=TrainingSettings(batch_size=4, micro_batch_size=2)),
            "micro_batch_size 2, but devices",
        ),
        ({"calibrate_every": 2}, "calibrate_every is 2 and norms are 'averaged', but it must be 0"),
        (with_calibration(calibrate_every=-1), "calibrate_every is -1"),
    ],
)
def test_a_configuration_that_cannot_be_calibrated_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


def measure_round(context: RunContext, number: int = 1) -> tuple[RunState, tuple[Action, ...]]:
    """Every client has answered the announcement of a round."""
    state = replace(measuring(context), round=number, aggregated_round=number - 1)
    actions: tuple[Action, ...] = ()
    for name in CLIENTS:
        state, new_actions = step(context, state, telemetry(context, name, number), 2.0)
        actions += new_actions
    return state, actions


@pytest.mark.parametrize(
    "method", [HeteroFL(), FedFA(choice="score"), FjORD(self_distillation=False)], ids=lambda method: method.TYPE
)
def test_every_client_measures_the_norms_of_its_size_with_the_program_that_trains(method: AnyMethod) -> None:
    context = context_of(**with_calibration(rounds=1, method=method, clients_per_round=1))
    state, requests = measure_round(context, 2)
    assert [request.student for request in select_requests(TaskRequest, requests)] == [None] * 3, (
        "no candidates, no student"
    )
    for name in CLIENTS:
        state, (action,) = step(context, state, prepared(context, state, name), 2.0)
        assert isinstance(action, SendTask)
        task, training = action.task, context.training(2)
        assert isinstance(task.work, Calibrate)
        assert task.work.settings == training
        assert (training.learning_rate, training.epochs, training.objective.distillation) == (0.0, 1, "none")
        assert training.optimiser == context.training(1).optimiser
        assert task.work.calibration == Calibration(norms=norm_layers(context.network, task.architecture))
    refused = replace(refusal(context, state, "ada"), reason="data")
    state, actions = step(context, state, refused, 3.0)
    assert replies(actions) == ["accepted"]
    for name in CLIENTS[1:]:
        state, actions = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            3.0,
        )
        assert replies(actions) == ["accepted"]
    state, _ = step(
        context,
        state,
        RequestDone(
            request=AggregationRequest(round=2, clients=()),
            result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
        ),
        4.0,
    )
    assert state.phase == "deploy"


def draw_sums(
    calibration: Calibration, shapes: Mapping[str, tuple[int, ...]], samples: int, seed: str
) -> dict[str, Any]:
    """Return the sums of random data, seeded by a name."""
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
    arrays: dict[str, Any] = {}
    for norm in calibration.norms:
        count = samples * norm.positions
        values = generator.normal(1.0, 2.0, (count, *shapes[f"{norm.name}.running_mean"]))
        whole = (np.array(count, np.int64), values.sum(0), np.square(values).sum(0))
        arrays |= dict(zip(name_sums(norm.name), whole, strict=True))
    return arrays


PLAN = context_of(**with_calibration(rounds=1))
SIZE = PLAN.space[0]
CALIBRATION = Calibration(norms=norm_layers(PLAN.network, SIZE))
LAYER = CALIBRATION.norms[0].name
COUNT, SUM, SQUARES = name_sums(LAYER)


def honest_sums() -> dict[str, Any]:
    return draw_sums(CALIBRATION, PLAN.network.shapes(SIZE), 7, "honest")


def test_honest_sums_pass_even_of_a_channel_that_never_changes(tmp_path: Path) -> None:
    constant = {**honest_sums(), SUM: np.full(4, 0.7) * 7, SQUARES: np.full(4, 0.7**2) * 7 * (1 - 1e-6)}
    for index, arrays in enumerate((honest_sums(), constant)):
        (tmp_path / str(index)).write_bytes(encode_arrays(arrays))
        check_sums(PLAN.network, SIZE, CALIBRATION, tmp_path / str(index), 7, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({COUNT: None}, "contain other tensors than requested"),
        ({"head.weight": np.zeros(3)}, "such as 'head.weight'"),
        ({COUNT: np.array(8, np.int64)}, "has counted 8 values per channel, but 7 samples have 7"),
        ({COUNT: np.array(7.0)}, "must be an int64 scalar"),
        ({COUNT: np.array([7], np.int64)}, "must be an int64 scalar"),
        ({SUM: np.zeros(5)}, r"two float64 arrays of the shape \(4,\)"),
        ({SQUARES: np.zeros(4, np.float32)}, "two float64 arrays"),
        ({SUM: np.full(4, np.nan)}, "are not finite"),
        ({SQUARES: np.full(4, np.inf)}, "are not finite"),
        ({SQUARES: np.full(4, 1e39)}, "exceed single precision"),
        ({SUM: np.zeros(4), SQUARES: np.full(4, -1.0)}, "contradict each other"),
        ({SQUARES: np.zeros(4)}, "contradict each other"),
        ({SUM: np.full(4, 1e300)}, "contradict each other"),
    ],
)
def test_sums_that_no_data_have_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    arrays = {name: array for name, array in {**honest_sums(), **changes}.items() if array is not None}
    (tmp_path / "sums").write_bytes(encode_arrays(arrays))
    with pytest.raises(ProtocolError, match=words):
        check_sums(PLAN.network, SIZE, CALIBRATION, tmp_path / "sums", 7, 7)


def test_sums_of_more_samples_than_the_profile_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sums").write_bytes(encode_arrays(honest_sums()))
    with pytest.raises(ProtocolError, match="the sums are of 7 samples, but the client's profile has 6"):
        check_sums(PLAN.network, SIZE, CALIBRATION, tmp_path / "sums", 7, 6)


def test_a_file_that_is_no_container_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sums").write_bytes(b"no container" * 10)
    with pytest.raises(ProtocolError):
        check_sums(PLAN.network, SIZE, CALIBRATION, tmp_path / "sums", 7, 7)
    with pytest.raises(FileError):
        check_sums(PLAN.network, SIZE, CALIBRATION, tmp_path / "absent", 7, 7)


def answer_round(context: RunContext, folder: Path) -> tuple[BlobStore, RunState, dict[str, dict[str, Any]]]:
    """Every client has sent its sums; the first has a smaller size."""
    blobs = BlobStore(folder)
    state, _ = measure_round(context, 2)
    small = replace(state.clients["ada"], given=Submodel(size=context.space[0], architecture=context.space[0]))
    state = replace(state, clients={**state.clients, "ada": small})
    sums_by_client = {}
    for index, name in enumerate(CLIENTS):
        state, _ = step(context, state, prepared(context, state, name), 2.0)
        task = state.clients[name].task
        assert task is not None
        assert isinstance(task.work, Calibrate)
        sums_by_client[name] = draw_sums(
            task.work.calibration, context.network.shapes(task.architecture), 5 + index, name
        )
        answer = replace(update(context, state, name), blob=blobs.add(encode_arrays(sums_by_client[name])))
        state = replace(
            state,
            clients={
                **state.clients,
                name: replace(state.clients[name], stage="done", trained=AcceptedUpdate(update=answer)),
            },
        )
    return blobs, state, sums_by_client


def calibrate(
    context: RunContext, blobs: BlobStore, model: ModelState, clients: Iterable[ClientState]
) -> AggregatedModel:
    unlimited = replace(context, config=replace(context.config, max_client_fraction=1.0))
    return calibrate_model(unlimited, blobs, model, AggregationRequest(round=2, clients=tuple(clients)))


def drawn_state(context: RunContext) -> ModelState:
    generator = torch.Generator().manual_seed(1)
    tensors = context.network.tensors.values()
    return ModelState(shared={decl.name: torch.rand(decl.shape, generator=generator) + 0.5 for decl in tensors})


def moments(arrays: Mapping[str, Any]) -> dict[str, NormMoments]:
    layers = {name.rpartition(".")[0] for name in arrays}
    parts = {layer: [arrays[name] for name in name_sums(layer)] for layer in layers}
    return {
        layer: NormMoments(total=torch.from_numpy(total), squares=torch.from_numpy(squares), count=int(count))
        for layer, (count, total, squares) in parts.items()
    }


def test_sums_become_statistics_whatever_their_order_and_weights_keep_their_bits(tmp_path: Path) -> None:
    blobs, state, sums_by_client = answer_round(PLAN, tmp_path)
    model = drawn_state(PLAN)
    clients = list(state.clients.values())
    aggregated = calibrate(PLAN, blobs, model, clients)
    assert [client.client_id for client in aggregated.clients] == list(CLIENTS)
    measured = [(client.architecture, moments(sums_by_client[client.client_id])) for client in aggregated.clients]
    assert measured[0][0] != measured[1][0]
    expected = {**model.shared, **pool_statistics(PLAN.network, model.shared, measured)}
    assert have_same_bits(dict(aggregated.state.shared), expected)
    for order in itertools.permutations(clients):
        assert have_same_bits(dict(calibrate(PLAN, blobs, model, order).state.shared), expected)
    moved = {name for name, tensor in model.shared.items() if not torch.equal(aggregated.state.shared[name], tensor)}
    assert moved == {name for name, decl in PLAN.network.tensors.items() if decl.role in ("mean", "variance")}


def test_without_any_answer_the_model_stays_as_it_is(tmp_path: Path) -> None:
    blobs, _, _ = answer_round(PLAN, tmp_path)
    model = drawn_state(PLAN)
    assert have_same_bits(dict(calibrate(PLAN, blobs, model, ()).state.shared), dict(model.shared))


def test_a_copy_has_the_statistics_of_its_own_clients(tmp_path: Path) -> None:
    context = context_of(**with_calibration(rounds=1, method=Standalone()))
    blobs, state, sums_by_client = answer_round(context, tmp_path)
    model = drawn_state(context)
    aggregated = calibrate(context, blobs, model, list(state.clients.values()))
    assert have_same_bits(dict(aggregated.state.shared), dict(model.shared))
    for client in aggregated.clients:
        own = pool_statistics(
            context.network, model.shared, [(client.architecture, moments(sums_by_client[client.client_id]))]
        )
        assert have_same_bits(dict(aggregated.state.copies[client.client_id]), own)


def test_sums_that_the_disk_has_lost_are_left_out(tmp_path: Path) -> None:
    blobs, state, sums_by_client = answer_round(PLAN, tmp_path)
    result = state.clients["bob"].update
    assert result is not None
    blobs.path(result.blob).unlink()
    model = drawn_state(PLAN)
    aggregated = calibrate(PLAN, blobs, model, list(state.clients.values()))
    assert list(aggregated.refused) == ["bob"]
    measured = [(client.architecture, moments(sums_by_client[client.client_id])) for client in aggregated.clients]
    assert have_same_bits(
        dict(aggregated.state.shared), {**model.shared, **pool_statistics(PLAN.network, model.shared, measured)}
    )


def train_or_calibrate(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return what a device without a trainer sends."""
    if not isinstance(task.work, Calibrate):
        return small_change(weights, task.client_id, task.round, 0.1)
    shapes = {name: array.shape for name, array in weights.items()}
    return draw_sums(
        task.work.calibration, shapes, {"ada": 7, "bob": 20, "cyd": 33}[task.client_id], task.task_id.partition("/")[2]
    )


def play_run(folder: Path, faults: Faults | None = None, *, kill: bool = False) -> World:
    run: Run = config(**with_calibration(calibrate_every=1, deploy_targets=()))
    world = World(folder, run, fleet(change=train_or_calibrate), faults=faults)
    if kill:
        for number in (2, 4):
            world.run(lambda number=number: world.server.state.round == number)  # type: ignore[misc]  # binds the loop variable
            world.run(lambda: any(client.stage == "done" for client in world.server.state.clients.values()))
            world.kill_server()
    world.run()
    return world


@pytest.mark.slow
def test_a_run_has_the_same_bits_whatever_is_lost_and_whoever_dies(tmp_path: Path) -> None:
    calm = play_run(tmp_path / "calm")
    assert [record.calibrated for record in calm.notes.records] == [False, True, False, True]
    assert {row.status for record in calm.notes.records for row in record.clients} == {"aggregated"}
    assert [task.work.TYPE for task in calm.devices["ada"].tasks] == ["train", "calibrate", "train", "calibrate"]
    rough = play_run(tmp_path / "rough", Faults(seed=3, loss=0.2, double=0.2, delay_s=1.5), kill=True)
    assert rough.model_bytes() == calm.model_bytes()


@pytest.mark.slow
def test_sums_of_other_norms_are_refused_by_a_run(tmp_path: Path) -> None:
    def answer_wrongly(weights: Mapping[str, Any], task: Task) -> dict[str, Any]:
        if not isinstance(task.work, Calibrate) or task.client_id != "bob":
            return train_or_calibrate(weights, task)
        norm = replace(task.work.calibration.norms[0], name="other")
        return draw_sums(Calibration(norms=(norm,)), {"other.running_mean": (8,)}, 20, "bob")

    world = World(tmp_path, config(**with_calibration(rounds=1, deploy_targets=())), fleet(change=answer_wrongly))
    world.run()
    statuses = {row.client_id: row.status for row in world.notes.records[-1].clients}
    assert statuses["ada"] == statuses["cyd"] == "aggregated"
    assert statuses["bob"].startswith("refused: the sums contain other tensors than requested")


def test_settings_of_a_calibration_are_checked() -> None:
    with pytest.raises(ValueError, match="norms is empty, but must have 1 or more"):
        Calibration(norms=norm_layers(context_of().network, context_of().space[0]))
    with pytest.raises(ValueError, match="positions is 0"):
        NormLayer(name="norm", positions=0, momentum=0.1)
