"""Inserting a block keeps the names, first weights and, as a submodel, the outputs of all others."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from elastic.elastic_cases import CONFIGS, CONVOLUTIONAL, DENSE, MLP, RESNET, architectures, random_state, relaxed
from elastic.token_cases import BERT, DECODER, TOKEN_CONFIGS, TRANSFORMERS, VIT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic.building import build_module, init_state, network_of, record_of
from subfleet.elastic.families import FAMILIES, AnyFamily
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.grafting import graft
from subfleet.elastic.growing import deepen_cell, widen_cells
from subfleet.elastic.identities import can_be_identity
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.elastic.parts import Cell
from subfleet.elastic.recording.growing import find_template
from subfleet.elastic.replication import Replication, size_in
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.elastic.unions import unite_families
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.submodel import Architecture

EVERY = (*CONFIGS, *TOKEN_CONFIGS, DENSE["grouped fcn"])
IDENTITIES = tuple(config for config in EVERY if config.TYPE in ("mlp", "preact_resnet")) + TRANSFORMERS
"""Networks with blocks that have weights initialised to 0."""
OPEN: Any = AnyFamily
_declared = cache(network_of)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A network before and after growth, and the names of the inserted blocks in turn."""

    before: Family
    after: Family
    names: tuple[str, ...]


def deepen(config: Family, name: str, count: int = 1) -> Family:
    """The settings of a network with cells inserted after the cell of this name."""
    (cell,) = (cell for cell in network_of(config).cells if cell.name == name)
    return deepen_cell(config, cell, count)


def shapes_of(config: Family) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a network."""
    return {name: decl.shape for name, decl in network_of(config).tensors.items()}


def list_deepenable(config: Family) -> list[Cell]:
    """The cells that others can follow, whether or not these can be the identity."""
    record = record_of(config)
    return [cell for cell in network_of(config).cells if find_template(record, cell.name)]


@st.composite
def growths(draw: st.DrawFn, configs: Sequence[Family] = EVERY) -> Growth:
    """Any network, with up to four blocks inserted anywhere."""
    before = after = draw(st.sampled_from(configs))
    names: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        cell = draw(st.sampled_from(list_deepenable(after)))
        numbers = [int(name.rpartition("block")[2]) for name in network_of(after).sections[cell.section]]
        names.append(f"section{cell.section}.block{max(numbers) + 1}")
        after = deepen_cell(after, cell)
    return Growth(before=before, after=after, names=tuple(names))


def test_every_family_of_ours_can_be_deepened() -> None:
    growing = {config.TYPE for config in EVERY if list_deepenable(config)}
    # Supernets do not grow, and a recorded network is any of these once it has grown.
    assert growing | {"choice_cnn", "choice_rnn", "recorded"} == set(FAMILIES)


@pytest.mark.slow
@relaxed
@given(growths())
def test_all_others_keep_their_names_and_no_number_is_given_twice(growth: Growth) -> None:
    before, after = _declared(growth.before), network_of(growth.after)
    known = {block.name for block in before.blocks}
    assert len({*growth.names, *known}) == len(growth.names) + len(known)
    assert [block for block in after.blocks if block.name in known] == [*before.blocks]
    assert {block.name for block in after.blocks} == known.union(growth.names)
    # Shapes, axes, roles, blocks and positions of all old tensors, in their order.
    old = [decl for decl in after.tensors.values() if decl.name in before.tensors]
    assert old == [*before.tensors.values()]
    assert [axis for axis in after.axes.values() if axis.name in before.axes] == [*before.axes.values()]
    new = [decl for decl in after.tensors.values() if decl.name not in before.tensors]
    assert {decl.part for decl in new} == set(growth.names)
    used = {factor for decl in before.tensors.values() for factors in decl.factors for factor in factors}
    assert not used & (after.axes.keys() - before.axes.keys())
    assert [product for product in after.products if product.part not in growth.names] == [*before.products]


@pytest.mark.slow
@relaxed
@given(growths(), st.integers(0, 9))
def test_first_weights_of_all_others_are_the_same(growth: Growth, seed: int) -> None:
    before, after = init_state(_declared(growth.before), seed), init_state(network_of(growth.after), seed)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def inputs_of(network: Network, count: int = 6) -> Tensor:
    generator, shape = torch.Generator().manual_seed(4), (count, *network.config.input_shape)
    if network.symbols:
        return torch.randint(network.symbols, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def outputs(network: Network, architecture: Architecture, state: Mapping[str, Tensor], *, training: bool) -> Tensor:
    module = build_module(network, architecture)
    module.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    with torch.no_grad():
        result: Tensor = module.train(training)(inputs_of(network))
    return result


def draw_small_state(network: Network, seed: int) -> dict[str, Tensor]:
    """Random weights, small enough that float32 resolves relative differences of 1e-5."""
    state = random_state(network, seed)
    return {name: state[name] * (0.3 if len(decl.shape) > 1 else 1) for name, decl in network.tensors.items()}


@pytest.mark.slow
@relaxed
@given(st.data(), growths())
def test_a_submodel_without_the_new_blocks_is_the_network_before(data: st.DataObject, growth: Growth) -> None:
    """Old architectures keep their meaning, whatever axes and blocks they keep, in evaluation and in training."""
    before, after = _declared(growth.before), network_of(growth.after)
    architecture = data.draw(architectures(before))
    assert after.shapes(architecture) == before.shapes(architecture)
    grown = draw_small_state(after, 1)
    state = {name: grown[name] for name in before.tensors}
    local_after, local_before = extract(after, architecture, grown), extract(before, architecture, state)
    assert [*local_after] == [*local_before]
    assert all(torch.equal(local_after[name], local_before[name]) for name in local_before)
    for training in (False, True):
        result = outputs(after, architecture, local_after, training=training)
        assert torch.equal(result, outputs(before, architecture, local_before, training=training))


@pytest.mark.slow
@relaxed
@given(growths(IDENTITIES))
def test_new_blocks_that_start_as_the_identity_keep_outputs(growth: Growth) -> None:
    before, after = _declared(growth.before), network_of(growth.after)
    state = draw_small_state(before, 2)
    grown = {**init_state(after, 3), **state}
    for training in (False, True):
        expected = outputs(before, before.full_architecture(), state, training=training)
        actual = outputs(after, after.full_architecture(), grown, training=training)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow
@relaxed
@given(growths())
def test_a_network_is_a_size_of_the_grown_one_which_is_their_union(growth: Growth) -> None:
    before, after = _declared(growth.before), network_of(growth.after)
    size = size_in(after, before)
    assert size.blocks == tuple(block.name for block in before.blocks)
    if all(can_be_identity(after, name) for name in growth.names):
        replication = Replication.draw(after, size, random.Random(1))
        local = draw_small_state(before, 5)
        grown = replication.grow(local, init_state(after, 2))
        expected = outputs(before, before.full_architecture(), local, training=False)
        actual = outputs(after, after.full_architecture(), grown, training=False)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        down = replication.down(grown)
        assert all(torch.equal(down[name], tensor) for name, tensor in local.items())
    else:
        with pytest.raises(ConfigError, match="so it cannot be the identity"):
            Replication.draw(after, size, random.Random(1))
    for families in ((growth.before, growth.after), (growth.after, growth.before)):
        assert unite_families(families) == growth.after


def test_unions_match_blocks_by_name_and_not_by_position() -> None:
    first = Mlp(input_shape=(5,), class_count=4, widths=(8,), depths=(2,), hidden_widths=(4, 8))
    grown = widen_cells(deepen(first, "section0.block0"), ["section0.block2"], 1.5)
    other = replace(first, widths=(12,), depths=(4,), hidden_widths=(8, 4, 4, 16))
    assert shapes_of(unite_families([first, other])) == shapes_of(replace(other, hidden_widths=(8, 8, 4, 16)))
    with pytest.raises(ConfigError, match=r"have no union, because in one of them layer 'section0\.block2"):
        unite_families([grown, other])
    with pytest.raises(ConfigError, match=r"'section0\.block1'\], but there the order is \['section0\.block1'"):
        size_in(network_of(replace(other, depths=(3,), hidden_widths=())), network_of(grown))
    beside = deepen(deepen(replace(first, hidden_widths=(4, 4)), "section0.block0"), "section0.block1")
    union = network_of(unite_families([grown, beside]))
    assert union.sections == (tuple(f"section0.block{number}" for number in (0, 2, 1, 3)),)
    assert [union.axes[f"{name}.inner"].size for name in union.sections[0]] == [4, 12, 8, 4]
    assert unite_families([grown]) == grown
    # Unspecified widths are those of the section.
    unspecified = replace(first, hidden_widths=(), widths=(16,))
    expected = replace(other, widths=(16,), hidden_widths=(16, 16, 4, 16))
    assert shapes_of(unite_families([unspecified, other])) == shapes_of(expected)


def test_a_union_has_the_blocks_that_grew_in_either_network() -> None:
    families = [deepen(MLP, "section0.block0"), deepen(MLP, "section2.block1")]
    for order in (families, families[::-1]):
        union = network_of(unite_families(order))
        assert union.sections == (
            ("section0.block0", "section0.block2", "section0.block1"),
            ("section1.block0",),
            ("section2.block0", "section2.block1", "section2.block2"),
        )


def inner_sizes(config: Family, section: int, end: str) -> list[int]:
    """The size of an axis of each cell of a section, 0 for a cell without it."""
    network = network_of(config)
    axes = [network.axes.get(f"{name}.{end}") for name in network.sections[section]]
    return [axis.size if axis else 0 for axis in axes]


def test_a_new_block_is_like_the_one_before_it_or_the_next_one_of_its_section() -> None:
    """The first block of a section may change the shape of its input, so no copy of it follows it."""
    grown = deepen(BERT, "section0.block1")
    assert inner_sizes(grown, 0, "hidden") == [5, 8, 8, 4]
    assert inner_sizes(deepen(grown, "section0.block2", 2), 0, "hidden") == [5, 8, 8, 4, 4, 4]
    assert inner_sizes(deepen(BERT, "section0.block0"), 0, "hidden") == [5, 8, 8, 4]
    config = CONVOLUTIONAL["mobilenet_v3"]
    first = deepen(config, "section1.block0")
    assert network_of(first).sections[1] == ("section1.block0", "section1.block2", "section1.block1")
    assert inner_sizes(first, 1, "inner") == [9, 7, 7]
    assert inner_sizes(first, 1, "squeezed") == [0, 0, 0]
    assert inner_sizes(deepen(config, "section2.block0"), 2, "squeezed") == [3, 4, 4]


@pytest.mark.parametrize(
    ("config", "name", "depths"),
    [(RESNET, "section1.block2", (2, 4)), (CONVOLUTIONAL["efficientnet_v2"], "section2.block1", (2, 2, 3))],
)
def test_a_block_at_the_end_is_as_if_it_had_always_been_there(config: Any, name: str, depths: tuple[int, ...]) -> None:
    hidden = (*config.hidden_widths, *config.hidden_widths[-1:])
    grown, deeper = network_of(deepen(config, name)), network_of(replace(config, depths=depths, hidden_widths=hidden))
    assert [*grown.tensors.values()] == [*deeper.tensors.values()]
    assert grown.axes == deeper.axes
    assert (grown.blocks, grown.cells) == (deeper.blocks, deeper.cells)


def test_a_number_is_one_above_the_largest_wherever_the_block_is() -> None:
    twice = deepen(MLP, "section0.block0", 2)
    assert network_of(twice).sections[0] == tuple(f"section0.block{number}" for number in (0, 2, 3, 1))
    again = deepen(twice, "section0.block2")
    assert network_of(again).sections[0] == tuple(f"section0.block{number}" for number in (0, 2, 4, 3, 1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("section3.block0", r"'section3\.block0' is to be deepened, but the network has \['section0\.block0', "),
        ("section0.block2", r"'section0\.block2' is to be deepened, but the network has"),
        ("section1.block0", r"'section1\.block0' changes the shape of its input, so no copy of it can follow it"),
    ],
)
def test_impossible_insertions_are_refused_in_one_sentence(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deepen_cell(MLP, Cell(name=name, section=int(name[7])))


@pytest.mark.parametrize("config", EVERY, ids=lambda config: config.TYPE)
def test_a_grown_record_comes_back_from_plain_data(config: Family) -> None:
    grown = deepen_cell(config, list_deepenable(config)[0], 2)
    again = from_plain(OPEN, parse_json(canonical_json(grown), max_bytes=2**16))
    assert again == grown
    assert hash(again) == hash(grown)


def grow_resnet() -> Family:
    """Return a network whose blocks are numbered 0, 2, 1 and 0, 3, 1, 2."""
    return deepen(deepen(RESNET, "section1.block0"), "section0.block0")


def test_spaces_keep_the_first_blocks_by_position() -> None:
    network = network_of(grow_resnet())
    assert [block.name for block in network.blocks] == [
        f"section{name}" for name in ("0.block2", "0.block1", "1.block3", "1.block1", "1.block2")
    ]
    sizes = {architecture.name: architecture for architecture in uniform_space(network, (1,))}
    assert sizes["w1 d2-3"].blocks == ("section0.block2", "section1.block3", "section1.block1")
    space = search_space(network, (0.5, 1), width="section", depth="section")
    for genes in (space.smallest, space.largest):
        assert space.genes_of(space.architecture(genes)) == space.canonical(genes)
    (gene,) = (gene for gene in space.genes if gene.name == "section1 channel")
    assert {f"section1.block{number}.inner" for number in range(4)} <= set(gene.axes)
    (depth,) = (gene for gene in space.genes if gene.name == "section1 depth")
    assert [option.blocks[-1:] for option in depth.options] == [
        (),
        ("section1.block3",),
        ("section1.block1",),
        ("section1.block2",),
    ]


def test_the_last_block_that_is_kept_stands_for_those_behind_it() -> None:
    network = network_of(grow_resnet())
    grafted = graft(network, Architecture(blocks=("section1.block3", "section1.block1")))
    assert grafted.sources["section1.block2.layer1.weight"] == "section1.block1.layer1.weight"
    assert grafted.sources["section1.block3.layer1.weight"] == "section1.block3.layer1.weight"


def test_steps_and_halvings_stay_where_they_were() -> None:
    stepped = network_of(deepen(replace(DECODER, learnable_steps=True), "section1.block0"))
    steps = {decl.part for decl in stepped.tensors.values() if decl.role == "step"}
    assert steps == {"section1.block1", "section1.block2"}
    vgg = CONVOLUTIONAL["vgg"]
    for name in ("section1.block0", "section1.block2"):
        tensors = network_of(deepen(vgg, name)).tensors
        positions = {key: decl.positions for key, decl in tensors.items() if key.endswith("conv.weight")}
        assert [*positions.values()] == [9 * 8, *[4 * 4] * 4], "the layer is before the pooling of its section"
    assert len(network_of(deepen(VIT, "section1.block0")).products) == 2 * 4
