"""Inserting a block keeps the names, first weights and, as a submodel, the outputs of all others."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from elastic.elastic_cases import CONFIGS, CONVOLUTIONAL, DENSE, MLP, RESNET, architectures, random_state, relaxed
from elastic.token_cases import DECODER, TOKEN_CONFIGS, TRANSFORMERS, VIT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families import FAMILIES, AnyFamily
from subfleet.elastic.families.records.blocks import block_numbers
from subfleet.elastic.families.records.inverted import EfficientNetV2, MobileNetV3
from subfleet.elastic.families.records.plain import Vgg
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.grafting import graft
from subfleet.elastic.growing import insert_block
from subfleet.elastic.identities import can_be_identity
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import Replication, size_in
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.elastic.unions import unite_families
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json, to_plain
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


@st.composite
def growths(draw: st.DrawFn, configs: Sequence[Family] = EVERY) -> Growth:
    """Any network, with up to four blocks inserted anywhere."""
    before = after = draw(st.sampled_from(configs))
    names: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        section = draw(st.integers(0, len(after.depths) - 1))
        numbers = block_numbers(after)[section]
        after_number = draw(st.sampled_from(numbers))
        names.append(f"section{section}.block{max(numbers) + 1}")
        after = insert_block(after, section=section, after=after_number)
    return Growth(before=before, after=after, names=tuple(names))


def test_every_family_of_ours_numbers_its_blocks() -> None:
    growing = {config.TYPE for config in EVERY}
    # Supernets do not grow, and a recorded network has no settings that could.
    assert growing | {"choice_cnn", "choice_rnn", "recorded"} == set(FAMILIES)
    assert all("block_numbers" in {field.name for field in fields(FAMILIES[name])} for name in growing)


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
        assert network_of(unite_families(families)) == replace(after, config=unite_families(families))


def test_unions_match_blocks_by_number_and_not_by_position() -> None:
    first = Mlp(input_shape=(5,), class_count=4, widths=(8,), depths=(2,), hidden_widths=(4, 8))
    grown = replace(insert_block(first, section=0, after=0), hidden_widths=(4, 12, 8))
    other = replace(first, widths=(12,), depths=(4,), hidden_widths=(8, 4, 4, 16))
    assert unite_families([first, other]) == replace(other, hidden_widths=(8, 8, 4, 16))
    with pytest.raises(ConfigError, match=r"blocks \[1, 2, 3\] of section 0 in contradictory orders"):
        unite_families([grown, other])
    beside = replace(first, depths=(3,), block_numbers=((0, 1, 5),), hidden_widths=(4, 4, 4))
    assert unite_families([grown, beside]) == replace(
        first, depths=(4,), block_numbers=((0, 2, 1, 5),), hidden_widths=(4, 12, 8, 4)
    )
    assert unite_families([grown]) == grown
    # Unspecified widths are those of the section.
    unspecified = replace(first, hidden_widths=(), widths=(16,))
    assert unite_families([unspecified, other]) == replace(other, widths=(16,), hidden_widths=(16, 16, 4, 16))
    swapped = replace(first, depths=(3,), hidden_widths=(), block_numbers=((0, 2, 1),))
    with pytest.raises(ConfigError, match=r"'section0\.block1'\], but there the order is \['section0\.block1'"):
        size_in(network_of(replace(swapped, block_numbers=())), network_of(swapped))


def test_a_new_block_has_the_sizes_of_the_one_before_it() -> None:
    config = CONVOLUTIONAL["mobilenet_v3"]
    assert isinstance(config, MobileNetV3)
    grown = insert_block(config, section=1, after=0)
    assert (grown.depths, grown.block_numbers) == ((1, 3, 2), ((0,), (0, 2, 1), (0, 1)))
    assert grown.hidden_widths == (4, 9, 9, 7, 8, 6)
    assert grown.squeezed_widths == (2, 0, 0, 0, 3, 4)
    again = insert_block(grown, section=1, after=2)
    assert again.block_numbers == ((0,), (0, 2, 3, 1), (0, 1))
    assert again.hidden_widths == (4, 9, 9, 9, 7, 8, 6)
    assert again.squeezed_widths == (2, 0, 0, 0, 0, 3, 4)
    axes = network_of(again).axes
    assert [axes[f"section1.block{number}.inner"].size for number in (0, 2, 3, 1)] == [9, 9, 9, 7]
    assert [name for name in axes if name.endswith("squeezed")] == [
        f"section{name}.squeezed" for name in ("0.block0", "2.block0", "2.block1")
    ]


def test_sizes_of_sections_stay_those_of_sections() -> None:
    config = CONVOLUTIONAL["efficientnet_v2"]
    assert isinstance(config, EfficientNetV2)
    assert insert_block(config, section=2, after=1).squeezed_widths == (0, 0, 3)
    sections = replace(MLP, hidden_widths=(2, 4, 6))
    assert insert_block(sections, section=1, after=0).hidden_widths == (2, 4, 6)


def test_a_block_at_the_end_of_counted_ones_is_as_if_it_had_always_been_there() -> None:
    assert insert_block(RESNET, section=1, after=2) == replace(RESNET, depths=(2, 4))


def test_a_number_is_one_above_the_largest_and_fills_no_gap() -> None:
    gaps = replace(MLP, depths=(3, 1, 2), block_numbers=((0, 4, 2), (0,), (0, 1)))
    assert insert_block(gaps, section=0, after=4).block_numbers == ((0, 4, 5, 2), (0,), (0, 1))


@pytest.mark.parametrize(
    ("config", "position", "words"),
    [
        (MLP, {"section": 3, "after": 0}, r"into section 3, but the network has sections 0 to 2"),
        (MLP, {"section": -1, "after": 0}, r"into section -1, but"),
        (MLP, {"section": 0, "after": 2}, r"after number 2 of section 0, which has the numbers \[0, 1\]"),
    ],
)
def test_impossible_insertions_are_refused_in_one_sentence(
    config: Family, position: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        insert_block(config, **position)


def test_a_family_that_does_not_number_blocks_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Towers:
        """A family of another package."""

        TYPE = "towers"
        depths: tuple[int, ...] = (2,)

    other: Any = Towers()
    with pytest.raises(ConfigError, match="'towers' has no setting block_numbers"):
        insert_block(other, section=0, after=0)


@pytest.mark.parametrize("config", EVERY, ids=lambda config: config.TYPE)
def test_a_grown_record_comes_back_from_plain_data(config: Family) -> None:
    plain = replace(config, block_numbers=())
    assert "block_numbers" not in to_plain(plain), "the hashes of earlier settings would change"
    grown = insert_block(insert_block(config, section=0, after=0), section=0, after=0)
    again = from_plain(OPEN, parse_json(canonical_json(grown), max_bytes=2**16))
    assert again == grown
    assert hash(again) == hash(grown)


@pytest.mark.parametrize("config", EVERY, ids=lambda config: config.TYPE)
def test_numbers_that_no_blocks_can_have_are_refused(config: Family) -> None:
    all_numbers = block_numbers(config)
    for numbers in ((*all_numbers, (0,)), ((*all_numbers[0], 9), *all_numbers[1:])):
        with pytest.raises(ConfigError, match="must be empty or have one number for each block"):
            replace(config, block_numbers=numbers)
    longer = insert_block(config, section=0, after=0)
    own, *rest = block_numbers(longer)
    for first, words in (
        ((*own[:-1], -1), r"block_numbers\[0\]\[.\] is -1, but must be 0 or more"),
        ((*own[:-1], own[0]), r"block_numbers\[0\] names 0 more than once"),
        (own[::-1], "must begin with 0"),
        ((7, *own[1:]), "must begin with 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(longer, block_numbers=(first, *rest))
    with pytest.raises(ProtocolError, match="block_numbers"):
        from_plain(OPEN, {**to_plain(config), "block_numbers": [[0, "1"]]})


GROWN = insert_block(insert_block(RESNET, section=1, after=0), section=0, after=0)
"""Its blocks are numbered 0, 2, 1 and 0, 3, 1, 2."""


def test_spaces_keep_the_first_blocks_by_position() -> None:
    network = network_of(GROWN)
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
    network = network_of(GROWN)
    grafted = graft(network, Architecture(blocks=("section1.block3", "section1.block1")))
    assert grafted.sources["section1.block2.layer1.weight"] == "section1.block1.layer1.weight"
    assert grafted.sources["section1.block3.layer1.weight"] == "section1.block3.layer1.weight"


def test_steps_and_halvings_stay_where_they_were() -> None:
    stepped = network_of(insert_block(replace(DECODER, learnable_steps=True), section=0, after=0))
    steps = [decl.part for decl in stepped.tensors.values() if decl.role == "step"]
    assert steps == ["section0.block1", "section1.block1"]
    vgg = CONVOLUTIONAL["vgg"]
    assert isinstance(vgg, Vgg)
    module = build_module(network_of(insert_block(vgg, section=0, after=0)), Architecture(blocks=("section0.block1",)))
    names = [name for name, _ in module.named_children()]
    assert names == ["section0", "section1", "pool", "head"]
    assert [name for name, _ in module.get_submodule("section0").named_children()] == ["block0", "block1", "pool"]
    assert len(network_of(insert_block(VIT, section=1, after=0)).products) == 2 * 4
