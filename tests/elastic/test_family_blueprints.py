"""Declarations derived from modules: tied axes, names, roles and numbers of positions."""

from collections import OrderedDict
from dataclasses import replace
from typing import Literal

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL
from elastic.token_cases import CLASSIFIER, DECODER, LSTM, VIT
from torch import nn

from subfleet.elastic.axes import Axis, Dim, Product
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.blueprint import Blueprint, Sizes, TiedSize, declare, fraction_of, module_of
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.families.transformer_layers import Attention
from subfleet.elastic.network import Block, Family
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Prefix


def tied(size: int, name: str, full: int) -> TiedSize:
    return TiedSize(size, name, full)


def test_a_product_of_sizes_is_tied_to_the_product_of_their_axes() -> None:
    heads, head_dim = tied(2, "heads", 3), tied(4, "head_dim", 5)
    rows = 3 * (heads * head_dim)
    assert (rows, rows.dim, rows.full) == (24, Product(factors=(3, "heads", "head_dim")), 45)
    flat = heads * 49
    assert (flat, flat.dim, flat.full) == (98, Product(factors=("heads", 49)), 147)
    assert fraction_of(rows) == 24 / 45
    assert fraction_of(24) == 1


def test_all_other_arithmetic_gives_plain_numbers() -> None:
    size = tied(6, "stream", 8)
    assert {type(size // 2), type(size + 1), type(4 - size), type(-size)} == {int}
    assert (size * 0.5, 0.5 * size) == (3.0, 3.0)
    assert [0] * size == [0] * 6


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
def test_token_layers_declare_their_ties(
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


class Gate(nn.Module):
    """A custom layer with a tensor of two dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own_sizes = {"table": (3, width)}
        self.table = nn.Parameter(torch.zeros(self.own_sizes["table"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.sum(0)


def test_a_custom_layer_declares_its_sizes() -> None:
    def build(sizes: Sizes) -> nn.Module:
        width = sizes["width"]
        return nn.Sequential(OrderedDict(up=nn.Linear(2, width), gate=Gate(width), head=nn.Linear(width, 2)))

    blueprint = Blueprint(axes=(Axis(name="width", size=4, kind="channel"),), blocks=(), build=build)
    config = Mlp(input_shape=(2,), class_count=2, widths=(4,), depths=(1,))
    network = declare(config, blueprint)
    assert network.tensors["gate.table"].axes == (None, "width")
    narrow = Architecture(axes=(("width", Prefix(size=2)),))
    local = network.local(narrow)
    shapes = {name: tuple(tensor.shape) for name, tensor in module_of(blueprint, local).state_dict().items()}
    assert shapes == local.tensors


@pytest.mark.parametrize("section", [0, 1, -1])
def test_blocks_are_in_the_sections_of_the_family(section: int) -> None:
    config = replace(CONVOLUTIONAL["vgg"], widths=(4,), depths=(1,), kernels=(3,))
    blocks = tuple(Block(name=f"section0.block{number}", section=section) for number in range(2))
    with pytest.raises(ConfigError, match=r"skippable blocks by section, but sections of \(1,\) blocks"):
        declare(config, replace(config.blueprint(), blocks=blocks))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_network_may_have_a_single_block(norm: Literal["none", "batch"]) -> None:
    config = replace(CONVOLUTIONAL["vgg"], widths=(4,), depths=(1,), kernels=(3,), norm=norm)
    network = network_of(config)
    module = build_module(network, network.full_architecture())
    assert module(torch.zeros(2, *config.input_shape)).shape == (2, config.class_count)
    assert list(init_state(network, 0)) == list(module.state_dict())


def test_attention_computes_with_plain_numbers() -> None:
    # Arguments of operators end up in programs; sizes that know their axis are for declarations only.
    network = network_of(DECODER)
    module = module_of(DECODER.blueprint(), network.local(network.full_architecture()))
    attention = [layer for layer in module.modules() if isinstance(layer, Attention)]
    assert [type(layer.heads) is int for layer in attention] == [True] * 3
