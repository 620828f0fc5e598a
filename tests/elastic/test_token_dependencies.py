"""Torch-Pruning's dependency graph against the declared axes of transformers and LSTMs; see `test_dependency_oracle`.

The graph does not know heads: it ties all rows of queries, keys and values to all columns of the layers that read
them, as we do by the product of heads and head width. It treats one layer for all three like a plain layer, so the
attention of the vision transformer is left out here; `test_token_families` checks it by gradients.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch_pruning  # type: ignore[import-untyped]  # it has no annotations
from elastic.plain_modules import build_plain
from elastic.test_dependency_oracle import LayerDimension, Ties, merge_groups
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT, inputs_of
from torch import nn

from subfleet.elastic.axes import Dim, Product, factors_of
from subfleet.elastic.building import network_of
from subfleet.elastic.network import Family, Network
from subfleet.protocol.submodel import Architecture

pytestmark = pytest.mark.slow

_FUSED = "attention.qkv"


def declared_ties(network: Network) -> Ties:
    """The dimensions that the declaration ties. The gates of an LSTM belong to its states, which are its outputs."""
    tied: dict[frozenset[str], set[LayerDimension]] = {}
    for name, decl in network.tensors.items():
        for dimension, dim in enumerate(decl.axes):
            axes = frozenset(factor for factor in factors_of(dim, 1) if isinstance(factor, str)) - {"class"}
            inside = (_FUSED in name and not dimension) or ("attention.out" in name and dimension)
            if axes and not (inside and network.config.TYPE == "vit"):
                tied.setdefault(axes, set()).add((owner_of(name), int(is_input(name, dimension))))
    return frozenset(map(frozenset, tied.values()))


def owner_of(name: str) -> str:
    """The layer of a tensor, or the tensor itself if it belongs to no layer."""
    return name if name in ("tokens.positions", "tokens.class_token") else name.rpartition(".")[0]


def is_input(name: str, dimension: int) -> bool:
    """Whether a dimension is an input of its layer; embeddings read indices, and states are outputs."""
    output_last = ("tokens.positions", "tokens.class_token", "embedding.weight", "weight_hh_l0")
    return dimension == 1 and not name.endswith(output_last)


def oracle_ties(network: Network) -> Ties:
    """The dimensions that the dependency graph ties, in the full network or with one block left out."""
    full = network.full_architecture()
    remaining = [tuple(name for name in full.blocks if name != block) for block in full.blocks]
    return merge_groups(
        group for blocks in (full.blocks, *remaining) for group in iter_groups(network, Architecture(blocks=blocks))
    )


def iter_groups(network: Network, architecture: Architecture) -> Iterable[frozenset[LayerDimension]]:
    module = build_plain(network, architecture)
    parameters = dict(module.named_parameters())
    unwrapped = [(parameters[name], 2) for name in ("tokens.positions", "tokens.class_token") if name in parameters]
    names = {layer: name for name, layer in module.named_modules()}
    inputs = inputs_of(network.config, 2)
    graph = torch_pruning.DependencyGraph().build_dependency(
        module, inputs if network.symbols else inputs.float(), unwrapped_parameters=unwrapped
    )
    owners = names | {parameter: name for name, parameter in parameters.items()}
    for layer, name in names.items():
        # The classes are not cut: there is nothing that they could be tied to.
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding | nn.LSTM) and name != "head" and _FUSED not in name:
            prune = graph.get_pruner_of_module(layer).prune_out_channels
            dimensions = [find_dimension(item.dep, owners) for item in graph.get_pruning_group(layer, prune, idxs=[0])]
            yield frozenset(dimension for dimension in dimensions if dimension is not None)


def find_dimension(dependency: Any, owners: Mapping[Any, str]) -> LayerDimension | None:
    owner = dependency.target.module
    if owner not in owners:
        return None
    inputs = dependency.handler.__name__.endswith("in_channels")
    return owners[owner], int(inputs and isinstance(owner, nn.Conv2d | nn.Linear | nn.LSTM))


@pytest.mark.parametrize("config", [VIT, DECODER, BERT, CLASSIFIER, LSTM], ids=lambda config: config.TYPE)
def test_axes_are_what_autograds_graph_ties(config: Family) -> None:
    network = network_of(config)
    assert oracle_ties(network) == declared_ties(network)


@pytest.mark.parametrize(
    ("config", "tensor", "dims"),
    [
        (DECODER, "tokens.positions", (None, None, "apart")),
        (DECODER, "section1.block1.norm2.weight", ("apart",)),
        (DECODER, "section1.block1.attention.key.weight", ("apart", "stream")),
        (BERT, "section0.block0.feed_forward.down.weight", ("stream", "section0.block1.hidden")),
        (LSTM, "section1.block0.lstm.weight_ih_l0", (Product(factors=(4, "section1.state")), "embedding")),
    ],
)
def test_a_wrong_declaration_is_seen(config: Family, tensor: str, dims: tuple[Dim, ...]) -> None:
    network = network_of(config)
    wrong = replace(network.tensors[tensor], axes=dims)
    changed = replace(network, tensors=MappingProxyType({**network.tensors, tensor: wrong}))
    assert declared_ties(changed) != declared_ties(network) == oracle_ties(network)
