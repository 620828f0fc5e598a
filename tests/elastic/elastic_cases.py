"""Networks, submodels and states that the tests of elastic networks share."""

from collections.abc import Mapping
from functools import cache

import torch
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor

from subfleet.elastic.axes import Axis
from subfleet.elastic.building import network_of
from subfleet.elastic.families import get_predicted_places
from subfleet.elastic.families.records.inverted import EfficientNetV2, MobileNetV2, MobileNetV3
from subfleet.elastic.families.records.nas_bench import NasBench201
from subfleet.elastic.families.records.plain import DsCnn, Fcn, Vgg
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.network import Family, Network, Places
from subfleet.protocol.submodel import Architecture, Centre, Explicit, Full, IndexSet, Prefix, Roll
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings
from subfleet.testing.submodels import tie_axes

RESNET = PreactResNet(input_shape=(2, 6, 5), class_count=3, widths=(8, 12), depths=(2, 3), group_size=4)
UNGROUPED_RESNET = PreactResNet(input_shape=(1, 4, 4), class_count=2, widths=(3, 5), depths=(1, 2), group_size=1)
MLP = Mlp(input_shape=(5,), class_count=4, widths=(8, 6, 6), depths=(2, 1, 2), group_size=2)
relaxed = examples(15)
"""Few examples, for tests that build modules."""

CONVOLUTIONAL: dict[str, Family] = {
    "bottleneck": PreactResNet(
        input_shape=(2, 6, 5),
        class_count=3,
        widths=(8, 12),
        depths=(1, 2),
        norm="batch",
        block="bottleneck",
        kernels=(5, 3),
        stem_width=4,
        learnable_steps=True,
        scaler=True,
    ),
    "grown resnet": PreactResNet(
        input_shape=(1, 5, 4),
        class_count=3,
        widths=(4, 8),
        depths=(1, 3),
        norm="batch",
        hidden_widths=(4, 8, 5, 5),
        learnable_steps=True,
    ),
    "batch mlp": Mlp(input_shape=(5,), class_count=4, widths=(4, 6), depths=(2, 1), norm="batch", hidden_widths=(3, 5)),
    "vgg": Vgg(input_shape=(1, 9, 8), class_count=3, widths=(4, 6), depths=(1, 3), norm="batch", kernels=(3, 5)),
    "plain vgg": Vgg(input_shape=(1, 4, 4), class_count=2, widths=(4, 3), depths=(2, 1), norm="none"),
    "mobilenet_v2": MobileNetV2(
        input_shape=(1, 7, 6),
        class_count=3,
        widths=(4, 8, 8),
        depths=(1, 2, 1),
        group_size=2,
        hidden_widths=(6, 8, 10, 12),
        strides=(1, 2, 1),
        stem_width=6,
        last_widths=(8,),
        learnable_steps=True,
    ),
    "mobilenet_v3": MobileNetV3(
        input_shape=(2, 8, 7),
        class_count=3,
        widths=(4, 5, 6),
        depths=(1, 2, 2),
        norm="batch",
        hidden_widths=(4, 9, 7, 8, 6),
        squeezed_widths=(2, 0, 0, 3, 4),
        kernels=(3, 5, 3),
        strides=(1, 2, 2),
        stem_stride=2,
        last_widths=(7, 5),
    ),
    "efficientnet_v2": EfficientNetV2(
        input_shape=(2, 6, 6),
        class_count=3,
        widths=(4, 6, 5),
        depths=(2, 2, 2),
        norm="batch",
        hidden_widths=(4, 4, 8, 9, 7, 6),
        squeezed_widths=(0, 0, 3),
        kernels=(3, 5, 3),
    ),
    "nas_bench_201": NasBench201(
        input_shape=(2, 8, 4), class_count=3, widths=(4, 6), depths=(2, 3), norm="batch", hidden_widths=(3, 4, 5, 7, 6)
    ),
    "pooling cells": NasBench201(
        input_shape=(1, 4, 4),
        class_count=2,
        widths=(4, 8),
        depths=(2, 2),
        group_size=2,
        cell="|avg_pool_3x3~0|+|nor_conv_1x1~0|none~1|+|skip_connect~0|avg_pool_3x3~1|nor_conv_3x3~2|",
    ),
    "ds_cnn": DsCnn(input_shape=(1, 13, 6), class_count=3, widths=(4, 6), depths=(2, 2), norm="batch", stem_width=5),
}
"""Together they cover every convolutional family, kind of block, norm and option."""

DENSE: dict[str, Family] = {
    "fcn": Fcn(input_shape=(2, 5, 4), class_count=3, widths=(4, 6), depths=(2, 1), norm="batch", kernels=(3, 5)),
    "grouped fcn": Fcn(input_shape=(2, 5, 4), class_count=3, widths=(4, 6), depths=(2, 1), group_size=2),
    "plain fcn": Fcn(input_shape=(1, 4, 4), class_count=2, widths=(4, 3), depths=(2, 1), norm="none"),
}
"""Networks that predict for each pixel."""

LAYERED: dict[str, Family] = {
    "layered vgg": Vgg(
        input_shape=(2, 5, 6),
        class_count=3,
        widths=(4, 6),
        depths=(2, 3),
        norm="batch",
        kernels=(3, 5),
        layer_widths=(7, 4, 3, 8, 6),
    ),
    "layered ds_cnn": DsCnn(
        input_shape=(1, 12, 6),
        class_count=3,
        widths=(8, 12),
        depths=(3, 2),
        layer_widths=(4, 12, 8, 16, 12),
    ),
}
"""Chains with a width for each layer, in which a left-out layer ties the axes on its two sides."""

CONFIGS: tuple[Family, ...] = (RESNET, UNGROUPED_RESNET, MLP, *CONVOLUTIONAL.values())

_OBJECTIVES: Mapping[Places, Objective] = {
    "sample": "cross_entropy",
    "token": "next_token",
    "pixel": "dense_cross_entropy",
}
_declared = cache(network_of)


def objective_of(config: Family) -> ObjectiveSettings:
    """The usual training objective for the predictions of a network."""
    return ObjectiveSettings(name=_OBJECTIVES[get_predicted_places(config) or "sample"])


@st.composite
def networks_and_architectures(draw: st.DrawFn) -> tuple[Network, Architecture]:
    """Any of these networks, with any of its submodels."""
    network = _declared(draw(st.sampled_from((*CONFIGS, *LAYERED.values()))))
    return network, draw(architectures(network))


@st.composite
def architectures(draw: st.DrawFn, network: Network) -> Architecture:
    """Any submodel: prefixes, rolls, explicit sets and whole axes, with any of the blocks."""
    axes = {name: draw(_index_sets(axis)) for name, axis in network.axes.items() if axis.kind != "class"}
    selected = [draw(st.booleans()) for _ in network.blocks]
    blocks = tuple(block.name for block, is_selected in zip(network.blocks, selected, strict=True) if is_selected)
    return tie_axes(network, Architecture(axes=tuple(sorted(axes.items())), blocks=blocks))


@st.composite
def _index_sets(draw: st.DrawFn, axis: Axis) -> IndexSet:
    step = axis.granularity
    groups = axis.size // step
    if axis.kind == "kernel":
        return Centre(size=draw(st.integers(0, (axis.size - 1) // 2)) * 2 + 2 - axis.size % 2)
    kind = draw(st.sampled_from(["full", "prefix", "roll", "explicit"]))
    size = draw(st.integers(1, groups)) * step
    if kind == "prefix":
        return Prefix(size=size)
    if kind == "roll":
        return Roll(start=draw(st.integers(0, groups - 1)) * step, size=size)
    if kind == "explicit":
        order = draw(st.permutations(range(groups)))[: size // step]
        return Explicit(indices=tuple(group * step + offset for group in order for offset in range(step)))
    return Full()


def random_state(network: Network, seed: int) -> dict[str, Tensor]:
    """A full model whose gains, biases and statistics are random too, so that every wiring error shows."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(decl.shape, generator=generator) for name, decl in network.tensors.items()}
    variances = {name: tensor.abs() + 0.5 for name, tensor in state.items() if network.tensors[name].role == "variance"}
    return state | variances


def random_change(network: Network, architecture: Architecture, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """A change that a client could send for a submodel."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * scale for name, shape in network.shapes(architecture).items()
    }


def to_device(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}
