import dataclasses
import itertools
import math
from functools import cache
from random import Random

import pytest
from elastic.elastic_cases import CONFIGS, LAYERED, MLP, RESNET
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.elastic.axes import Axis
from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.network import Family, Network, TensorDecl
from subfleet.elastic.parts import Block
from subfleet.elastic.spaces import SearchSpace, search_space, uniform_space
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Centre
from subfleet.testing.submodels import find_held_elements

RATES = (0.25, 0.5, 0.75, 1)


SPACE_KEYS = tuple(itertools.product((*CONFIGS, *LAYERED.values()), range(4)))
"""The settings of a network, and the number of one of its spaces."""


@cache
def spaces_of(config: Family) -> tuple[SearchSpace, ...]:
    network = network_of(config)
    return (
        search_space(network),
        search_space(network, (0.5, 1), depth="section"),
        search_space(network, RATES, width="section", depth="section"),
        search_space(network, RATES, width="network", depth="whole"),
    )


def space_at(key: tuple[Family, int]) -> SearchSpace:
    config, number = key
    return spaces_of(config)[number]


relaxed = examples(25)


@st.composite
def spaces_and_genes(draw: st.DrawFn, count: int) -> tuple[SearchSpace, list[tuple[int, ...]]]:
    space = space_at(draw(st.sampled_from(SPACE_KEYS)))
    vectors = st.tuples(*(st.integers(0, most) for most in space.largest))
    return space, [draw(vectors) for _ in range(count)]


@relaxed
@given(spaces_and_genes(1))
def test_genes_make_a_submodel_of_the_network_and_come_back_from_it(
    case: tuple[SearchSpace, list[tuple[int, ...]]],
) -> None:
    space, (genes,) = case
    architecture = space.architecture(genes)
    space.network.check(architecture)
    assert space.holds(architecture)
    assert space.genes_of(architecture) == space.canonical(genes)
    assert space.architecture(space.genes_of(architecture)) == architecture
    users = {name: space.owners.get(name) for name, _ in architecture.axes}
    assert all(blocks is None or blocks & set(architecture.blocks) for blocks in users.values())


def test_a_gene_of_a_kept_and_a_dropped_block_counts_by_the_kept_one() -> None:
    config = next(config for config in CONFIGS if config.TYPE == "mobilenet_v3")
    space = search_space(network_of(config), RATES, width="section", depth="section")
    index = next(index for index, gene in enumerate(space.genes) if gene.name == "section2 squeeze")
    ids = {
        space.architecture((*space.smallest[:index], option, *space.smallest[index + 1 :])).architecture_id
        for option in (2, 3)
    }
    assert len(ids) == 1, "the options differ only in a dropped block"


@pytest.mark.slow
@relaxed
@given(spaces_and_genes(2))
def test_larger_genes_hold_what_smaller_ones_hold(case: tuple[SearchSpace, list[tuple[int, ...]]]) -> None:
    space, (left, right) = case
    low, high = (space.architecture(tuple(map(pick, zip(left, right, strict=True)))) for pick in (min, max))
    small, large = find_held_elements(space.network, low), find_held_elements(space.network, high)
    assert all(bool((large[name] | ~small[name]).all()) for name in space.network.tensors)


@pytest.mark.parametrize("key", SPACE_KEYS[:4])
def test_a_space_reaches_from_its_smallest_to_the_whole_network(key: tuple[Family, int]) -> None:
    space = space_at(key)
    assert space.architecture(space.largest).architecture_id == space.network.full_architecture().architecture_id
    counts = [space.network.parameter_count(space.architecture(genes)) for genes in (space.smallest, space.largest)]
    rng = Random(0)
    for genes in (draw(rng) for draw in (space.random, space.spread) for _ in range(30)):
        assert counts[0] <= space.network.parameter_count(space.architecture(genes)) <= counts[1]


@pytest.mark.slow
def test_every_different_submodel_is_listed_once() -> None:
    space = search_space(network_of(RESNET), (0.5, 1), depth="section")
    listed = [space.architecture(genes) for genes in space.enumerate()]
    every = {
        space.architecture(genes).architecture_id
        for genes in itertools.product(*(range(len(gene.options)) for gene in space.genes))
    }
    assert len(listed) == len({architecture.architecture_id for architecture in listed}) == len(every) < space.count()


def test_a_ratio_of_zero_drops_the_block_of_a_layer() -> None:
    # Widths of 8 and 12 in groups of 4 have 2 and 3 sizes; blocks add the option to be dropped.
    space = search_space(network_of(RESNET))
    options = {gene.name: len(gene.options) for gene in space.genes}
    assert options == {
        "section0.stream": 2,
        "section1.stream": 3,
        "section0.block0.inner": 2,
        "section0.block1": 3,
        "section1.block0.inner": 3,
        "section1.block1": 4,
        "section1.block2": 4,
    }
    assert space.count() == math.prod(options.values()) == len(list(space.enumerate()))
    assert space.architecture(space.smallest).blocks == ()


def test_a_space_too_large_is_not_listed() -> None:
    with pytest.raises(ConfigError, match="combinations, but at most 100 can be listed"):
        search_space(network_of(RESNET)).enumerate(100)


def test_one_rate_for_all_is_the_uniform_space() -> None:
    network = network_of(dataclasses.replace(RESNET, widths=(16, 32)))
    space = search_space(network, RATES, width="network", depth="whole")
    whole = {
        architecture.architecture_id
        for architecture in uniform_space(network, RATES)
        if architecture.name.endswith(" d2-3")
    }
    assert {space.architecture(genes).architecture_id for genes in space.enumerate()} == whole


def test_submodels_of_other_spaces_are_refused() -> None:
    space = search_space(network_of(RESNET), (0.5, 1), width="network", depth="whole")
    assert not space.holds(Architecture())
    with pytest.raises(ConfigError, match="not in the search space"):
        space.genes_of(Architecture(name="no blocks"))


@pytest.mark.parametrize("key", SPACE_KEYS)
def test_draws_follow_from_the_seed(key: tuple[Family, int]) -> None:
    space = space_at(key)
    assert space.random(Random(7)) == space.random(Random(7))


def test_a_space_without_a_choice_has_one_submodel() -> None:
    space = search_space(network_of(MLP), (1,), width="network", depth="whole")
    assert space.largest == space.smallest


def test_kernels_are_cut_to_centres() -> None:
    kernel = Axis(name="kernel", size=7, kind="kernel", granularity=2)
    channels = Axis(name="channels", size=4, kind="channel")
    decl = TensorDecl(
        name="w", shape=(4, 1, 7, 7), axes=("channels", None, "kernel", "kernel"), part="b", role="weight"
    )
    config = dataclasses.replace(RESNET, widths=(4,), depths=(2,))
    network = Network(
        config=config, axes={"kernel": kernel, "channels": channels}, blocks=(Block(name="b", section=0),),
        tensors={"w": decl},
    )  # fmt: skip
    space = search_space(network, (1,), kernels=True)
    index_sets = {dict(space.architecture(genes).axes).get("kernel") for genes in space.enumerate()}
    assert index_sets == {Centre(size=3), Centre(size=5), None}
    # The kernel of a dropped block has no effect: three submodels have the block, one does not.
    assert len(list(space.enumerate())) == 4
    assert all(gene.name != "kernel" for gene in search_space(network, (1,)).genes)


def test_a_uniform_space_of_many_sections_stays_small() -> None:
    config = Mlp(input_shape=(3,), class_count=2, widths=(4,) * 10, depths=(5,) * 9 + (3,))
    space = uniform_space(network_of(config), (0.5, 1))
    # Ten sections of up to five blocks have millions of depths; five fractions of all of them remain.
    assert len(space) == 5
    names = [architecture.name.partition(" d")[2] for architecture in space]
    assert names[0] == "-".join("1" * 10)
    assert names[-1] == "-".join("5555555553")
