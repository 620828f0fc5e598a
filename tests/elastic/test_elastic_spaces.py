import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from elastic.elastic_cases import CONFIGS, LAYERED, RESNET

from subfleet.elastic.building import network_of
from subfleet.elastic.network import Family
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Prefix
from subfleet.testing.submodels import find_held_elements

RATES = (0.25, 0.5, 0.75, 1)


@pytest.mark.parametrize("config", [*CONFIGS, *LAYERED.values()])
def test_a_space_goes_from_small_to_full_without_repeating_itself(config: Family) -> None:
    network = network_of(config)
    space = uniform_space(network, RATES)
    counts = [network.parameter_count(architecture) for architecture in space]
    assert counts == sorted(counts)
    assert (
        len({architecture.architecture_id for architecture in space})
        == len({architecture.name for architecture in space})
        == len(space)
    )
    assert space[-1].architecture_id == network.full_architecture().architecture_id
    assert uniform_space(network, tuple(reversed(RATES))) == space


def test_every_width_comes_with_every_depth() -> None:
    network = network_of(dataclasses.replace(RESNET, widths=(16, 32)))
    names = {architecture.name for architecture in uniform_space(network, RATES)}
    assert names == {
        f"w{rate} d{first}-{second}"
        for rate, first, second in itertools.product(("1/4", "1/2", "3/4", "1"), (1, 2), (1, 2, 3))
    }


def test_depth_keeps_the_first_blocks_of_a_section() -> None:
    space = {architecture.name: architecture for architecture in uniform_space(network_of(RESNET), (1,))}
    assert space["w1 d2-2"].blocks == ("section0.block1", "section1.block1")
    assert space["w1 d1-3"].blocks == ("section1.block1", "section1.block2")


@pytest.mark.parametrize(
    ("rate", "sizes"), [(0.1, (4, 4)), (0.5, (4, 8)), (0.51, (8, 8)), (2 / 3, (8, 8)), (0.67, (8, 12)), (1, (8, 12))]
)
def test_widths_round_up_to_whole_groups(rate: float, sizes: tuple[int, int]) -> None:
    network = network_of(RESNET)
    shapes = network.shapes(uniform_space(network, (rate,))[-1])
    assert (shapes["stem.weight"][0], shapes["norm.weight"][0]) == sizes
    assert shapes["section1.block1.layer1.weight"][:2] == (sizes[1], sizes[1])


def test_a_tenth_is_a_tenth() -> None:
    # As a float, 0.1 * 30 is a little more than 3.
    network = network_of(dataclasses.replace(RESNET, widths=(30,), depths=(1,), group_size=1))
    assert dict(uniform_space(network, (0.1,))[0].axes)["section0.stream"] == Prefix(size=3)


def test_rates_that_round_alike_are_one_submodel() -> None:
    network = network_of(dataclasses.replace(RESNET, depths=(1, 1)))
    assert [architecture.name for architecture in uniform_space(network, (0.1, 0.2, 0.3, 1))] == [
        "w3/10 d1-1",
        "w1 d1-1",
    ]


def test_narrower_submodels_lie_within_wider_ones() -> None:
    network = network_of(dataclasses.replace(RESNET, widths=(16, 32)))
    held = {
        architecture.name: find_held_elements(network, architecture) for architecture in uniform_space(network, RATES)
    }
    for small, large in itertools.pairwise(("w1/4 d1-1", "w1/4 d1-2", "w1/2 d2-2", "w3/4 d2-2", "w1 d2-3")):
        assert all(bool((held[large][name] | ~held[small][name]).all()) for name in network.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(), (0.0,), (0.5, 1.01), (-1.0,), (float("nan"),)])
def test_rates_out_of_range_are_refused(rates: Sequence[float]) -> None:
    with pytest.raises(ConfigError, match=r"from 0\.001 to 1"):
        uniform_space(network_of(RESNET), rates)
