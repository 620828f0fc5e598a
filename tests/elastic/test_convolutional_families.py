"""Properties of the convolutional families beyond those of every network."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from elastic.elastic_cases import CONFIGS, CONVOLUTIONAL, MLP, RESNET, random_state
from elastic.grouped_network import record_grouped_network
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.elastic.recording.functions import divide_by_kept
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Centre, Explicit, Prefix

BOTTLENECK, V2, V3 = (CONVOLUTIONAL[name] for name in ("bottleneck", "mobilenet_v2", "mobilenet_v3"))


def inputs_of(config: Family) -> Tensor:
    return torch.randn(3, *config.input_shape, generator=torch.Generator().manual_seed(5))


class ScaledNorms(TorchFunctionMode):
    """Notes what scalers divide, before and after, and the inputs of norms with their gains."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled: list[tuple[Tensor, Tensor]] = []
        self.normed: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is divide_by_kept:
            self.scaled.append((args[0], out))
        if func in (nn.functional.batch_norm, nn.functional.group_norm):
            self.normed.append((args[0], kwargs["weight"]))
        return out


def load_module(network: Network, architecture: Architecture, state: dict[str, Tensor]) -> nn.Module:
    module = build_module(network, architecture)
    module.load_state_dict(extract(network, architecture, state))
    return module.eval()


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.TYPE} {config.norm}")
def test_a_network_without_a_block_computes_as_if_that_were_the_identity(config: Family) -> None:
    network = network_of(config)
    state = random_state(network, 1)
    blocks = network.full_architecture().blocks
    assert blocks
    for block in blocks:
        without = Architecture(blocks=tuple(name for name in blocks if name != block))
        module = config.module()
        module.load_state_dict(state)
        module.set_submodule(block, nn.Identity())
        assert torch.equal(load_module(network, without, state)(inputs_of(config)), module.eval()(inputs_of(config)))


@pytest.mark.parametrize("config", [BOTTLENECK, V2], ids=lambda config: config.TYPE)
def test_a_step_of_zero_makes_a_block_the_identity(config: Family) -> None:
    network = network_of(config)
    steps = [name for name, decl in network.tensors.items() if decl.role == "step"]
    assert steps == [f"{block.name}.step" for block in network.blocks]
    state = random_state(network, 1) | {steps[0]: torch.zeros(1)}
    without = Architecture(blocks=tuple(block.name for block in network.blocks)[1:])
    module = load_module(network, network.full_architecture(), state)
    assert torch.equal(module(inputs_of(config)), load_module(network, without, state)(inputs_of(config)))
    assert init_state(network, 0)[steps[0]].tolist() == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.TYPE} {config.norm}")
def test_residual_blocks_start_as_the_identity(config: Family) -> None:
    network = network_of(config)
    residual = [decl for decl in network.tensors.values() if decl.role == "residual"]
    assert len(residual) == (len(network.cells) if config.TYPE in ("mlp", "preact_resnet") else 0)
    last = "layer3" if config == BOTTLENECK else "layer2"
    assert all(decl.name.split(".")[2] == last for decl in residual)


def test_a_bottleneck_is_no_basic_block() -> None:
    shapes = network_of(BOTTLENECK).shapes(network_of(BOTTLENECK).full_architecture())
    sides = {
        name.split(".")[2]: shape
        for name, shape in shapes.items()
        if "section1.block1.layer" in name and len(shape) > 1
    }
    assert sides == {"layer1": (3, 12, 1, 1), "layer2": (3, 3, 3, 3), "layer3": (12, 3, 1, 1)}


@pytest.mark.slow
def test_a_smaller_kernel_is_the_middle_of_the_larger() -> None:
    network = network_of(V3)
    state = random_state(network, 1)
    name = "section1.block0.layers.depthwise.conv.weight"
    assert network.tensors[name].axes == (
        "section1.block0.inner",
        None,
        "section1.block0.kernel",
        "section1.block0.kernel",
    )
    architecture = Architecture(
        axes=(("section1.block0.kernel", Centre(size=3)),), blocks=network.full_architecture().blocks
    )
    small = load_module(network, architecture, state)
    assert torch.equal(small.state_dict()[name], state[name][:, :, 1:4, 1:4])
    rim = torch.nn.functional.pad(torch.ones(3, 3), (1, 1, 1, 1))
    padded = load_module(network, network.full_architecture(), state | {name: state[name] * rim})
    torch.testing.assert_close(small(inputs_of(V3)), padded(inputs_of(V3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [BOTTLENECK, V3, MLP], ids=lambda config: f"{config.TYPE} {config.norm}")
def test_a_scaler_divides_what_enters_a_norm_while_training(config: Family) -> None:
    scaled_config = dataclasses.replace(config, scaler=True)
    network = network_of(scaled_config)
    axis = network.axes["section0.stream"]
    architecture = Architecture(
        axes=((axis.name, Prefix(size=axis.granularity)),), blocks=network.full_architecture().blocks
    )
    module = build_module(network, architecture)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with ScaledNorms() as training:
        module.train()(inputs_of(config))
    assert len(training.scaled) == len(training.normed) > 0
    for (before, after), (given, weight) in zip(training.scaled, training.normed, strict=True):
        tied = network.tensors[names[id(weight)]].axes == (axis.name,)
        rate = axis.granularity / axis.size if tied else 1
        assert given is after
        assert torch.equal(after, before / rate), names[id(weight)]
    with ScaledNorms() as evaluation:
        module.eval()(inputs_of(config))
    assert len(evaluation.normed) == len(training.normed)
    assert not evaluation.scaled


def test_running_statistics_travel_with_the_weights_and_nothing_else_does() -> None:
    network = network_of(V3)
    module = build_module(network, network.full_architecture())
    state = module.state_dict()
    assert list(state) == list(network.tensors)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    before = {name: tensor.clone() for name, tensor in state.items()}
    module.train()(inputs_of(V3))
    moved = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, decl in network.tensors.items() if decl.role in ("mean", "variance")}


def test_evaluation_normalises_by_running_statistics() -> None:
    network = network_of(V3)
    state, architecture = random_state(network, 1), network.full_architecture()
    before = {name: tensor.clone() for name, tensor in state.items()}
    inputs = torch.randn(10, *V3.input_shape, generator=torch.Generator().manual_seed(6))
    labels = load_module(network, architecture, state)(inputs).argmax(dim=1)
    for batch_size in (1, 3, 10):
        assert evaluate(network, architecture, state, inputs, labels, batch_size=batch_size).accuracy == 1
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_a_module_can_be_copied() -> None:
    network = network_of(V3)
    module = build_module(network, network.full_architecture()).eval()
    assert torch.equal(copy.deepcopy(module)(inputs_of(V3)), module(inputs_of(V3)))


@pytest.mark.slow
def test_a_grouped_convolution_keeps_whole_groups() -> None:
    network = record_grouped_network()
    assert network.tensors["grouped.weight"].axes[1:] == (None, None, None)
    architecture = Architecture(
        axes=(
            ("expand", Prefix(size=3)),
            ("reduce", Explicit(indices=(2, 0))),
            ("start", Prefix(size=3)),
        ),
        network=network.id,
    )
    local = network.shapes(architecture)
    state = random_state(network, 1)
    small = load_module(network, architecture, state)
    assert {name: tuple(tensor.shape) for name, tensor in small.state_dict().items()} == local
    assert local["grouped.weight"] == (4, 2, 3, 3)
    assert torch.equal(small.state_dict()["grouped.bias"], state["grouped.bias"][[4, 5, 0, 1]])
    state["expand.weight"][:, 2:4] = 0
    state["head.weight"][:, 3:] = 0
    state["reduce.weight"][:, 3:] = 0
    full = load_module(network, network.full_architecture(), state)
    inputs = inputs_of(network.config)
    torch.testing.assert_close(small(inputs), full(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (RESNET, {"norm": "layer"}, "norm is 'layer'"),
        (RESNET, {"norm": "none", "scaler": True}, "scaler"),
        (RESNET, {"stem_width": 6}, "multiple of group_size 4"),
        (RESNET, {"kernels": (3, 4)}, "must be odd"),
        (RESNET, {"strides": (8, 8), "group_size": 1}, "or its norms larger groups"),
        (RESNET, {"block": "bottleneck"}, "multiple of group_size 4"),
        (V2, {"last_widths": (4, 4)}, "last_widths has 2 items, but must have at most 1"),
        (V3, {"input_shape": (4,)}, "channels, height, width"),
        (CONVOLUTIONAL["vgg"], {"input_shape": (1, 3, 3)}, "fails in layer 'section1.pool'"),
    ],
)
def test_impossible_settings_are_refused(config: Family, change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        network_of(dataclasses.replace(config, **change))


def test_a_section_of_the_same_width_keeps_the_stream_unless_it_halves_the_image() -> None:
    config = dataclasses.replace(V2, widths=(4, 4, 4), hidden_widths=(), stem_width=4)
    streams = [name for name in network_of(config).axes if name.endswith("stream")]
    assert streams == ["section0.stream", "section1.stream"]
