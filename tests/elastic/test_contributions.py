"""What a contribution may be placed with, and how many are added together."""

from functools import cache
from itertools import pairwise

import pytest
from elastic.elastic_cases import MLP, random_change, random_state
from hypothesis import given
from hypothesis import strategies as st

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.contributions import BATCH_BYTES, Contribution, split_batches
from subfleet.elastic.maps import Placement, tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture
from subfleet.testing.submodels import have_same_bits


@cache
def network() -> Network:
    return network_of(MLP)


def uncut() -> Architecture:
    return network().full_architecture()


@pytest.mark.parametrize(
    ("local", "name", "reason"),
    [("nothing", "norm.bias", "'nothing'"), ("norm.bias", "nothing", "'nothing'"), ("norm.bias", "norm.bias", "two")],
)
def test_unknown_and_repeated_placements_are_refused(local: str, name: str, reason: str) -> None:
    maps = tensor_maps(network(), uncut())
    placements = [
        Placement(local=tensor_name, name=tensor_name, map=tensor_map) for tensor_name, tensor_map in maps.items()
    ]
    placements.append(Placement(local=local, name=name, map=maps["norm.bias"]))
    accumulator = Accumulator(network(), random_state(network(), 0), total_weight=1)
    with pytest.raises(ConfigError, match=reason):
        accumulator.add(
            uncut(),
            random_change(network(), uncut(), 1),
            1.0,
            placements=placements,
        )
    assert have_same_bits(accumulator.finish(), random_state(network(), 0))


def test_a_placement_of_another_shape_is_refused() -> None:
    maps = tensor_maps(network(), uncut())
    accumulator = Accumulator(network(), random_state(network(), 0), total_weight=1)
    placements = [Placement(local="norm.bias", name="head.weight", map=maps["head.weight"])]
    with pytest.raises(ConfigError, match=r"'head\.weight'.*'norm\.bias'"):
        accumulator.add(uncut(), random_change(network(), uncut(), 1), 1.0, placements=placements)


def test_an_update_that_is_placed_with_more_than_it_sends_is_refused() -> None:
    accumulator = Accumulator(network(), random_state(network(), 0), total_weight=1)
    change = {"norm.bias": random_change(network(), uncut(), 1)["norm.bias"]}
    with pytest.raises(ConfigError, match="does not send"):
        accumulator.add_many([Contribution(architecture=uncut(), change=change, weight=1.0, sent=("norm.bias",))])


@given(st.lists(st.integers(1, 3 * BATCH_BYTES)))
def test_batches_hold_all_updates_in_order_and_little_memory(counts: list[int]) -> None:
    batches = [counts[batch] for batch in split_batches(counts)]
    assert [count for batch in batches for count in batch] == counts
    assert all(len(batch) <= 4 or 4 * sum(batch) <= BATCH_BYTES for batch in batches)
    for batch, following in pairwise(batches):
        assert len(batch) >= 4
        assert 4 * (sum(batch) + following[0]) > BATCH_BYTES
