"""Declared axes against an independent oracle: Torch-Pruning's dependency graph (Fang et al. 2023).

It follows the autograd graph of a module and does not use our declarations. The dimensions that it ties, in the full
network or with one block left out, must be exactly the dimensions that share an axis.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pytest
import torch
import torch_pruning  # type: ignore[import-untyped]  # it has no annotations
from elastic.elastic_cases import CONFIGS, CONVOLUTIONAL, RESNET
from elastic.plain_modules import build_plain
from torch import nn

from subfleet.elastic.building import network_of
from subfleet.elastic.network import Family, Network
from subfleet.protocol.submodel import Architecture

pytestmark = pytest.mark.slow

LayerDimension = tuple[str, int]
"""A layer and a dimension of its weight: 0 for outputs, 1 for inputs."""

Ties = frozenset[frozenset[LayerDimension]]


def declared_ties(network: Network) -> Ties:
    """The dimensions that the declaration ties."""
    tied: dict[str, set[LayerDimension]] = {}
    for name, decl in network.tensors.items():
        layer, _, suffix = name.rpartition(".")
        if suffix == "weight":
            for dimension, dim in enumerate(decl.axes[:2]):
                if isinstance(dim, str) and network.axes[dim].kind not in ("kernel", "class"):
                    tied.setdefault(dim, set()).add((layer, dimension))
    return frozenset(map(frozenset, tied.values()))


def oracle_ties(network: Network) -> Ties:
    """The dimensions that the dependency graph ties, in the full network or with one block left out."""
    full = network.full_architecture()
    ties = list(iter_groups(network, full))
    for block in full.blocks:
        remaining = tuple(name for name in full.blocks if name != block)
        ties += iter_groups(network, Architecture(blocks=remaining))
    return merge_groups(ties)


def iter_groups(network: Network, architecture: Architecture) -> Iterable[frozenset[LayerDimension]]:
    module = build_plain(network, architecture)
    names = {layer: name for name, layer in module.named_modules()}
    steps = [(parameter, 0) for name, parameter in module.named_parameters() if name.endswith("step")]
    graph = torch_pruning.DependencyGraph().build_dependency(
        module, torch.zeros(2, *network.config.input_shape), unwrapped_parameters=steps
    )
    for layer, name in names.items():
        # The input is never cut, nor are the classes: there is nothing that they could be tied to.
        if isinstance(layer, nn.Conv2d | nn.Linear) and name != "head":
            prune = graph.get_pruner_of_module(layer).prune_out_channels
            dimensions = {find_dimension(item.dep, names) for item in graph.get_pruning_group(layer, prune, idxs=[0])}
            yield frozenset(dimension for dimension in dimensions if dimension is not None)


def find_dimension(dependency: object, names: Mapping[nn.Module, str]) -> LayerDimension | None:
    layer = dependency.target.module  # type: ignore[attr-defined]  # of a package without annotations
    if layer not in names or not hasattr(layer, "weight"):
        return None
    inputs = dependency.handler.__name__.endswith("in_channels")  # type: ignore[attr-defined]  # as above
    return names[layer], int(inputs and isinstance(layer, nn.Conv2d | nn.Linear))


def merge_groups(groups: Iterable[frozenset[LayerDimension]]) -> Ties:
    """Merge the groups that share a dimension."""
    disjoint: list[frozenset[LayerDimension]] = []
    for group in groups:
        overlapping = [other for other in disjoint if other & group]
        disjoint = [other for other in disjoint if not other & group]
        disjoint.append(group.union(*overlapping))
    return frozenset(disjoint)


def with_axis(network: Network, name: str, dimension: int, axis: str) -> Network:
    """The network with one dimension of one tensor tied to another axis."""
    decl = network.tensors[name]
    axes = (*decl.axes[:dimension], axis, *decl.axes[dimension + 1 :])
    changed = {name: dataclasses.replace(decl, axes=axes)}
    added = dataclasses.replace(network.axes["section0.stream"], name=axis, size=decl.shape[dimension])
    return dataclasses.replace(
        network,
        axes=MappingProxyType({axis: added, **network.axes}),
        tensors=MappingProxyType({**network.tensors, **changed}),
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.TYPE} {config.norm}")
def test_axes_are_what_autograds_graph_ties(config: Family) -> None:
    network = network_of(config)
    assert oracle_ties(network) == declared_ties(network)


@pytest.mark.parametrize(
    ("config", "tensor", "dimension", "axis"),
    [
        (RESNET, "section1.block2.layer2.weight", 0, "apart"),
        (RESNET, "section1.block2.norm2.weight", 0, "apart"),
        (RESNET, "section0.block0.layer1.weight", 0, "section0.stream"),
        (CONVOLUTIONAL["mobilenet_v3"], "section1.block1.layers.depthwise.conv.weight", 0, "apart"),
        (CONVOLUTIONAL["mobilenet_v3"], "section2.block0.layers.squeeze.excite.weight", 0, "apart"),
        (CONVOLUTIONAL["vgg"], "section1.block1.conv.weight", 0, "apart"),
    ],
)
def test_a_wrong_declaration_is_seen(config: Family, tensor: str, dimension: int, axis: str) -> None:
    network = with_axis(network_of(config), tensor, dimension, axis)
    assert oracle_ties(network) != declared_ties(network)
