"""Widening, deepening and unions as one pair of maps: up keeps outputs, and down after up is the identity."""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from elastic.elastic_cases import CONFIGS, LAYERED, MLP, RESNET, relaxed
from elastic.token_cases import TOKEN_CONFIGS, VIT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.records.plain import Vgg
from subfleet.elastic.identities import can_be_identity
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import Replication, size_in
from subfleet.elastic.unions import unite_families
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.testing.submodels import tie_axes

EVERY = (*CONFIGS, *LAYERED.values(), *TOKEN_CONFIGS)
CHAINS = ("vgg", "ds_cnn")
"""Families in which a new block passes its input on, without a residual connection."""
_declared = cache(network_of)


def list_copyable_axes(network: Network) -> list[str]:
    summed = {axis for product in network.products for axis in product.summed}
    return [
        name
        for name, axis in network.axes.items()
        if axis.kind not in ("class", "kernel") and name not in summed and axis.size > axis.granularity
    ]


def list_identity_blocks(network: Network) -> list[str]:
    return [block.name for block in network.blocks if can_be_identity(network, block.name)]


@st.composite
def replications(draw: st.DrawFn) -> Replication:
    """Any axes of any network cut to any size, without any of the blocks that can be the identity."""
    network = _declared(draw(st.sampled_from(EVERY)))
    cut = {}
    for name in list_copyable_axes(network):
        axis = network.axes[name]
        groups = draw(st.integers(1, axis.size // axis.granularity))
        if network.config.norm == "layer" and axis.kind == "embed":  # a norm over the whole axis counts every copy
            groups = draw(st.sampled_from([divisor for divisor in range(1, axis.size + 1) if axis.size % divisor == 0]))
        if groups * axis.granularity < axis.size:
            cut[name] = Prefix(size=groups * axis.granularity)
    left_out = {name for name in list_identity_blocks(network) if draw(st.booleans())}
    blocks = tuple(block.name for block in network.blocks if block.name not in left_out)
    size = network.size_of(tie_axes(network, Architecture(axes=tuple(sorted(cut.items())), blocks=blocks)))
    return Replication.draw(network, size, draw(st.randoms(use_true_random=False)))


def draw_state(network: Network, size: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in network.shapes(size).items()}
    return {
        name: 1 + tensor.abs() if network.tensors[name].role == "variance" else tensor for name, tensor in state.items()
    }


def outputs(network: Network, size: Architecture, state: Mapping[str, Tensor], *, training: bool) -> Tensor:
    module = build_module(network, size)
    module.load_state_dict(dict(state))
    generator = torch.Generator().manual_seed(4)
    shape = (5, *network.config.input_shape)
    symbols = network.symbols
    inputs = torch.randint(symbols, shape, generator=generator) if symbols else torch.randn(shape, generator=generator)
    with torch.no_grad():
        result = module.double().train(training)(inputs if symbols else inputs.double())
    prediction: Tensor = result[-1] if isinstance(result, tuple) else result
    return prediction


@pytest.mark.slow
@relaxed
@given(replication=replications())
def test_up_keeps_outputs_in_evaluation_and_in_training(replication: Replication) -> None:
    network, size = replication.network, replication.size
    local = draw_state(network, size)
    grown = replication.grow(local, init_state(network, 5))
    assert {name: tuple(tensor.shape) for name, tensor in grown.items()} == network.shapes(network.full_architecture())
    for training in (False, True):
        if training and (network.config.scaler or (replication.lacking and network.config.TYPE in CHAINS)):
            continue  # in training, scalers depend on the width, and the norms of new blocks use the batch
        before = outputs(network, size, local, training=training)
        after = outputs(network, network.full_architecture(), grown, training=training)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * float(before.abs().max()))


@pytest.mark.slow
@relaxed
@given(replication=replications())
def test_down_after_up_is_the_identity_and_up_after_down_moves_once(replication: Replication) -> None:
    network = replication.network
    local = draw_state(network, replication.size)
    grown = replication.up(local)
    for name, tensor in replication.down(grown).items():
        torch.testing.assert_close(tensor, local[name], rtol=2e-7, atol=0)  # up to the last bit of a division
    whole = draw_state(network, network.full_architecture())
    once = replication.up(replication.down(whole))
    twice = replication.up(replication.down(once))
    for name in once:
        torch.testing.assert_close(twice[name], once[name], rtol=1e-6, atol=1e-7)
    assert once.keys() == network.shapes(replication.moved).keys()


def test_down_after_up_has_the_same_bits_where_every_index_has_as_many_copies_as_a_power_of_two() -> None:
    network = _declared(RESNET)
    names = ("section0.block1.inner", "section0.stream")
    halved = tuple((name, Prefix(size=network.axes[name].size // 2)) for name in names)
    size = Architecture(axes=halved, blocks=network.full_architecture().blocks)
    replication = Replication.draw(network, size, random.Random(2))
    assert {source.count(index) for source in replication.sources.values() for index in source} == {2}
    local = draw_state(network, size)
    restored = replication.down(replication.up(local))
    assert all(torch.equal(restored[name], local[name]) for name in local)


def test_up_and_down_are_linear_and_so_apply_to_changes() -> None:
    network = _declared(MLP)
    size = Architecture(axes=(("section0.stream", Prefix(size=4)),), blocks=network.full_architecture().blocks)
    replication = Replication.draw(network, size, random.Random(2))
    first, full_state = draw_state(network, size), init_state(network, 1)
    local = extract(network, size, full_state)
    added = replication.up({name: first[name] + local[name] for name in first})
    parts = [replication.up(state) for state in (first, local)]
    for name, tensor in added.items():
        torch.testing.assert_close(tensor, parts[0][name] + parts[1][name], rtol=1e-5, atol=1e-6)


def test_a_change_that_went_up_is_averaged_with_those_of_whole_networks() -> None:
    """The aggregation takes it as an update of the smaller submodel; blocks that this lacks do not change."""
    network = _declared(RESNET)
    axes = (("section0.block1.inner", Prefix(size=4)),)
    blocks = tuple(block.name for block in network.blocks)[:-1]
    replication = Replication.draw(network, Architecture(axes=axes, blocks=blocks), random.Random(2))
    state = init_state(network, 1)
    change = draw_state(network, replication.size)
    accumulator = Accumulator(network, state, total_weight=4.0)
    up = replication.up(change)
    accumulator.add(replication.moved, up, 1.0)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    accumulator.add(network.full_architecture(), zeros, 3.0)
    for name, tensor in accumulator.finish().items():
        expected = state[name] + up[name] / 4 if name in up else state[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [VIT, RESNET], ids=lambda config: config.TYPE)
def test_without_training_nothing_moves(config: Family) -> None:
    """A smaller network that does not change gives a change of zero, whatever the larger network was before."""
    network = _declared(config)
    name = list_copyable_axes(network)[0]
    axis = network.axes[name]
    size = Architecture(axes=((name, Prefix(size=axis.granularity)),), blocks=network.full_architecture().blocks)
    replication = Replication.draw(network, size, random.Random(2))
    received = replication.down(init_state(network, 1))
    up = replication.up({key: tensor - tensor for key, tensor in received.items()})
    assert not any(tensor.any() for tensor in up.values())


def test_an_axis_that_copies_would_change_is_refused() -> None:
    network, name = _declared(VIT), "section0.block0.head_dim"
    size = Architecture(axes=((name, Prefix(size=2)),), blocks=network.full_architecture().blocks)
    with pytest.raises(ConfigError, match=r"'section0\.block0\.head_dim' cannot be copied, because its indices"):
        Replication(network=network, size=size, sources={name: (0, 1, 0, 1)})


@pytest.mark.parametrize(
    "source", [(0, 1, 2, 3, 0, 1, 2, 2), (0, 1, 2, 3, 2, 3, 0, 4), (0, 1, 0, 1, 0, 1, 0, 1), (0, 1, 2, 3)]
)
def test_a_copy_that_leaves_one_out_or_splits_a_group_is_refused(source: tuple[int, ...]) -> None:
    network = _declared(MLP)
    size = Architecture(axes=(("section0.stream", Prefix(size=4)),), blocks=network.full_architecture().blocks)
    with pytest.raises(ConfigError, match=r"axis 'section0\.stream' of kind 'channel' has 8 indices"):
        Replication(network=network, size=size, sources={"section0.stream": source})


def test_a_block_that_cannot_be_the_identity_is_refused() -> None:
    network = network_of(Vgg(input_shape=(1, 4, 4), class_count=2, widths=(4,), depths=(2,), norm="group"))
    with pytest.raises(ConfigError, match="no layer that passes its input on, so it cannot be the identity"):
        Replication.draw(network, Architecture(), random.Random(1))


def test_a_union_is_the_smallest_network_that_holds_all() -> None:
    wide = replace(MLP, widths=(8, 10, 6), depths=(1, 1, 2))
    deep = replace(MLP, widths=(4, 6, 12), depths=(3, 1, 1))
    network = network_of(unite_families([wide, deep]))
    assert network.sections == network_of(replace(MLP, depths=(3, 1, 2))).sections
    assert [network.axes[f"section{section}.stream"].size for section in range(3)] == [8, 10, 12]
    for config in (wide, deep):
        smaller = network_of(config)
        size = size_in(network, smaller)
        assert network.shapes(size) == {name: decl.shape for name, decl in smaller.tensors.items()}
        local = draw_state(network, size)
        replication = Replication.draw(network, size, random.Random(1))
        grown = replication.grow(local, init_state(network, 2))
        before = outputs(smaller, smaller.full_architecture(), local, training=False)
        after = outputs(network, network.full_architecture(), grown, training=False)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert unite_families([wide]) == wide


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([replace(MLP, widths=(8, 12, 12), group_size=4)], "in one of them layer 'section0.block0.norm1' calls"),
        ([RESNET], "families mlp, preact_resnet have no union"),
        ([replace(MLP, widths=(8, 6), depths=(1, 1))], "in one of them layer 'norm' calls"),
    ],
)
def test_families_without_a_union_are_refused_in_one_sentence(others: list[Family], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        unite_families([MLP, *others])


def test_a_network_that_is_no_size_of_another_is_refused_in_one_sentence() -> None:
    small, large = replace(MLP, widths=(4, 6, 6)), MLP
    with pytest.raises(ConfigError, match=r"'section0\.stream' is missing or smaller there"):
        size_in(network_of(small), network_of(large))
    with pytest.raises(ConfigError, match="but as a submodel it would have"):
        size_in(network_of(large), network_of(replace(MLP, input_shape=(4,))))
