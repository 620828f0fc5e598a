"""Memory estimates of submodels, computed without programs, are close to the plans of programs for every target."""

import random
from dataclasses import replace
from functools import cache
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from elastic.elastic_cases import CONFIGS, DENSE, LAYERED, objective_of
from elastic.path_cases import PATHS
from elastic.recorded_cases import record_case
from elastic.token_cases import TOKEN_CONFIGS
from export.export_cases import train_request
from matrices import mostly_long
from shared_programs import program_of
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.families import FAMILIES
from subfleet.elastic.families.records.plain import Vgg
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Family, Network
from subfleet.elastic.size_table import SizeTable
from subfleet.elastic.spaces import uniform_space
from subfleet.export.canonical.cleaning import clean, fold_constants
from subfleet.export.estimation.coding import code_axes
from subfleet.export.estimation.model import EstimateModel, block_events
from subfleet.export.estimation.target_programs import (
    HOLES,
    STRIPE_COLUMNS,
    executorch_program,
    layers_of,
    onnx_program,
)
from subfleet.export.memory.onnx_run import run_onnx
from subfleet.export.memory.step_bytes import GAPS
from subfleet.export.recording import record
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import EstimateRequest, TrainRequest
from subfleet.export.targets.onnx import OnnxTarget, training_model
from subfleet.export.tracing import trace
from subfleet.protocol.errors import ExportError, ProtocolError
from subfleet.protocol.submodel import Architecture, Centre, Prefix

pytestmark = [pytest.mark.export]

SMALL: dict[str, Family] = {}
for config in (*CONFIGS, *DENSE.values(), *TOKEN_CONFIGS, *PATHS):
    SMALL.setdefault(config.TYPE, config)
RECORDED = ("residual", "dense", "shuffled", "swapped", "parts", "joined")
NAMES = (*sorted(SMALL), *RECORDED)
QUICK = frozenset({"mlp", "vgg", "vit"})
"""Families with programs that are planned here; `benchmarks/plan_estimate.py` covers all families."""


def find_network(name: str) -> Family:
    """A small network of a family, or a recorded one."""
    return record_case(name) if name in RECORDED else SMALL[name]


def request_for(config: Family, target: str, architecture: Architecture) -> TrainRequest:
    return replace(train_request(target, config, architecture=architecture), objective=objective_of(config))


def random_architecture(network: Network, seed: int) -> Architecture:
    generator = random.Random(seed)
    axes: list[tuple[str, Prefix | Centre]] = []
    for name, axis in sorted(network.axes.items()):
        if axis.kind == "kernel":
            axes.append((name, Centre(size=generator.randrange(2 - axis.size % 2, axis.size + 1, 2))))
        elif axis.kind != "class":
            axes.append((name, Prefix(size=generator.randrange(axis.granularity, axis.size + 1, axis.granularity))))
    return Architecture(axes=tuple(axes), blocks=tuple(b.name for b in network.blocks if generator.random() < 0.6))


def value_of(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None


@cache
def estimates_of(family: str, target: str) -> MemoryEstimates:
    network = network_of(find_network(family))
    return EstimateModel(network, request_for(find_network(family), target, Architecture())).estimates


def test_every_family_has_a_small_network() -> None:
    assert {*SMALL, "recorded"} == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "target"),
    mostly_long(
        [*product(sorted(QUICK), ("onnx", "executorch", "torch")), ("dense", "onnx"), ("dense", "torch")],
        ("mlp", "onnx"),
        ("mlp", "torch"),
        ("vgg", "executorch"),
        ("vit", "onnx"),
        ("dense", "onnx"),
    ),
)
def test_estimates_are_near_the_plans_of_written_programs(family: str, target: str) -> None:
    network = network_of(find_network(family))
    for seed in range(2):
        architecture = random_architecture(network, seed)
        program = program_of(request_for(find_network(family), target, architecture))
        (estimate,) = estimates_of(family, target).memory_bytes(network, [architecture])
        assert estimate == pytest.approx(program.manifest.planned_peak_bytes, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("target", mostly_long(["onnx", "executorch"], "executorch"))
def test_estimates_know_what_layers_of_other_widths_pass_on(target: str) -> None:
    config = replace(LAYERED["layered vgg"], kernels=())  # it is a `Vgg`
    network = network_of(config)
    estimates = EstimateModel(network, request_for(config, target, Architecture())).estimates
    for architecture in uniform_space(network, (0.5, 1))[::3]:
        program = program_of(request_for(config, target, architecture))
        (estimate,) = estimates.memory_bytes(network, [architecture])
        assert estimate == pytest.approx(program.manifest.planned_peak_bytes, rel=0.12), architecture


@pytest.mark.slow
@pytest.mark.parametrize("target", mostly_long(["onnx", "executorch"], "onnx"))
def test_estimates_know_how_many_places_kernels_have(target: str) -> None:
    """Weights, products and the runtime's objects grow with the positions of the kernel, however few the channels."""
    config = Vgg(input_shape=(3, 12, 12), class_count=10, depths=(2, 2), widths=(16, 64), kernels=(5, 5), norm="group")
    network = network_of(config)
    estimates = EstimateModel(network, request_for(config, target, Architecture())).estimates
    full = network.full_architecture()
    kernels = tuple((name, Centre(size=1)) for name, axis in network.axes.items() if axis.kind == "kernel")
    narrow = tuple((name, Prefix(size=8)) for name in ("section0.stream", "section1.stream"))
    for architecture in (full, replace(full, axes=kernels[1:]), replace(full, axes=narrow)):
        program = program_of(request_for(config, target, architecture))
        (estimate,) = estimates.memory_bytes(network, [architecture])
        assert estimate == pytest.approx(program.manifest.planned_peak_bytes, rel=0.12), architecture


@pytest.mark.slow
@pytest.mark.parametrize("side", [1, 3])
def test_a_cut_kernel_is_estimated_as_a_kernel_of_that_size(side: int) -> None:
    """With few channels, taps of a cut kernel are laid side by side, too, and one position needs no border."""
    wide = Vgg(input_shape=(3, 12, 12), class_count=10, depths=(1, 1), widths=(16, 16), kernels=(5, 5), norm="group")
    network = network_of(wide)
    estimates = EstimateModel(network, request_for(wide, "executorch", Architecture())).estimates
    for channels in (4, 8):
        axes: list[tuple[str, Prefix | Centre]] = [
            (name, Centre(size=side) if axis.kind == "kernel" else Prefix(size=channels))
            for name, axis in sorted(network.axes.items())
            if axis.kind != "class"
        ]
        cut = replace(network.full_architecture(), axes=tuple(axes))
        config = replace(wide, widths=(channels, channels), kernels=() if side == 3 else (side, side))
        small = network_of(config)
        alone = EstimateModel(small, request_for(config, "executorch", Architecture())).estimates
        (expected,) = alone.memory_bytes(small, [small.full_architecture()])
        assert estimates.memory_bytes(network, [cut]) == [pytest.approx(expected, rel=0.09)]


@pytest.mark.slow
def test_a_pool_stays_without_the_block_before_it() -> None:
    config = Vgg(input_shape=(3, 8, 8), class_count=4, depths=(2, 2), widths=(8, 8))
    network = network_of(config)
    whole, shallow = (
        training_step_of(request_for(config, "onnx", architecture))
        for architecture in (network.full_architecture(), replace(network.full_architecture(), blocks=()))
    )
    calls, decls = onnx_program(whole), list(network.tensors.values())
    layers = layers_of(calls, whole, list(network.tensors))
    stays = [layer < 0 or decls[layer].part is None for layer in layers]
    assert all(kept for call, kept in zip(calls.calls, stays, strict=True) if call.pools)
    estimated = sum(call.object_bytes for call, kept in zip(calls.calls, stays, strict=True) if kept)
    assert estimated == pytest.approx(sum(call.object_bytes for call in onnx_program(shallow).calls), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "depth"), [(4, 2), (12, 2), (16, 1)])
def test_blocks_of_a_cut_convolution_are_those_of_a_small_one(channels: int, depth: int) -> None:
    """With few inputs, taps are laid side by side; without the convolution, none of Winograd's transforms stay."""
    config = Vgg(input_shape=(3, 16, 16), class_count=4, depths=(2,), widths=(16,))
    network, small = network_of(config), replace(config, depths=(depth,), widths=(channels,))
    estimates = EstimateModel(network, request_for(config, "executorch", Architecture())).estimates
    full = network.full_architecture()
    cut = replace(full, axes=(("section0.stream", Prefix(size=channels)),), blocks=full.blocks[: depth - 1])
    peaks = estimates.measure_peaks(estimates.columns.of(network, [cut]))[0]
    step = training_step_of(request_for(small, "executorch", network_of(small).full_architecture()))
    program = executorch_program(step)
    factors = (1, HOLES * (1 + GAPS["executorch"]))
    for peak, factor, events in zip(peaks, factors, block_events(program, [0] * len(program.calls)), strict=True):
        used = accumulate(up * size for _, (size, *_), up in events)
        assert peak == pytest.approx(factor * max(used), rel=0.01)


@pytest.mark.slow
def test_only_xnnpack_s_workspace_grows_by_a_line() -> None:
    network, estimates = network_of(SMALL["vgg"]), estimates_of("vgg", "executorch")
    full = [network.full_architecture()]
    (peaks,) = estimates.measure_peaks(estimates.columns.of(network, full))
    once, twice = (replace(estimates, lines=np.array([[factor, 0.0]])).memory_bytes(network, full) for factor in (1, 2))
    assert min(peaks) > 10_000
    assert twice[0] - once[0] == pytest.approx(peaks[0], abs=1)


@pytest.mark.slow
def test_onnx_runtime_keeps_constant_matrices_in_stripes_of_columns() -> None:
    config = SMALL["mobilenet_v3"]
    program = onnx_program(training_step_of(request_for(config, "onnx", network_of(config).full_architecture())))
    matrices = [(size, columns) for call in program.calls for size, columns in call.constants if columns]
    assert {9, 25} <= {columns for _, columns in matrices}
    for size, columns in matrices:
        stripe_count = -(-columns // STRIPE_COLUMNS)
        assert size % (4 * STRIPE_COLUMNS * stripe_count) == 0, (size, columns)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ds_cnn", "mlp"])
def test_objects_of_onnx_runtime_are_near_the_count(family: str) -> None:
    config = SMALL[family]
    step = training_step_of(request_for(config, "onnx", network_of(config).full_architecture()))
    body = training_model(trace(step, OnnxTarget.lowerings), step)
    calls = onnx_program(step).calls
    estimated = sum(call.object_bytes + sum(size for size, _ in call.constants) for call in calls)
    assert estimated == pytest.approx(run_onnx(body, step.inputs).session_bytes + len(body), rel=0.05)


@pytest.mark.slow
def test_only_the_caller_s_values_share_their_memory_in_a_region_of_xnnpack() -> None:
    """XNNPACK copies what it gives another shape, unless nothing else reads it."""
    config = SMALL["decoder"]
    step = training_step_of(request_for(config, "executorch", network_of(config).full_architecture()))
    program = executorch_program(step)
    given = {program.names[value.name] for value in step.inputs}
    delegated = [call for call in program.calls if call.object_bytes]
    assert len(delegated) > 500
    assert all(call.inputs[0] in given for call in delegated if call.shares)


@pytest.mark.parametrize("family", sorted(QUICK))
def test_more_of_anything_costs_more(family: str) -> None:
    network = network_of(SMALL[family])
    estimates = estimates_of(family, "onnx")
    full = network.full_architecture()
    smaller = [
        replace(full, axes=((name, Prefix(size=axis.granularity)),))
        for name, axis in network.axes.items()
        if axis.kind not in {"class", "kernel"} and axis.size > axis.granularity
    ]
    shallower = [
        replace(full, blocks=tuple(name for name in full.blocks if name != left_out)) for left_out in full.blocks
    ]
    whole, *reduced = estimates.memory_bytes(network, [full, *smaller, *shallower])
    assert reduced
    assert all(0 < estimate < whole for estimate in reduced)


def test_estimates_of_many_submodels_equal_single_ones() -> None:
    network = network_of(SMALL["mlp"])
    estimates = estimates_of("mlp", "onnx")
    architectures = [random_architecture(network, seed) for seed in range(50)]
    sizes = estimates.memory_bytes(network, architectures)
    assert sizes == [
        estimate for architecture in architectures for estimate in estimates.memory_bytes(network, [architecture])
    ]
    again = EstimateModel(network, request_for(SMALL["mlp"], "onnx", network.full_architecture())).estimates
    assert again.memory_bytes(network, architectures) == sizes


@pytest.mark.parametrize("target", ["onnx", "executorch", "torch"])
def test_estimates_are_the_same_after_they_were_written_and_read(target: str) -> None:
    network, estimates = network_of(SMALL["mlp"]), estimates_of("mlp", target)
    architectures = [random_architecture(network, seed) for seed in range(20)]
    read = MemoryEstimates.unpack(estimates.pack())
    assert read.pack() == estimates.pack()
    assert read.memory_bytes(network, architectures) == estimates.memory_bytes(network, architectures)


def test_bytes_that_are_no_estimates_are_refused() -> None:
    arrays = decode_arrays(estimates_of("mlp", "onnx").pack())
    for name in arrays:
        with pytest.raises(ProtocolError):
            MemoryEstimates.unpack(encode_arrays({key: value for key, value in arrays.items() if key != name}))
    for name in ("powers", "held", "peaks", "blocks", "least", "parts", "lines"):
        with pytest.raises(ProtocolError):
            MemoryEstimates.unpack(encode_arrays({**arrays, name: arrays[name][..., :-1]}))
    with pytest.raises(ProtocolError):
        MemoryEstimates.unpack(b"estimates")


def test_the_id_of_estimates_does_not_depend_on_the_submodel() -> None:
    request = request_for(SMALL["mlp"], "onnx", Architecture())
    estimates = EstimateRequest(training=request)
    assert estimates.program_id != request.program_id
    assert estimates == EstimateRequest(training=request)
    full = replace(request, architecture=network_of(SMALL["mlp"]).full_architecture())
    assert EstimateRequest(training=full).file_name == estimates.file_name
    assert EstimateRequest(training=replace(request, batch_size=3)).file_name != estimates.file_name


def test_unknown_targets_are_refused() -> None:
    request = replace(request_for(SMALL["mlp"], "onnx", Architecture()), target="onyx")
    with pytest.raises(ExportError, match="target is 'onyx', but must be one of"):
        EstimateModel(network_of(SMALL["mlp"]), request)


@pytest.mark.parametrize("name", NAMES)
def test_a_coded_size_tells_its_axes(name: str) -> None:
    network = network_of(find_network(name))
    coding = code_axes(network, 8)
    sizes = SizeTable(network)
    columns = []
    for index, (decl, shape) in enumerate(
        zip(network.tensors.values(), coding.local_shapes.tensors.values(), strict=True)
    ):
        number, powers = coding.decode(torch.Size(shape).numel(), index)
        kernel = {
            axis: 2 if decl.axes[-2:] == (axis, axis) else 1
            for axis in network.list_axes(decl)
            if network.axes[axis].kind == "kernel"
        }
        for axis, power in kernel.items():
            number /= network.axes[axis].size ** power
        columns.append(sizes.column(number, powers | kernel, decl.part))
    for seed in range(5):
        architecture = random_architecture(network, seed)
        element_counts = sizes.of([architecture])[0, columns].round(6)
        shapes = network.shapes(architecture)
        assert element_counts.tolist() == [torch.Size(shapes.get(name, (0,))).numel() for name in network.tensors]


@pytest.mark.parametrize("name", NAMES)
def test_fast_costs_are_the_exact_ones(name: str) -> None:
    network = network_of(find_network(name))
    architectures = [network.full_architecture(), *(random_architecture(network, seed) for seed in range(20))]
    exact = [estimate_cost(network, architecture, batch_size=1) for architecture in architectures]
    assert Costs(network).of(architectures) == [(cost.parameters, cost.forward_macs) for cost in exact]


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_long([*sorted(SMALL), "residual"], "bert_classifier", "ds_cnn", "lstm"))
def test_a_step_is_recorded_as_pytorch_traces_it(family: str) -> None:
    config = find_network(family)
    step = training_step_of(request_for(config, "onnx", network_of(config).full_architecture()))
    example = step.example(torch.Generator().manual_seed(0))
    functional = dispatch_functionalize(step.run, FunctionalTensorMode())
    graphs = [
        make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*example),
        record(step.run, example),
    ]
    for graph in graphs:
        clean(graph)
        fold_constants(graph)
    listings = []
    for graph in graphs:
        positions = {node: position for position, node in enumerate(graph.graph.nodes)}
        nodes = [(node, fx.node.map_arg((node.args, node.kwargs), positions.__getitem__)) for node in positions]
        listings.append([(node.op, str(node.target), str(arguments), value_of(node)) for node, arguments in nodes])
    assert len(listings[0]) > 50
    assert listings[0] == listings[1]


def test_tensors_created_from_numbers_are_refused() -> None:
    def lists(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0], device=x.device)

    with pytest.raises(ValueError, match="tensor with fixed values"):
        record(lists, [torch.zeros(2)])
