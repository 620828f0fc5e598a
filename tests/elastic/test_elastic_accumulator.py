import math
import random

import pytest
import torch
from elastic.elastic_cases import (
    MLP,
    RESNET,
    UNGROUPED_RESNET,
    architectures,
    networks_and_architectures,
    random_change,
    random_state,
    relaxed,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.network import Family, Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.testing.submodels import find_held_elements, have_same_bits

pytestmark = pytest.mark.slow

Update = tuple[Architecture, dict[str, Tensor], float]


def aggregate(
    network: Network, state: dict[str, Tensor], updates: list[Update], total: float | None = None
) -> Accumulator:
    total_weight = sum(weight for _, _, weight in updates) if total is None else total
    accumulator = Accumulator(network, state, total_weight=total_weight)
    for architecture, change, weight in updates:
        accumulator.add(architecture, change, weight)
    return accumulator


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Network, list[tuple[Architecture, float]]]:
    """A network, and submodels and weights of up to four clients."""
    configs: list[Family] = [RESNET, UNGROUPED_RESNET, MLP]
    network = network_of(draw(st.sampled_from(configs)))
    return network, draw(st.lists(st.tuples(architectures(network), st.floats(0.01, 1000)), min_size=1, max_size=4))


def draw_updates(network: Network, clients: list[tuple[Architecture, float]]) -> list[Update]:
    return [
        (architecture, random_change(network, architecture, seed, scale=0.1), weight)
        for seed, (architecture, weight) in enumerate(clients)
    ]


def spread_updates(network: Network) -> list[Update]:
    """Submodels of all sizes and changes from 1e-8 to 1e4; the large ones cancel out.

    Their sum is small, so that even the rounding of float64 sums would show in it.
    """
    generator = torch.Generator().manual_seed(0)
    space = uniform_space(network, (0.25, 0.5, 1))
    updates: list[Update] = []
    for seed, architecture in enumerate((space[0], space[len(space) // 2], space[-1])):
        large, small = (
            random_change(network, architecture, seed),
            random_change(network, architecture, seed + 10, scale=1e-8),
        )
        for name, tensor in large.items():
            large[name] = tensor.sign() * 10 ** (torch.rand(tensor.shape, generator=generator) * 12 - 8)
        weight = 0.1 + seed / 3
        opposite = {name: -tensor for name, tensor in large.items()}
        updates += [(architecture, large, weight), (architecture, opposite, weight), (architecture, small, weight)]
    return updates


@relaxed
@given(case=rounds())
def test_elements_move_by_the_weighted_mean_of_those_who_hold_them_and_no_other_moves(
    case: tuple[Network, list[tuple[Architecture, float]]],
) -> None:
    network, clients = case
    state, updates = random_state(network, 100), draw_updates(network, clients)
    before = {name: tensor.clone() for name, tensor in state.items()}
    moved = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
    weights = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
    for architecture, change, weight in updates:
        held, maps = find_held_elements(network, architecture), tensor_maps(network, architecture)
        for name, tensor in change.items():
            maps[name].scatter(tensor.double() * weight, moved[name])
            weights[name] += held[name] * weight
    new = aggregate(network, state, updates).finish()
    for name, tensor in new.items():
        held_by_any = weights[name] > 0
        expected = (state[name] + moved[name] / weights[name].clamp(min=1e-300)).float()
        torch.testing.assert_close(tensor[held_by_any], expected[held_by_any], atol=1e-6, rtol=1e-6)
        assert torch.equal(tensor[~held_by_any], state[name][~held_by_any])
    assert have_same_bits(before, state)


def test_full_clients_alone_are_federated_averaging() -> None:
    network, state = network_of(RESNET), random_state(network_of(RESNET), 1)
    full = network.full_architecture()
    models = [random_state(network, seed) for seed in (2, 3, 4)]
    weights = (10.0, 1.0, 25.0)
    updates = [
        (full, {name: model[name] - state[name] for name in state}, weight)
        for model, weight in zip(models, weights, strict=True)
    ]
    for name, tensor in aggregate(network, state, updates).finish().items():
        expected = torch.stack(
            [model[name].double() * weight / sum(weights) for model, weight in zip(models, weights, strict=True)]
        ).sum(dim=0)
        torch.testing.assert_close(tensor, expected.float(), atol=1e-6, rtol=1e-6)


def test_one_client_alone_gets_its_own_model() -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    change = random_change(network, network.full_architecture(), 2)
    new = aggregate(network, state, [(network.full_architecture(), change, 17.0)]).finish()
    assert have_same_bits(new, {name: state[name] + change[name] for name in state})


@relaxed
@given(case=networks_and_architectures(), weight=st.floats(1e-3, 1e6))
def test_a_zero_change_moves_no_bit(case: tuple[Network, Architecture], weight: float) -> None:
    network, architecture = case
    state = random_state(network, 4)
    for tensor in state.values():
        tensor.reshape(-1)[0] = -0.0
    zeros = {name: torch.zeros(shape) for name, shape in network.shapes(architecture).items()}
    assert have_same_bits(aggregate(network, state, [(architecture, zeros, weight)] * 3).finish(), state)


def test_a_round_without_clients_moves_no_bit() -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    assert have_same_bits(Accumulator(network, state, total_weight=1).finish(), state)


@pytest.mark.parametrize("config", [RESNET, MLP])
@pytest.mark.slow
def test_every_order_and_every_grouping_gives_the_same_bits(config: Family) -> None:
    network = network_of(config)
    state = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    updates = spread_updates(network)
    total = sum(weight for _, _, weight in updates)
    expected = aggregate(network, state, updates, total).finish()
    order = random.Random(0)
    for _ in range(20):
        order.shuffle(updates)
        cut = order.randrange(len(updates) + 1)
        left, right = (aggregate(network, state, part, total) for part in (updates[:cut], updates[cut:]))
        left.merge(right)
        assert have_same_bits(left.finish(), expected)


def test_float64_sums_of_the_same_updates_do_depend_on_the_order() -> None:
    # Otherwise the test above could not fail.
    # Every client holds at least two columns of the head.
    heads = [change["head.weight"][:, :2].double() * weight for _, change, weight in spread_updates(network_of(MLP))]
    zero, order = torch.zeros(4, 2, dtype=torch.float64), random.Random(0)
    sums = {sum(order.sample(heads, len(heads)), zero).float().numpy().tobytes() for _ in range(100)}
    assert len(sums) > 1


@relaxed
@given(case=rounds())
def test_doubling_every_weight_changes_no_bit(case: tuple[Network, list[tuple[Architecture, float]]]) -> None:
    network, clients = case
    state, updates = random_state(network, 100), draw_updates(network, clients)
    doubled = [(architecture, change, 2 * weight) for architecture, change, weight in updates]
    assert have_same_bits(aggregate(network, state, updates).finish(), aggregate(network, state, doubled).finish())


@relaxed
@given(case=rounds())
def test_weights_cancel_where_all_agree(case: tuple[Network, list[tuple[Architecture, float]]]) -> None:
    network, clients = case
    state, updates = random_state(network, 100), draw_updates(network, clients)
    agreed = [
        (architecture, {name: torch.full_like(tensor, 0.25) for name, tensor in change.items()}, weight)
        for architecture, change, weight in updates
    ]
    for name, tensor in aggregate(network, state, agreed).finish().items():
        held = torch.stack([find_held_elements(network, architecture)[name] for architecture, _, _ in updates]).any(
            dim=0
        )
        torch.testing.assert_close(tensor, torch.where(held, state[name] + 0.25, state[name]), atol=3e-7, rtol=2e-7)


def test_a_weight_of_zero_has_no_effect() -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    full = network.full_architecture()
    change = random_change(network, full, 2)
    assert have_same_bits(aggregate(network, state, [(full, change, 0.0)], 1.0).finish(), state)


def test_tenths_may_fill_a_total_of_one() -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    full = network.full_architecture()
    aggregate(network, state, [(full, random_change(network, full, seed), 0.1) for seed in range(10)], 1.0)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("head.bias", torch.full((4,), math.nan), "change of nan"),
        ("head.bias", torch.tensor([0, 0, math.inf, 0]), "change of inf"),
        ("head.bias", torch.tensor([0, 0, 0, -1e30]), "must be finite and"),
        ("head.bias", torch.zeros(3), r"but must be float \(4,\)"),
        ("head.bias", torch.zeros(4, dtype=torch.int64), "torch.int64"),
        ("head.bias", None, r"lacks the tensors \['head.bias'\]"),
        ("head.gain", torch.zeros(4), r"unknown tensors \['head.gain'\]"),
    ],
)
def test_a_bad_change_is_refused_as_a_whole(name: str, value: Tensor | None, reason: str) -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    full = network.full_architecture()
    good, bad = random_change(network, full, 2), random_change(network, full, 3)
    if value is None:
        del bad[name]
    else:
        bad[name] = value
    accumulator = aggregate(network, state, [(full, good, 1.0)], 3.0)
    before = accumulator.finish()
    with pytest.raises(ProtocolError, match=reason):
        accumulator.add(full, bad, 1.0)
    assert have_same_bits(accumulator.finish(), before)
    accumulator.add(full, good, 2.0)


@pytest.mark.parametrize(
    ("weight", "reason"), [(-1.0, "0 or more"), (math.nan, "finite"), (math.inf, "finite"), (2.5, "add up to 3.5")]
)
def test_a_bad_weight_is_refused(weight: float, reason: str) -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    full = network.full_architecture()
    change = random_change(network, full, 2)
    accumulator = aggregate(network, state, [(full, change, 1.0)], 3.0)
    before = accumulator.finish()
    with pytest.raises(ProtocolError, match=reason):
        accumulator.add(full, change, weight)
    assert have_same_bits(accumulator.finish(), before)


def test_the_largest_changes_that_are_accepted_cannot_overflow() -> None:
    network = network_of(MLP)
    state = {name: torch.ones(decl.shape) for name, decl in network.tensors.items()}
    full = network.full_architecture()
    # frexp(1.0) has the exponent 1, so the limit is 2^21.
    change = {name: torch.full_like(tensor, 2.0**21) for name, tensor in state.items()}
    new = aggregate(network, state, [(full, change, 2.0**63)] * 2, 2.0**64).finish()
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0**21 + 1)) for tensor in new.values())


def test_accumulators_of_different_rounds_do_not_merge() -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    accumulator = Accumulator(network, state, total_weight=2)
    incompatible = (
        Accumulator(network, state, total_weight=3),
        Accumulator(network, random_state(network, 2), total_weight=2),
        Accumulator(network_of(RESNET), random_state(network_of(RESNET), 1), total_weight=2),
    )
    for other in incompatible:
        with pytest.raises(ConfigError, match="accumulators of one round can be merged"):
            accumulator.merge(other)


def test_merging_more_than_the_total_is_refused() -> None:
    network, state = network_of(MLP), random_state(network_of(MLP), 1)
    full = network.full_architecture()
    update = (full, random_change(network, full, 2), 2.0)
    first, second = aggregate(network, state, [update], 3.0), aggregate(network, state, [update], 3.0)
    before = first.finish()
    with pytest.raises(ProtocolError, match="add up to 4"):
        first.merge(second)
    assert have_same_bits(first.finish(), before)


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan, math.inf, 2.0**65])
def test_a_total_weight_out_of_range_is_refused(total: float) -> None:
    network = network_of(MLP)
    with pytest.raises(ConfigError, match="total_weight"):
        Accumulator(network, random_state(network, 1), total_weight=total)


def test_a_model_that_is_not_the_networks_or_not_finite_is_refused() -> None:
    network = network_of(MLP)
    state = random_state(network, 1)
    for name, value, reason in (
        ("head.bias", torch.zeros(5), "head.bias"),
        ("extra", torch.zeros(5), "extra"),
        ("head.bias", torch.full((4,), math.nan), "finite floats"),
        ("head.bias", torch.zeros(4, dtype=torch.int32), "finite floats"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Accumulator(network, {**state, name: value}, total_weight=1)
