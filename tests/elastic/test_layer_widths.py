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
from elastic.test_growing import deepen, inputs_of, shapes_of
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families import presets
from subfleet.elastic.families.records.plain import DsCnn, Vgg
from subfleet.elastic.grafting import graft
from subfleet.elastic.growing import derive_settings, resize, widen_cells
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import Replication, is_replicable, size_in
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.elastic.unions import unite_families
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import to_plain
from subfleet.protocol.submodel import Architecture, Prefix, Roll

VGG = Vgg(input_shape=(1, 4, 4), class_count=2, widths=(4,), depths=(3,), norm="none", layer_widths=(4, 6, 4))
NARROWING = replace(VGG, widths=(3,), layer_widths=(6, 4, 3))
_declared = cache(network_of)
few = examples(6)
"""Few examples, for tests that declare many networks."""


@st.composite
def chains(
    draw: st.DrawFn, kind: type[Vgg | DsCnn], norm: str, deepest: tuple[int, ...], grown: Sequence[str]
) -> Family:
    """Any small chain, with or without layer widths; or one that has grown, with layer widths."""
    depths = deepest if grown else tuple(draw(st.integers(1, depth)) for depth in deepest)
    widths = tuple(draw(st.lists(st.sampled_from([2, 4, 6, 8]), min_size=sum(depths), max_size=sum(depths))))
    has_layer_widths: bool = bool(grown) or draw(st.booleans())
    chain: Family = kind(
        input_shape=(1, 13, 6),
        class_count=3,
        widths=(widths[depths[0] - 1], widths[-1]),
        depths=depths,
        norm=norm,  # type: ignore[arg-type]  # one of the two below
        group_size=2,
        layer_widths=widths if has_layer_widths else (),
    )
    for name in grown:
        chain = deepen(chain, name)
    return chain


@st.composite
def families(draw: st.DrawFn) -> list[Family]:
    """One to three chains of one kind that differ only in sizes; new layers follow the same ones in the same order."""
    kind, norm = draw(st.sampled_from([Vgg, DsCnn])), draw(st.sampled_from(["none", "batch"]))
    deepest = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    # A section's only layer has no successor that could be copied.
    names = [f"section{section}.block{number}" for section in (0, 1) for number in range(deepest[section])]
    followed = [name for name in draw(st.lists(st.sampled_from(names), max_size=2)) if deepest[int(name[7])] > 1]
    counts = draw(st.lists(st.integers(0, len(followed)), min_size=1, max_size=3))
    return [draw(chains(kind, norm, deepest, followed[:count])) for count in counts]


def section_widths(config: Family) -> list[int]:
    """The number of channels that each section gives."""
    network = network_of(config)
    last = [(f"section{section}.stream", f"{names[-1]}.width") for section, names in enumerate(network.sections)]
    return [network.axes[stream if stream in network.axes else layer].size for stream, layer in last]


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
def test_members_are_sizes_of_their_union_and_are_copied_into_it_exactly(members: list[Family]) -> None:
    network = network_of(unite_families(members))
    for member in members:
        smaller = network_of(member)
        size = size_in(network, smaller)
        assert network.shapes(size) == shapes_of(member)
        network.check(size)
        check_copied(network, smaller)


@pytest.mark.slow
@few
@given(families(), st.randoms(use_true_random=False))
def test_a_union_is_idempotent_commutative_and_monotone(members: list[Family], rng: random.Random) -> None:
    union = unite_families(members)
    assert unite_families([union, *members]) == unite_families([union]) == union
    assert unite_families(rng.sample(members, len(members))) == union
    streams = [{"section0.stream", "section1.stream"} <= network_of(own).axes.keys() for own in (union, *members)]
    rest = unite_families(members[1:] or members)
    if len({*streams}) == 1:  # layers that share an axis in the rest cannot have their own any more
        assert unite_families([members[0], rest]) == union, "also if the rest is a size of the first member"
    assert streams[0] == all(streams[1:])
    assert section_widths(union) == [max(own) for own in zip(*map(section_widths, members), strict=True)]


def test_a_union_has_no_more_than_its_members_need() -> None:
    """A layer that a network lacks must carry the channels that the network passes on there."""
    short = replace(VGG, depths=(1,), widths=(8,), layer_widths=())
    union = shapes_of(unite_families([VGG, short]))
    assert union == shapes_of(replace(VGG, widths=(8,), layer_widths=(8, 8, 8)))
    assert unite_families([VGG, replace(short, widths=(2,))]) == VGG
    tied = unite_families([short, replace(short, depths=(3,), widths=(4,))])
    assert shapes_of(tied) == shapes_of(replace(short, depths=(3,)))
    assert "section0.stream" in network_of(tied).axes
    inner = replace(VGG, layer_widths=(2, 2, 10), widths=(10,))
    assert shapes_of(unite_families([VGG, inner])) == shapes_of(replace(inner, layer_widths=(4, 6, 10)))
    ds_cnn = DsCnn(input_shape=(1, 13, 6), class_count=3, widths=(8,), depths=(1,), norm="none")
    narrow = replace(ds_cnn, widths=(4,), stem_width=6)
    assert unite_families([ds_cnn, narrow]) == ds_cnn
    wider = replace(narrow, stem_width=12)
    assert shapes_of(unite_families([ds_cnn, wider])) == shapes_of(replace(ds_cnn, stem_width=12))


def test_without_layer_widths_nothing_changes() -> None:
    for config in (CONVOLUTIONAL["vgg"], CONVOLUTIONAL["ds_cnn"]):
        network = network_of(config)
        assert "layer_widths" not in to_plain(config), "the hashes of earlier settings would change"
        assert {"section0.stream", "section1.stream"} <= network.axes.keys()
        assert not any(block.reads or block.gives for block in network.blocks)


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
    # A network with layers of different widths is a size only of the network with an axis for each layer.
    narrow = network_of(replace(VGG, layer_widths=(2, 3, 4)))
    size_in(untied, narrow)
    with pytest.raises(ConfigError, match=r"tensor 'section0\.block0\.conv\.\w+' has the shape .* but as a submodel"):
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
    plain = network_of(replace(VGG, depths=(2,), layer_widths=()))
    whole = build_module(plain, plain.full_architecture()).double()
    whole.load_state_dict({name.replace("block2", "block1"): tensor for name, tensor in part.items()})
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
    for name, sizes in (("section0.block1", (4, 9, 4)), ("section0.block2", (4, 6, 6))):
        wider = shapes_of(widen_cells(VGG, [name], 1.5))
        assert wider == shapes_of(replace(VGG, widths=sizes[-1:], layer_widths=sizes))
    ds_cnn = LAYERED["layered ds_cnn"]
    assert isinstance(ds_cnn, DsCnn)
    grown = widen_cells(ds_cnn, ["section0.block2"], 1.5)  # the last layer of its section; the stem keeps the old width
    assert shapes_of(grown) == shapes_of(
        replace(ds_cnn, widths=(12, 12), stem_width=8, layer_widths=(4, 12, 12, 16, 12))
    )


@pytest.mark.parametrize(("followed", "numbers"), [(0, (0, 3, 1, 2)), (1, (0, 1, 3, 2)), (2, (0, 1, 2, 3))])
def test_a_new_layer_has_an_axis_of_its_own_that_later_layers_read(followed: int, numbers: tuple[int, ...]) -> None:
    before, after = network_of(VGG), network_of(deepen(VGG, f"section0.block{followed}"))
    axes = [f"section0.block{number}.width" for number in numbers]
    assert after.sections == (tuple(f"section0.block{number}" for number in numbers),)
    assert [(block.reads, block.gives) for block in after.blocks] == [*pairwise(axes)]
    for name, (source, target) in zip(after.sections[0][1:], pairwise(axes), strict=True):
        assert after.tensors[f"{name}.conv.weight"].axes[:2] == (target, source)
    assert after.tensors["head.weight"].axes == ("class", axes[-1])
    assert {name: after.axes[name] for name in before.axes} == before.axes
    assert after.axes[axes[followed + 1]].size == after.axes[axes[followed]].size == (4, 6, 4)[followed]
    check_copied(after, before)


def test_sizes_of_layers_are_settings_of_their_own() -> None:
    network = network_of(VGG)
    axes = (("section0.block0.width", Prefix(size=3)), ("section0.block2.width", Prefix(size=2)))
    derived = derive_settings(network, replace(network.full_architecture(), axes=axes))
    assert shapes_of(derived) == shapes_of(replace(VGG, widths=(2,), layer_widths=(3, 6, 2)))
    assert derive_settings(network, network.full_architecture()) == VGG


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_layers_that_are_lacking_pass_on_what_the_smaller_network_has(norm: Any) -> None:
    def chain(*layers: int) -> Vgg:
        return replace(VGG, norm=norm, widths=layers[-1:], depths=(len(layers),), layer_widths=layers)

    for layers in ((4, 7, 6), (4, 7, 5, 6)):  # layers after the first one, wider than what they read
        small = chain(3, 6)
        deeper = network_of(deepen(small, "section0.block0", len(layers) - 2))
        sizes = {f"{name}.width": size for name, size in zip(deeper.sections[0], layers, strict=True)}
        check_copied(network_of(resize(deeper, sizes)), network_of(small))
    check_copied(network_of(chain(3, 7, 5)), network_of(chain(3)))
    check_copied(network_of(chain(5, 3, 8)), network_of(chain(5, 2)))  # the last of its section
    for kind in (Vgg, DsCnn):
        wide = kind(
            input_shape=(1, 13, 6), class_count=3, widths=(4, 6), depths=(3, 2), norm=norm,
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


def test_both_kinds_of_chains_share_all_settings_but_the_stem_width() -> None:
    own = [{field.name for field in fields(kind)} for kind in (Vgg, DsCnn)]
    assert own[1] - own[0] == {"stem_width"}
    assert not own[0] - own[1]
