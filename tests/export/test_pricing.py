"""Prices of subnets: exact where the program was planned, close and not below elsewhere, for every family."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from elastic.elastic_cases import CONFIGS
from elastic.token_cases import TOKEN_CONFIGS
from export.export_cases import MLP, largest, program_of, train_request

from subfleet.elastic.families import FAMILIES, network_of
from subfleet.elastic.network import ModelConfig, Network
from subfleet.export.cache import CacheFolder, ExportCache
from subfleet.export.memory.liveness import GIVEN_BACK
from subfleet.export.memory.onnx_arena import Arena
from subfleet.export.pricing.fitting import segment_at
from subfleet.export.pricing.layers import layers_of
from subfleet.export.pricing.library import requests_of
from subfleet.export.pricing.model import PriceModel
from subfleet.export.pricing.recording import TAKE, Node, PlannedStep, Segment, segments_of
from subfleet.export.pricing.running import run_step
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.protocol.programs import encode_program
from subfleet.protocol.subnet import Centre, Prefix, SubnetSpec
from subfleet.protocol.training import ObjectiveSettings

SMALL: dict[str, ModelConfig] = {}
for config in (*CONFIGS, *TOKEN_CONFIGS):
    SMALL.setdefault(config.family, config)
PER_TOKEN = frozenset({"decoder", "bert", "lstm"})


def request_for(config: ModelConfig, target: str, spec: SubnetSpec) -> TrainRequest:
    objective = ObjectiveSettings(name="next_token" if config.family in PER_TOKEN else "cross_entropy")
    return replace(train_request(target, config, spec=spec), objective=objective)


def random_spec(network: Network, seed: int) -> SubnetSpec:
    chance = random.Random(seed)
    axes: list[tuple[str, Prefix | Centre]] = []
    for name, axis in sorted(network.axes.items()):
        if axis.kind == "kernel":
            axes.append((name, Centre(size=chance.randrange(2 - axis.size % 2, axis.size + 1, 2))))
        elif axis.kind != "class":
            axes.append((name, Prefix(size=chance.randrange(axis.granularity, axis.size + 1, axis.granularity))))
    return SubnetSpec(axes=tuple(axes), blocks=tuple(b.name for b in network.blocks if chance.random() < 0.6))


def model_of(config: ModelConfig, target: str, folder: Path | None = None) -> PriceModel:
    return PriceModel(network_of(config), lambda spec: request_for(config, target, spec), folder=folder)


@cache
def exact_bytes(config: ModelConfig, target: str, spec: SubnetSpec) -> int:
    return run_step(training_step_of(request_for(config, target, spec)), target)[1].peak_bytes


def test_every_family_has_a_small_network() -> None:
    assert SMALL.keys() == FAMILIES.keys()


QUICK = frozenset({"mlp"})
"""Families whose programs are planned in seconds; the others have their own target, `make test-long`."""


@pytest.mark.slow
@pytest.mark.export
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in sorted(FAMILIES)]
)
def test_onnx_prices_are_close_and_not_below(family: str) -> None:
    model = model_of(SMALL[family], "onnx")
    spec = random_spec(network_of(SMALL[family]), 0)
    exact = exact_bytes(SMALL[family], "onnx", spec)
    # 64 KiB, in which plans count the runtime's objects, are 3 % of programs as small as these.
    assert exact <= model.memory_bytes(spec) <= 1.05 * exact + 2**16


@pytest.mark.slow
@pytest.mark.export
@pytest.mark.parametrize("target", ["executorch", "torch"])
def test_prices_for_other_targets_are_close_and_not_below(target: str) -> None:
    model = model_of(MLP, target)
    for seed in range(2):
        spec = random_spec(network_of(MLP), seed)
        exact = exact_bytes(MLP, target, spec)
        assert exact <= model.memory_bytes(spec) <= 1.05 * exact + 2**16


@pytest.mark.slow
@pytest.mark.export
def test_what_onnx_runtime_holds_is_told_exactly() -> None:
    """Of subnets that were not recorded: segments of others come to the very same memory."""
    network = network_of(MLP)
    model = model_of(MLP, "onnx")
    for seed in range(4):
        model.memory_bytes(random_spec(network, seed))
    others = [spec for seed in range(4, 40) if (spec := random_spec(network, seed)).blocks]
    told = [spec for spec in others if model.library.segments(layers_of(network, spec)) is not None]
    assert told
    for spec in told[:3]:
        segments = model.library.segments(layers_of(network, spec))
        requests = requests_of(segments or ())
        plan = run_step(training_step_of(request_for(MLP, "onnx", spec)), "onnx")[1]
        assert requests is not None
        assert _resident_bytes(requests) == plan.activation_bytes + plan.workspace_bytes


@pytest.mark.slow
@pytest.mark.export
def test_few_recordings_price_all_subnets_with_layers_of_the_same_kinds() -> None:
    network = network_of(MLP)
    model = model_of(MLP, "onnx")
    specs = [wide_spec(network, seed) for seed in range(60)]
    for spec in specs[:8]:
        model.memory_bytes(spec)
    known = model.recorded_count
    assert known <= 6
    for spec in specs[8:]:
        model.memory_bytes(spec)
    assert model.recorded_count == known
    for spec in specs[-2:]:
        exact = exact_bytes(MLP, "onnx", spec)
        assert exact <= model.memory_bytes(spec) <= 1.05 * exact + 2**16


def wide_spec(network: Network, seed: int) -> SubnetSpec:
    """All blocks, and two groups or more of every axis that has two."""
    chance = random.Random(seed)
    axes = [
        (name, Prefix(size=chance.randrange(2 * axis.granularity, axis.size + 1, axis.granularity)))
        for name, axis in sorted(network.axes.items())
        if axis.kind != "class" and axis.size > axis.granularity
    ]
    return SubnetSpec(axes=tuple(axes), blocks=tuple(block.name for block in network.blocks))


def _resident_bytes(requests: list[tuple[int, int]]) -> int:
    arena = Arena()
    addresses: dict[int, int] = {}
    for block, size in requests:
        if size == GIVEN_BACK:
            arena.give(addresses.pop(block))
        else:
            addresses[block] = arena.take(size)
    return arena.resident_bytes


@pytest.mark.slow
@pytest.mark.export
def test_recordings_are_kept_on_disk(tmp_path: Path) -> None:
    spec = random_spec(network_of(MLP), 0)
    first = model_of(MLP, "onnx", tmp_path)
    price = first.memory_bytes(spec)
    (next(iter(tmp_path.iterdir())) / "damaged.json").write_bytes(b"{}")
    again = model_of(MLP, "onnx", tmp_path)
    assert again.recorded_count == first.recorded_count > 0
    assert again.memory_bytes(spec) == price
    assert again.recorded_count == first.recorded_count


@pytest.mark.slow
@pytest.mark.export
def test_the_plan_of_an_exported_program_is_its_price(tmp_path: Path) -> None:
    request = train_request("onnx", MLP, spec=largest(MLP))
    cache_ = ExportCache(CacheFolder(path=tmp_path))
    program = program_of(request)
    cache_.path(request).write_bytes(encode_program(program))
    model = PriceModel(network_of(MLP), lambda spec: replace(request, spec=spec), programs=cache_)
    assert model.memory_bytes(largest(MLP)) == program.manifest.planned_peak_bytes
    assert model.recorded_count == 0


def chain(widths: tuple[int, ...]) -> PlannedStep:
    """Layers a, b, ... that each keep their result for the backward pass."""
    names = "abcdefgh"[: len(widths)]
    forward, backward = [], []
    before = "x"
    for name, width in zip(names, widths, strict=True):
        taken = ((f"y{name}", 4 * width), (f"s{name}", 8), (f"s{name}", GIVEN_BACK))
        forward.append(Node(inputs=(before, name), outputs=(f"y{name}",), requests=taken))
        before = f"y{name}"
    loss = Node(inputs=(before,), outputs=("loss",), requests=())
    gradient = Node(inputs=(before,), outputs=("g",), requests=(("g", 4),))
    last = "g"
    for name in reversed(names):
        given = ((f"g{name}", 4), (last, GIVEN_BACK), (f"y{name}", GIVEN_BACK))
        backward.append(Node(inputs=(last, f"y{name}", name), outputs=(f"g{name}", f"new.{name}"), requests=given))
        last = f"g{name}"
    end = Node(inputs=(last,), outputs=("end",), requests=((last, GIVEN_BACK),))
    return PlannedStep(
        nodes=(*forward, loss, gradient, *backward, end),
        held={name: f"{name}.weight" for name in names},
        given={f"new.{name}": f"{name}.weight" for name in names},
        batch="x",
        loss="loss",
    )


def test_segments_give_the_programs_own_requests_back() -> None:
    step = chain((3, 5, 7))
    segments = segments_of(step, [["a.weight"], ["b.weight"], ["c.weight"]])
    told = requests_of(segments)
    assert told is not None
    sizes = [size for node in step.nodes for _, size in node.requests]
    assert [size for _, size in told] == sizes
    assert [len(segments[at].sizes) for at in (1, 2, 3)] == [2, 2, 2]


def test_a_layer_less_is_the_program_without_it() -> None:
    layers = [["a.weight"], ["b.weight"], ["c.weight"], ["d.weight"]]
    whole = segments_of(chain((3, 5, 7, 9)), layers)
    shorter = segments_of(chain((3, 5, 7)), layers[:3])
    assert whole[2].events == shorter[2].events
    assert whole[2 * 4 - 1].events == shorter[2 * 3 - 1].events


def test_a_dropped_block_does_not_fit_together() -> None:
    """A planted underestimate: one live tensor that nobody takes is seen where it is given back."""
    step = chain((3, 5))
    segments = segments_of(step, [["a.weight"], ["b.weight"]])
    events = tuple(event for event in segments[1].events if event != (1, 0))
    lossy = replace(segments[1], events=events, sizes=segments[1].sizes[1:])
    assert requests_of((segments[0], lossy, *segments[2:])) is None


def recorded(*pairs: tuple[tuple[int, ...], int]) -> dict[tuple[int, ...], Segment]:
    return {dims: Segment(events=((TAKE, 0),), sizes=(size,), weight=1) for dims, size in pairs}


def test_a_block_is_told_where_its_axes_are_known() -> None:
    known = recorded(((2, 3), 4 * 2), ((8, 9), 4 * 8), ((4, 9), 4 * 4))
    found = segment_at(known, (6, 7))
    assert found is not None
    assert found.sizes == (24,)


def test_a_sum_of_sizes_is_told() -> None:
    known = recorded(((2,), 40 + 8), ((5,), 40 + 20), ((9,), 40 + 36))
    found = segment_at(known, (6,))
    assert found is not None
    assert found.sizes == (40 + 24,)


def test_nothing_is_told_beyond_what_was_recorded() -> None:
    known = recorded(((2,), 2 * 2**18), ((5,), 5 * 2**18))
    assert segment_at(known, (6,)) is None
    assert segment_at(known, (1,)) is None


def test_nothing_is_told_where_axes_cannot_be_told_apart() -> None:
    known = recorded(((2, 2), 2 * 2**20), ((8, 8), 8 * 2**20))
    assert segment_at(known, (3, 6)) is None
    found = segment_at(known, (5, 5))
    assert found is not None
    assert found.sizes == (5 * 2**20,)


def test_nothing_is_told_between_two_forms() -> None:
    other = Segment(events=((TAKE, 0), (TAKE, 1)), sizes=(4, 4), weight=2)
    known = {**recorded(((2,), 8)), (9,): other}
    assert segment_at(known, (5,)) is None
    assert segment_at(known, (9,)) == other
