"""Chains with a width for each layer: leaving layers out, growing, copying, and unions."""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL, LAYERED, random_state
from elastic.test_growing import inputs_of
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families import presets
from subfleet.elastic.families.blueprint import declare
from subfleet.elastic.families.records.plain import DsCnn, Vgg
from subfleet.elastic.grafting import graft
from subfleet.elastic.growing import deepen_cell, insert_block, list_cells, widen_cells
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.elastic.replication import Replication, is_replicable, size_in
from subfleet.elastic.resizing import derive_settings, has_section_widths
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.elastic.unions import unite_families
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import to_plain
from subfleet.protocol.submodel import Architecture, Prefix, Roll

Chain = Vgg | DsCnn
VGG = Vgg(input_shape=(1, 4, 4), class_count=2, widths=(4,), depths=(3,), norm="none", layer_widths=(4, 6, 4))
NARROWING = replace(VGG, widths=(3,), layer_widths=(6, 4, 3))
_declared = cache(network_of)
few = examples(6)
"""Few examples, for tests that declare many networks."""


@st.composite
def chains(draw: st.DrawFn, kind: type[Chain], norm: str) -> Chain:
    """Any small chain, with or without layer widths; the block numbers of a section ascend."""
    sections = [[0, *sorted(draw(st.sets(st.integers(1, 4), max_size=3)))] for _ in range(2)]
    depths = tuple(map(len, sections))
    layers = draw(st.lists(st.integers(1, 4), min_size=sum(depths), max_size=sum(depths)))
    widths = tuple(2 * width for width in layers)
    has_layer_widths: bool = draw(st.booleans())
    last = (widths[depths[0] - 1], widths[-1])
    return kind(
        input_shape=(1, 13, 6),
        class_count=3,
        widths=last,
        depths=depths,
        norm=norm,  # type: ignore[arg-type]  # one of the two below
        group_size=2,
        block_numbers=()
        if all(numbers == [*range(len(numbers))] for numbers in sections)
        else tuple(map(tuple, sections)),
        layer_widths=widths if has_layer_widths else (),
    )


@st.composite
def families(draw: st.DrawFn) -> list[Chain]:
    """One to three chains of one kind that differ only in sizes."""
    kind, norm = draw(st.sampled_from([Vgg, DsCnn])), draw(st.sampled_from(["none", "batch"]))
    return draw(st.lists(chains(kind, norm), min_size=1, max_size=3))


def weights_of(network: Network, seed: int) -> dict[str, Tensor]:
    state = {name: 0.5 * tensor.double() for name, tensor in random_state(network, seed).items()}
    roles = ("variance", "gain")
    return {
        name: tensor.abs() + 0.5 if network.tensors[name].role in roles else tensor for name, tensor in state.items()
    }


def outputs(network: Network, state: dict[str, Tensor]) -> Tensor:
    module = build_module(network, network.full_architecture()).double()
    module.load_state_dict(state)
    with torch.no_grad():
        result: Tensor = module.eval()(inputs_of(network, 3).double())
    return result


def check_copied(larger: Network, smaller: Network, seed: int = 1) -> None:
    """P1 and P2: the larger network has the outputs of the smaller one, and gives its weights back."""
    size = size_in(larger, smaller)
    assert is_replicable(larger, size)
    replication = Replication.draw(larger, size, random.Random(seed))
    local = weights_of(smaller, seed)
    grown = replication.grow(local, init_state(larger, seed))
    expected = outputs(smaller, local)
    torch.testing.assert_close(
        outputs(larger, grown), expected, rtol=1e-12, atol=1e-12 * max(1.0, float(expected.abs().max()))
    )
    down = replication.down(grown)
    assert down.keys() == local.keys()
    for name, tensor in local.items():
        torch.testing.assert_close(down[name], tensor, rtol=1e-14, atol=0)


@pytest.mark.slow
@few
@given(families())
def test_members_are_sizes_of_their_union_and_are_copied_into_it_exactly(members: list[Chain]) -> None:
    network = network_of(unite_families(members))
    for member in members:
        smaller = network_of(member)
        size = size_in(network, smaller)
        assert [*network.shapes(size).values()] == [decl.shape for decl in smaller.tensors.values()]
        network.check(size)
        check_copied(network, smaller)


@pytest.mark.slow
@few
@given(families(), st.randoms(use_true_random=False))
def test_a_union_is_idempotent_commutative_and_monotone(members: list[Chain], rng: random.Random) -> None:
    union: Any = unite_families(members)
    assert unite_families([union, *members]) == unite_families([union]) == union
    assert unite_families(rng.sample(members, len(members))) == union
    rest = unite_families(members[1:] or members)
    assert unite_families([members[0], rest]) == union, "also if the rest is a size of the first member"
    assert bool(union.layer_widths) == any(member.layer_widths for member in members)
    assert union.widths == tuple(max(parts) for parts in zip(*(member.widths for member in members), strict=True))


def test_a_union_has_no_more_than_its_members_need() -> None:
    """A layer that a network lacks must carry the channels that the network passes on there."""
    short = replace(VGG, depths=(1,), widths=(8,), layer_widths=())
    union = unite_families([VGG, short])
    assert union == replace(VGG, widths=(8,), layer_widths=(8, 8, 8))
    assert unite_families([VGG, replace(short, widths=(2,))]) == VGG
    assert unite_families([short, replace(short, depths=(3,), widths=(4,))]) == replace(short, depths=(3,))
    inner = replace(VGG, layer_widths=(2, 2, 10), widths=(10,))
    assert unite_families([VGG, inner]) == replace(inner, layer_widths=(4, 6, 10))
    ds_cnn = DsCnn(input_shape=(1, 13, 6), class_count=3, widths=(8,), depths=(1,), norm="none")
    assert unite_families([ds_cnn, replace(ds_cnn, widths=(4,), stem_width=6)]) == replace(ds_cnn, stem_width=8)


def test_without_layer_widths_nothing_changes() -> None:
    for config in (CONVOLUTIONAL["vgg"], CONVOLUTIONAL["ds_cnn"]):
        network = network_of(config)
        assert "layer_widths" not in to_plain(config), "the hashes of earlier settings would change"
        assert {"section0.stream", "section1.stream"} <= network.axes.keys()
        assert not any(block.reads or block.gives for block in network.blocks)
        assert has_section_widths(config)


def test_layers_of_their_sections_widths_compute_the_same_with_axes_of_their_own() -> None:
    together = replace(VGG, layer_widths=())
    apart = replace(VGG, layer_widths=(4, 4, 4))
    tied, untied = network_of(together), network_of(apart)
    assert {name: decl.shape for name, decl in tied.tensors.items()} == {
        name: decl.shape for name, decl in untied.tensors.items()
    }
    state = weights_of(tied, 1)
    assert torch.equal(outputs(tied, state), outputs(untied, state))
    assert [*untied.axes] == [*(f"section0.block{number}.width" for number in range(3)), "class"]
    assert size_in(tied, untied) == replace(tied.full_architecture(), name="") == size_in(untied, tied)
    assert not has_section_widths(apart)
    # A network with layers of different widths is a size only of the network with an axis for each layer.
    narrow = network_of(replace(VGG, layer_widths=(2, 3, 4)))
    size_in(untied, narrow)
    with pytest.raises(ConfigError, match=r"its layers of section 0 have \[2, 3, 4\] channels, but must be"):
        size_in(tied, narrow)


def test_a_network_that_passes_on_more_than_a_layer_has_is_no_size() -> None:
    narrow = replace(VGG, depths=(2,), widths=(2,), layer_widths=(4, 2))
    with pytest.raises(ConfigError, match=r"'section0\.block1\.width' is missing or smaller there"):
        size_in(network_of(narrow), network_of(replace(narrow, depths=(1,), widths=(4,), layer_widths=())))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"layer_widths": (4, 6)},
            r"layer_widths is \(4, 6\), but must be empty or have one number for each of the 3 blocks",
        ),
        ({"layer_widths": (4, 0, 4)}, r"layer_widths\[1\] is 0, but must be 1 or more"),
        (
            {"layer_widths": (4, 6, 5)},
            r"widths are \(4,\), but must be \(5,\), the widths of the sections' last layers",
        ),
        ({"norm": "group"}, r"widths are \(4, 4, 6, 4\), but must be multiples of group_size 4"),
    ],
)
def test_widths_that_no_layers_can_have_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(VGG, **changes)


def test_a_left_out_layer_passes_its_input_on() -> None:
    network = network_of(VGG)
    state = weights_of(network, 1)
    first, second, third = (f"section0.block{number}.width" for number in range(3))
    assert network.tied_axes([]) == ((first, second, third),)
    assert network.tied_axes(["section0.block1"]) == ((second, third),)
    with pytest.raises(ConfigError, match=rf"between the axes '{first}' and '{second}', but keeps different indices"):
        network.check(Architecture(blocks=("section0.block2",)))
    rolled = Architecture(axes=((first, Roll(start=1, size=2)), (second, Prefix(size=2))), blocks=("section0.block2",))
    with pytest.raises(ConfigError, match="but keeps different indices"):
        build_module(network, rolled)
    with pytest.raises(ConfigError, match="but keeps different indices"):
        network.size_of(rolled)
    architecture = Architecture(axes=((second, Prefix(size=4)),), blocks=("section0.block2",))
    module, inputs = build_module(network, architecture).double(), inputs_of(network, 3).double()
    module.load_state_dict(extract(network, architecture, state))
    part = {name: tensor for name, tensor in state.items() if "block1" not in name}
    part["section0.block2.conv.weight"] = state["section0.block2.conv.weight"][:, :4]
    plain = network_of(replace(VGG, depths=(2,), layer_widths=(), block_numbers=((0, 2),)))
    whole = build_module(plain, plain.full_architecture()).double()
    whole.load_state_dict(part)
    with torch.no_grad():
        assert torch.equal(module.eval()(inputs), whole.eval()(inputs))


def test_spaces_leave_out_layers_only_where_both_sides_keep_the_same() -> None:
    network = network_of(NARROWING)
    space = {architecture.name: architecture for architecture in uniform_space(network, (0.5, 1))}
    assert {name: network.shapes(architecture)["head.weight"] for name, architecture in space.items()} == {
        "w1 d3": (2, 3), "w1 d2": (2, 3), "w1 d1": (2, 3), "w1/2 d3": (2, 2), "w1/2 d2": (2, 2), "w1/2 d1": (2, 2),
    }  # fmt: skip
    assert network.sizes(space["w1 d2"])["section0.block0.width"] == 6
    assert network.sizes(space["w1 d1"])["section0.block0.width"] == 3
    for config in (VGG, NARROWING, *LAYERED.values()):
        declared = network_of(config)
        for architecture in uniform_space(declared, (0.25, 0.5, 0.75, 1)):
            declared.check(architecture)
    space_of = search_space(network)
    assert [gene.name for gene in space_of.genes] == [
        "section0.block0.width", "section0.block1.width", "section0.block2.width", "section0.block1", "section0.block2",
    ]  # fmt: skip
    listed = [space_of.architecture(genes) for genes in space_of.enumerate()]
    # Every width of each layer; where layers between others are left out, every width that all those can have.
    assert (
        len(listed) == len({architecture.architecture_id for architecture in listed}) == 6 * 4 * 3 + 4 * 3 + 6 * 3 + 3
    )


def _lacks_the_last_of_two(network: Network, architecture: Architecture) -> bool:
    pairs = pairwise(network.blocks)
    return any(
        first.section == second.section and first.name in architecture.blocks and second.name not in architecture.blocks
        for first, second in pairs
    )


def test_a_layer_that_gives_other_channels_is_no_copy_of_another() -> None:
    for config in (*LAYERED.values(), replace(VGG, layer_widths=(4, 4, 4))):
        network = network_of(config)
        architecture = next(
            architecture
            for architecture in uniform_space(network, (1,))
            if _lacks_the_last_of_two(network, architecture)
        )
        with pytest.raises(ConfigError, match="no other block can replace it; leave layer_widths empty"):
            graft(network, architecture)
        full = network.full_architecture()
        assert graft(network, full).architecture.blocks == full.blocks, "without left-out blocks, nothing is grafted"


def test_a_cell_becomes_wider_by_itself() -> None:
    assert widen_cells(VGG, ["section0.block1"], 1.5) == replace(VGG, layer_widths=(4, 9, 4))
    assert widen_cells(VGG, ["section0.block2"], 1.5) == replace(VGG, widths=(6,), layer_widths=(4, 6, 6))
    ds_cnn = LAYERED["layered ds_cnn"]
    assert isinstance(ds_cnn, DsCnn)
    grown = widen_cells(ds_cnn, ["section0.block1"], 1.5)  # the last layer of its section; the stem keeps the old width
    assert grown == replace(ds_cnn, widths=(12, 12), stem_width=8, layer_widths=(4, 12, 12, 16, 12))
    (cell,) = (cell for cell in list_cells(network_of(ds_cnn)) if cell.name == "section0.block2")
    deeper = deepen_cell(ds_cnn, cell)
    assert (deeper.depths, deeper.block_numbers) == ((4, 2), ((0, 2, 3, 1), (0, 1)))
    assert deeper.layer_widths == (4, 12, 12, 8, 16, 12)
    flat = replace(VGG, widths=(4, 4), depths=(1, 1), layer_widths=(4, 4))
    assert insert_block(flat, section=0, after=0).layer_widths == (4, 4, 4)
    # The last layer has the width of its section, which the next section reads.
    with pytest.raises(
        ConfigError, match=r"widths are \(4,\), but must be \(8,\), the widths of the sections' last layers"
    ):
        replace(insert_block(VGG, section=0, after=2), layer_widths=(4, 6, 4, 8))


def test_sizes_of_layers_are_settings_of_their_own() -> None:
    network = network_of(VGG)
    axes = (("section0.block0.width", Prefix(size=3)), ("section0.block2.width", Prefix(size=2)))
    size = replace(network.full_architecture(), axes=axes)
    assert derive_settings(network, size) == replace(VGG, widths=(2,), layer_widths=(3, 6, 2))


def check_copied_into(numbers: Sequence[int], smaller: tuple[int, ...], larger: tuple[int, ...], norm: Any) -> None:
    config = replace(VGG, norm=norm, widths=larger[-1:], depths=(len(larger),), layer_widths=larger)
    small = replace(
        config, widths=smaller[-1:], depths=(len(smaller),), layer_widths=smaller, block_numbers=(tuple(numbers),)
    )
    check_copied(network_of(config), network_of(small))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_layers_that_are_lacking_pass_on_what_the_smaller_network_has(norm: str) -> None:
    check_copied_into((0, 2), (4, 6), (4, 7, 6), norm)  # wider than what it reads
    check_copied_into((0, 3), (3, 6), (4, 7, 5, 6), norm)  # several in a row
    check_copied_into((0,), (3,), (3, 7, 5), norm)
    check_copied_into((0, 1), (5, 2), (5, 3, 8), norm)  # the last of its section
    for kind in (Vgg, DsCnn):
        wide = kind(
            input_shape=(1, 13, 6), class_count=3, widths=(4, 6), depths=(3, 2), norm=norm,  # type: ignore[arg-type]
            layer_widths=(6, 9, 4, 5, 6),
        )  # fmt: skip
        check_copied(network_of(wide), network_of(replace(wide, depths=(1, 1), widths=(2, 3), layer_widths=())))


@pytest.mark.slow
def test_vggs_of_fedadp_are_sizes_of_the_widest() -> None:
    largest = presets.vgg19_wider.settings
    assert isinstance(largest, Vgg)
    network = _declared(largest)
    names = ("vgg13", "vgg14", "vgg15", "vgg16", "vgg16_wider", "vgg17", "vgg18", "vgg19", "vgg19_wider")
    members: list[Any] = [getattr(presets, name).settings for name in names]
    for name, member in zip(names, members, strict=True):
        assert sum(member.depths) + 3 == int(name.removeprefix("vgg").partition("_")[0]), (
            "a VGG ends with three fully connected layers"
        )
        assert is_replicable(network, size_in(network, _declared(member)))
    assert unite_families(members) == largest
    assert sorted(largest.layer_widths, reverse=True)[:2] == [1024, 512]
    counts = [
        _declared(member).parameter_count(_declared(member).full_architecture())
        for member in members
        if not member.layer_widths
    ]
    assert counts == sorted(counts)


def test_a_block_that_reads_an_unknown_axis_is_refused() -> None:
    blueprint = VGG.blueprint()
    (block, *other_blocks) = blueprint.blocks
    for wrong in (replace(block, reads=""), replace(block, gives="section9")):
        with pytest.raises(ConfigError, match="but must name two axes or none"):
            declare(VGG, replace(blueprint, blocks=(wrong, *other_blocks)))


def test_both_kinds_of_chains_share_all_settings_but_the_stem_width() -> None:
    own = [{field.name for field in fields(kind)} for kind in (Vgg, DsCnn)]
    assert own[1] - own[0] == {"stem_width"}
    assert not own[0] - own[1]
