"""What markers of modules declare: tied and named axes, kinds, kernels, blocks, roles and first weights."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL
from elastic.token_cases import CLASSIFIER, DECODER, LSTM, VIT
from torch import Tensor, nn

from subfleet.elastic.axes import Dim, Product
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.network import Family, Network
from subfleet.elastic.parts import Cell
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.recording.markers import Markers
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Centre, Prefix

FIRST = "section0.block0"
ROWS = Product(factors=(f"{FIRST}.heads", f"{FIRST}.head_dim"))
FUSED_ROWS = Product(factors=(3, *ROWS.factors))
GATES = Product(factors=(4, "section0.state"))


@pytest.mark.parametrize(
    ("config", "tensor", "axes", "role", "positions"),
    [
        (VIT, "tokens.class_token", (None, None, "stream"), "embedding", 1),
        (VIT, "tokens.positions", (None, None, "stream"), "embedding", 1),
        (VIT, "tokens.patches.weight", ("stream", None, None, None), "weight", 6),
        (VIT, f"{FIRST}.attention.qkv.weight", (FUSED_ROWS, "stream"), "weight", 7),
        (VIT, f"{FIRST}.attention.qkv.bias", (FUSED_ROWS,), "bias", 7),
        (VIT, f"{FIRST}.attention.out.weight", ("stream", ROWS), "residual", 7),
        (VIT, "norm.weight", ("stream",), "gain", 7),
        (VIT, "head.weight", ("class", "stream"), "weight", 1),
        (DECODER, "tokens.embedding.weight", (None, "stream"), "embedding", 1),
        (DECODER, f"{FIRST}.attention.key.weight", (ROWS, "stream"), "weight", 5),
        (DECODER, f"{FIRST}.feed_forward.up.bias", (f"{FIRST}.hidden",), "bias", 5),
        (DECODER, f"{FIRST}.feed_forward.down.weight", ("stream", f"{FIRST}.hidden"), "residual", 5),
        (DECODER, "head.bias", ("class",), "bias", 5),
        (CLASSIFIER, "head.weight", ("class", "stream"), "weight", 1),
        (LSTM, "embedding.weight", (None, "embedding"), "symbol", 1),
        (LSTM, f"{FIRST}.lstm.weight_ih_l0", (GATES, "embedding"), "weight", 5),
        (LSTM, "section0.block1.lstm.weight_ih_l0", (GATES, "section0.state"), "weight", 5),
        (LSTM, f"{FIRST}.lstm.weight_hh_l0", (GATES, "section0.state"), "weight", 5),
        (LSTM, f"{FIRST}.lstm.bias_hh_l0", (GATES,), "bias", 5),
    ],
)
def test_token_layers_have_their_ties_roles_and_positions(
    config: Family, tensor: str, axes: tuple[Dim, ...], role: str, positions: int
) -> None:
    decl = network_of(config).tensors[tensor]
    assert (decl.axes, decl.role, decl.positions) == (axes, role, positions)


def test_a_step_belongs_to_a_block_that_can_be_left_out() -> None:
    steps = [
        (decl.name, decl.part, decl.role)
        for decl in network_of(replace(DECODER, learnable_steps=True)).tensors.values()
        if decl.name.endswith(".step")
    ]
    assert steps == [("section1.block1.step", "section1.block1", "step")]


class Layer(nn.Module):
    """A layer of a chain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.conv(x))


class Gate(nn.Module):
    """A factor of each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((width, 1, 1), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Chain(nn.Module):
    """A chain of layers of one width with markers."""

    def __init__(self, markers: Markers | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.layers = nn.Sequential(Layer(8), Layer(8))
        self.gate = Gate(8)
        self.head = nn.Linear(8, 3)
        if markers is not None:
            self.markers = markers

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(self.layers(nn.functional.relu(self.stem(x))))
        logits: Tensor = self.head(y.mean(dim=(2, 3)))
        return logits


BLOCKS = ("layers.0", "layers.1")
STREAM = {
    ("layers.1.conv.weight", 0): ("stream",),
    ("layers.0.conv.weight", 0): ("stream",),
    ("stem.weight", 0): ("stream",),
}


def record(module: nn.Module) -> Network:
    return network_of(record_network(module, (2, 5, 4)))


def record_chain(**markers: Any) -> Network:
    return record(Chain(Markers(**markers)))


def test_a_module_without_markers_has_the_axes_and_blocks_that_its_runs_show() -> None:
    network = record(Chain())
    assert list(network.axes) == ["stem", "layers.0.conv", "layers.1.conv", "class"]
    assert network.tensors["gate.factor"].axes == ("layers.1.conv", None, None)
    assert (network.blocks, network.cells) == ((), ())


def test_dimensions_with_one_name_are_one_axis() -> None:
    network = record_chain(axes=STREAM)
    assert list(network.axes) == ["stream", "class"]
    assert network.tensors["layers.0.conv.weight"].axes == ("stream", "stream", None, None)
    assert network.tensors["gate.factor"].axes == ("stream", None, None)
    narrow = Architecture(axes=(("stream", Prefix(size=3)),), network=network.id)
    module = build_module(network, narrow)
    assert module.get_parameter("layers.1.conv.weight").shape == (3, 3, 3, 3)
    assert module(torch.zeros(2, 2, 5, 4)).shape == (2, 3)


def test_an_axis_can_be_named_by_a_layers_outputs() -> None:
    network = record_chain(axes={("layers", 1): ("last",), ("layers.0", 1): ("middle",), ("stem", 1): ("middle",)})
    assert list(network.axes) == ["last", "middle", "class"]
    assert network.tensors["layers.0.conv.weight"].axes == ("middle", "middle", None, None)
    assert network.tensors["gate.factor"].axes == ("last", None, None)


def test_an_axis_has_the_first_of_several_names() -> None:
    network = record_chain(axes={("gate", 1): ("last",), ("layers.1.conv.weight", 0): ("other",)})
    assert list(network.axes) == ["last", "stem", "layers.0.conv", "class"]


def test_a_layers_markers_say_the_same_about_it_in_the_names_of_the_whole() -> None:
    part = Markers(
        axes={("conv.weight", 0): ("outer", "inner")}, kinds={"outer": "head"}, roles={"conv.weight": "residual"}
    )
    assert part.within("layers.0") == Markers(
        axes={("layers.0.conv.weight", 0): ("layers.0.outer", "layers.0.inner")},
        kinds={"layers.0.outer": "head"},
        roles={"layers.0.conv.weight": "residual"},
    )


def test_marked_axes_are_listed_first_in_the_order_of_the_markers() -> None:
    network = record_chain(axes={("head.weight", 0): ("results",), ("layers.1.conv.weight", 0): ("last",)})
    assert list(network.axes) == ["results", "last", "stem", "layers.0.conv"]
    assert (network.axes["results"].kind, network.axes["results"].granularity) == ("class", 3)


def test_an_axis_has_the_kind_of_its_marker() -> None:
    network = record_chain(axes=STREAM, kinds={"stream": "embed"})
    assert {name: axis.kind for name, axis in network.axes.items()} == {"stream": "embed", "class": "class"}


def test_a_kernel_is_cut_to_its_middle() -> None:
    weight = "layers.1.conv.weight"
    network = record_chain(axes={(weight, 2): ("side",)}, kernels=frozenset({weight}))
    assert network.axes["side"].kind == "kernel"
    assert network.tensors[weight].axes == ("layers.1.conv", "layers.0.conv", "side", "side")
    assert network.tensors["layers.0.conv.weight"].axes[2:] == (None, None)
    small = build_module(network, Architecture(axes=(("side", Centre(size=1)),), network=network.id)).eval()
    whole = build_module(network, network.full_architecture()).eval()
    kernel = torch.zeros(8, 8, 3, 3)
    kernel[:, :, 1:2, 1:2] = small.get_parameter(weight).detach()
    whole.load_state_dict({**small.state_dict(), weight: kernel})
    inputs = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(small(inputs), whole(inputs), rtol=1e-5, atol=1e-5)


def test_a_layer_with_one_input_can_be_a_block() -> None:
    network = record_chain(sections=(BLOCKS[:1], BLOCKS[1:]))
    assert [(block.name, block.section) for block in network.blocks] == [("layers.0", 0), ("layers.1", 1)]
    assert [(block.reads, block.gives) for block in network.blocks] == [
        ("stem", "layers.0.conv"),
        ("layers.0.conv", "layers.1.conv"),
    ]
    assert network.tensors["layers.1.conv.bias"].part == "layers.1"
    without = build_module(network, Architecture(blocks=("layers.0",), network=network.id))
    assert "layers.1.conv.weight" not in without.state_dict()
    assert without(torch.zeros(2, 2, 5, 4)).shape == (2, 3)


def test_a_kept_block_is_a_cell_that_no_submodel_leaves_out() -> None:
    network = record_chain(axes=STREAM, sections=(BLOCKS,), kept=frozenset(BLOCKS[:1]))
    assert [block.name for block in network.blocks] == ["layers.1"]
    assert network.cells == tuple(Cell(name=name, section=0, axes=("stream",)) for name in BLOCKS)
    assert network.tensors["layers.0.conv.weight"].part is None


@pytest.mark.parametrize(("side", "padding"), [(3, 0), (4, 2)])
def test_a_kernel_that_has_no_centre_or_other_padding_cannot_be_cut(side: int, padding: int) -> None:
    module = Chain(Markers(axes={("stem.weight", 2): ("side",)}, kernels=frozenset({"stem.weight"})))
    module.stem = nn.Conv2d(2, 8, side, padding=padding)
    with pytest.raises(ConfigError, match=f"kernel of layer 'stem' may be cut, but its side is {side}"):
        record(module)


def test_a_role_gives_a_tensor_its_first_values() -> None:
    roles = {"layers.1.conv.weight": "residual", "gate.factor": "step"}
    network = record_chain(sections=(BLOCKS,), roles=roles, drawn=True)
    assert {name: decl.role for name, decl in network.tensors.items() if name in roles} == roles
    first = init_state(network, 0)
    assert not first["layers.1.conv.weight"].any()
    assert torch.equal(first["gate.factor"], torch.ones(8, 1, 1))
    deviation = math.sqrt(2 / 72)
    assert first["layers.0.conv.weight"].std().item() == pytest.approx(deviation, rel=0.15)


def test_first_weights_that_are_not_drawn_by_roles_are_distributed_as_the_modules_own() -> None:
    first = init_state(record_chain(axes=STREAM), 0)
    assert torch.equal(first["gate.factor"], torch.full((8, 1, 1), 2.0))
    deviation = math.sqrt(1 / 72 / 3)  # uniform up to the square root of 1 / fan-in
    assert first["layers.0.conv.weight"].std().item() == pytest.approx(deviation, rel=0.15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chained:
    """A family without markers."""

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "chained"
    norm: ClassVar[Literal["none"]] = "none"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: tuple[int, ...] = (2, 5, 4)
    class_count: int = 3
    note: str = ""

    def module(self) -> nn.Module:
        return Chain()


def test_a_declaration_does_not_depend_on_earlier_draws() -> None:
    before = torch.random.get_rng_state()
    first = network_of(Chained(note="first"))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    second = network_of(Chained(note="second"))
    assert first.tensors == second.tensors


class Twice(nn.Module):
    """A layer that runs twice, and one with two inputs."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 8, 1), nn.Linear(8, 3)
        self.layer, self.pair = Layer(8), nn.Bilinear(8, 8, 8)
        self.markers = Markers(sections=((block,),))

    def forward(self, x: Tensor) -> Tensor:
        means = self.layer(self.layer(self.stem(x))).mean(dim=(2, 3))
        y: Tensor = self.head(self.pair(means, means))
        return y


@pytest.mark.parametrize(
    ("markers", "reason"),
    [
        ({"axes": {("stems.weight", 0): ("stream",)}}, "dimension 0 of 'stems.weight', which is no tensor"),
        ({"axes": {("stem.weight", 4): ("stream",)}}, "dimension 4 of 'stem.weight', which is no tensor"),
        (
            {"axes": {("stem.weight", 0): ("heads", "head_dim")}},
            r"'stem.weight' runs over \['heads', 'head_dim'\], but it runs over 1 axes",
        ),
        ({"sections": (("layers.2",),)}, "layer 'layers.2' is a block, but it is none"),
    ],
)
def test_markers_that_do_not_fit_are_refused(markers: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        record_chain(**markers)


@pytest.mark.parametrize("block", ["layer", "pair"])
def test_a_layer_that_runs_twice_or_has_two_inputs_is_no_block(block: str) -> None:
    with pytest.raises(ConfigError, match=f"layer '{block}' is a block, but it is none"):
        record(Twice(block))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_network_may_have_a_single_block(norm: Literal["none", "batch"]) -> None:
    config = replace(CONVOLUTIONAL["vgg"], widths=(4,), depths=(1,), kernels=(3,), norm=norm)
    network = network_of(config)
    module = build_module(network, network.full_architecture())
    assert module(torch.zeros(2, *config.input_shape)).shape == (2, config.class_count)
    assert list(init_state(network, 0)) == list(module.state_dict())


def test_a_module_with_markers_can_be_copied() -> None:
    module = Chain(Markers(axes={("stem.weight", 0): ("stream",)}, sections=(BLOCKS,)))
    copied = copy.deepcopy(module)
    assert copied.markers == module.markers
    assert copied.stem.weight is not module.stem.weight
