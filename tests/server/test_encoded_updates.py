"""The server decodes updates with the codec of their task, and plans the uplink with the encoded size."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server.aggregating import aggregate_clients
from server.coordinator_cases import context_of, training, update

from subfleet.aggregation.updates import Magnitude, check_update, open_update
from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.arrays.codecs import draw_rounding_numbers, encode_changes
from subfleet.elastic.building import init_state
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.robust_aggregation import CoordinateMedian
from subfleet.elastic.update_form import UpdateForm, update_bytes
from subfleet.methods.anycostfl import AnycostFL
from subfleet.methods.assigner import AssignmentContext, Draw
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.messages import Task
from subfleet.protocol.readings import Budget
from subfleet.protocol.task import Train
from subfleet.protocol.update_codecs import AnyUpdateCodec, Qsgd, TopK, TopKQsgd, Uncompressed
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import AcceptedUpdate, ClientState, RunState
from subfleet.serving.run_context import create_context as planned
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.testing.rounds import with_steps
from subfleet.transport.blob_store import BlobStore

Changes = dict[str, npt.NDArray[np.float32]]
MODEL = Mlp(input_shape=(6,), class_count=3, widths=(8, 8), depths=(2, 1), group_size=4, norm="batch")
PLAN = context_of(model=MODEL)
NETWORK = PLAN.network
STATE = init_state(NETWORK, 0)
BUFFERS = {name for name, decl in NETWORK.tensors.items() if decl.role in ("mean", "variance")}
CODECS = (Qsgd(levels=7), TopK(fraction=0.3), TopKQsgd(fraction=0.3, levels=7))
EVERY = pytest.mark.parametrize("codec", [Uncompressed(), *CODECS], ids=lambda codec: codec.TYPE)


def draw_changes(task: Task, scale: float = 0.1) -> Changes:
    generator = np.random.default_rng(len(task.client_id) + sum(map(ord, task.client_id)))
    return {
        name: (scale * generator.normal(size=shape)).astype(np.float32)
        for name, shape in NETWORK.shapes(task.architecture).items()
    }


def encode_update(codec: AnyUpdateCodec, changes: Changes, client_id: str) -> bytes:
    def uniform(name: str) -> Callable[[int], npt.NDArray[np.float64]]:
        return draw_rounding_numbers(name, seed=0, round_number=1, client_id=client_id)

    return encode_arrays(encode_changes(codec, changes, exact=BUFFERS, uniform=uniform))


def build_clients(
    blobs: BlobStore, codec: AnyUpdateCodec, scale: float = 0.1, *, decoded: bool = False
) -> list[ClientState]:
    """Return clients with encoded updates, or with the decoded updates sent uncompressed."""
    state, states = training(PLAN), []
    for name, client in state.clients.items():
        assert client.task is not None
        assert isinstance(client.task.work, Train)
        work = replace(client.task.work, update_codec=Uncompressed() if decoded else codec)
        task = replace(client.task, work=work)
        reference = blobs.add(encode_update(codec, draw_changes(task, scale), name))
        if decoded:
            change = open_update(UpdateForm.of(NETWORK, task.architecture, codec), blobs, reference)
            reference = blobs.add(encode_arrays({key: tensor.numpy() for key, tensor in change.items()}))
        states.append(
            replace(
                client,
                stage="done",
                task=task,
                trained=AcceptedUpdate(update=replace(update(PLAN, state, name), blob=reference)),
            )
        )
    return states


def aggregate(states: list[ClientState], blobs: BlobStore, **changes: Any) -> dict[str, torch.Tensor]:
    roles = with_steps(HeteroFL().roles(), **changes)
    context = replace(PLAN, roles=roles, config=replace(PLAN.config, max_client_fraction=1.0))
    aggregation = partial(aggregate_clients, context, blobs)
    result = aggregation(ModelState(shared=STATE), 1, states)
    assert not result.refused
    return dict(result.state.shared)


def have_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name].view(torch.int32), right[name].view(torch.int32)) for name in STATE)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("robust", [None, CoordinateMedian(least_clients=2)], ids=["mean", "median"])
def test_encoded_updates_are_aggregated_like_their_decoded_values(
    tmp_path: Path, codec: AnyUpdateCodec, robust: CoordinateMedian | None
) -> None:
    blobs = BlobStore(tmp_path)
    result = aggregate(build_clients(blobs, codec), blobs, robust_aggregation=robust)
    assert have_same_bits(
        result, aggregate(build_clients(blobs, codec, decoded=True), blobs, robust_aggregation=robust)
    )
    assert not have_same_bits(result, STATE)


@EVERY
def test_no_change_changes_no_bit(tmp_path: Path, codec: AnyUpdateCodec) -> None:
    blobs = BlobStore(tmp_path)
    assert have_same_bits(aggregate(build_clients(blobs, codec, scale=0.0), blobs), STATE)


@EVERY
def test_running_statistics_are_aggregated_as_they_were_measured(tmp_path: Path, codec: AnyUpdateCodec) -> None:
    blobs = BlobStore(tmp_path)
    exact, result = (aggregate(build_clients(blobs, each_codec), blobs) for each_codec in (Uncompressed(), codec))
    assert BUFFERS
    assert all(torch.equal(result[name], exact[name]) for name in BUFFERS)


def check(form: UpdateForm, path: Path) -> None:
    """Check an update as on arrival."""
    check_update(form, path, magnitudes=dict.fromkeys(form.shapes, Magnitude(largest_change=2.0**20)))


@pytest.mark.slow
@EVERY
def test_an_update_has_the_estimated_size(tmp_path: Path, codec: AnyUpdateCodec) -> None:
    context = context_of(model=MODEL, update_codec=codec)
    for candidate in context.first.candidates:
        (submodel,) = _task().submodels
        task = replace(_task(), submodels=(replace(submodel, architecture=candidate.architecture),))
        content = encode_update(codec, draw_changes(task), "ada")
        values = sum(array.nbytes for array in decode_arrays(content).values())
        assert values == candidate.update_bytes == update_bytes(NETWORK, candidate.architecture, codec)
        assert candidate.update_bytes <= candidate.weight_bytes
        assert (candidate.update_bytes == candidate.weight_bytes) == (codec == Uncompressed())
        (tmp_path / "update").write_bytes(content)
        check(UpdateForm.of(NETWORK, candidate.architecture, codec), tmp_path / "update")


def _task() -> Task:
    task = training(PLAN).clients["ada"].task
    assert task is not None
    return task


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.TYPE)
def test_an_update_that_the_codec_does_not_write_is_refused_on_arrival(tmp_path: Path, codec: AnyUpdateCodec) -> None:
    task, path = _task(), tmp_path / "update"
    form, changes = UpdateForm.of(NETWORK, task.architecture, codec), draw_changes(_task())
    good = decode_arrays(encode_update(codec, changes, "ada"))
    coded = next(name for name, array in good.items() if array.dtype == np.uint8)
    buffer = min(BUFFERS & good.keys())
    spoilt: list[dict[str, Any]] = [
        changes,  # uncompressed
        {**good, coded: good[coded][:-1]},
        {**good, coded: np.full_like(good[coded], 255)},
        {**good, buffer: np.zeros(4, np.uint8)},
        {**good, buffer: np.full(good[buffer].shape, np.inf, np.float32)},
        {name: array for name, array in good.items() if name != coded},
    ]
    for arrays in spoilt:
        path.write_bytes(encode_arrays(arrays))
        with pytest.raises(ProtocolError):
            check(form, path)
    path.write_bytes(encode_arrays(good))
    check(form, path)
    with pytest.raises(ProtocolError, match="must be float32"):
        check(replace(form, codec=Uncompressed()), path)


def test_an_update_that_decodes_to_nan_is_refused(tmp_path: Path) -> None:
    form = UpdateForm.of(NETWORK, _task().architecture, TopK(fraction=0.3))
    good = decode_arrays(encode_update(form.codec, draw_changes(_task()), "ada"))
    coded = next(name for name, array in good.items() if array.dtype == np.uint8)
    ends = np.array(good[coded])
    ends[-4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    (tmp_path / "update").write_bytes(encode_arrays({**good, coded: ends}))
    with pytest.raises(ProtocolError, match="must be finite"):
        check(form, tmp_path / "update")


def build_question(context: RunContext, **links: int) -> AssignmentContext:
    return AssignmentContext(
        networks={"": context.network},
        candidates=context.first.candidates,
        estimate=context.first.estimate,
        draw=Draw(seed=0, round=1, client_id="ada"),
        target="onnx",
        budget=Budget(memory_bytes=2**40, **links),
    )


def count_parameters(context: RunContext, **links: int) -> int:
    candidate = context.roles.assigner.assign(build_question(context, **links)).candidate
    return 0 if candidate is None else candidate.parameters


def test_a_weak_uplink_carries_a_larger_submodel_with_a_codec_and_a_weak_downlink_does_not() -> None:
    plans = [context_of(model=MODEL, update_codec=codec) for codec in (None, *CODECS)]
    limit = PLAN.first.candidates[2].weight_bytes
    assert len({count_parameters(context, downlink_bytes=limit) for context in plans}) == 1
    raw, *compressed = (count_parameters(context, uplink_bytes=limit) for context in plans)
    assert min(compressed) > raw > 0


@cache
def plan_anycost() -> RunContext:
    return planned(
        Run(
            name="test",
            model=replace(MODEL, widths=(32, 32), depths=(3, 2), norm="group"),
            data=DataSettings(test="unused"),
            method=AnycostFL(codec=TopKQsgd(fraction=0.05)),
        ),
        "run",
    )


def test_anycostfl_sends_everything_if_the_uplink_allows_it_and_less_if_it_lacks_a_byte() -> None:
    size = plan_anycost().space[-1]
    whole_bytes = update_bytes(plan_anycost().network, size, TopKQsgd(fraction=1.0))
    for short in (0, 1):
        codec = plan_anycost().update_codec(
            plan_anycost().network, size, Budget(memory_bytes=1, uplink_bytes=whole_bytes - short)
        )
        assert isinstance(codec, TopKQsgd)
        assert (codec.fraction == 1.0) != bool(short)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(uplink_bytes=st.integers(0, 25_000))
def test_anycostfl_gives_the_largest_width_and_then_the_densest_update(uplink_bytes: int) -> None:
    chosen = plan_anycost().roles.assigner.assign(build_question(plan_anycost(), uplink_bytes=uplink_bytes)).candidate
    fitting = [candidate for candidate in plan_anycost().first.candidates if candidate.update_bytes <= uplink_bytes]
    assert chosen == (fitting[-1] if fitting else None)
    if chosen is None:
        return
    codec = plan_anycost().update_codec(
        plan_anycost().network, chosen.architecture, Budget(memory_bytes=1, uplink_bytes=uplink_bytes)
    )
    assert isinstance(codec, TopKQsgd)
    assert update_bytes(plan_anycost().network, chosen.architecture, codec) <= uplink_bytes
    denser = replace(codec, fraction=min(1.0, codec.fraction + 0.02))
    assert codec.fraction == 1.0 or update_bytes(plan_anycost().network, chosen.architecture, denser) > uplink_bytes
    assert codec.fraction >= 0.05


def test_anycostfl_sends_everything_without_a_limit_and_an_explicit_codec_always_applies() -> None:
    size, free = plan_anycost().first.candidates[-1].architecture, Budget(memory_bytes=1)
    assert plan_anycost().update_codec(plan_anycost().network, size, free) == TopKQsgd(fraction=1.0)
    for codec, expected in ((None, Uncompressed()), (Qsgd(), Qsgd()), (TopK(fraction=0.5), TopK(fraction=1.0))):
        assert context_of(method=AnycostFL(codec=codec)).update_codec(PLAN.network, PLAN.space[0], free) == expected
    context = context_of(method=AnycostFL(), update_codec=TopK(fraction=0.5))
    assert context.update_codec(PLAN.network, PLAN.space[0], free) == TopK(fraction=0.5)


def list_codecs(state: RunState) -> set[AnyUpdateCodec]:
    works = [client.task.work for client in state.clients.values() if client.task is not None]
    return {work.update_codec for work in works if isinstance(work, Train)}


def test_a_task_names_the_codec() -> None:
    state = training(context_of(model=MODEL, update_codec=CODECS[0]))
    assert list_codecs(state) == {CODECS[0]}
    assert list_codecs(training(PLAN)) == {Uncompressed()}


def test_a_configuration_names_the_codec_in_a_table(tmp_path: Path) -> None:
    text = """
name = "digits"
data.test = "test.npz"
model = { family = "mlp", input_shape = [6], class_count = 3, widths = [8], depths = [1] }
method = { type = "anycostfl", codec = { type = "top_k", fraction = 0.2 } }

[update_codec]
type = "qsgd"
levels = 3
"""
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    run = read_run(path)
    assert (run.update_codec, run.method) == (Qsgd(levels=3), AnycostFL(codec=TopK(fraction=0.2)))
    assert run.fingerprint() != replace(run, update_codec=None).fingerprint()
    path.write_text(text.replace("levels = 3", "levels = 300"))
    with pytest.raises(ConfigError, match=r"update_codec\.levels is 300, but must be from 1 to 127"):
        read_run(path)
    path.write_text(text.replace('"qsgd"', '"zip"'))
    with pytest.raises(ConfigError, match=r"'zip', but must be one of \['none', 'qsgd', 'top_k', 'top_k_qsgd'\]"):
        read_run(path)
