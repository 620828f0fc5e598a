"""Weights, factors and placements of contributions, on every device; sums are in `test_elastic_accumulator`."""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from elastic.elastic_cases import MLP, RESNET, random_change, random_state, to_device
from torch import Tensor

from subfleet.elastic import compiled_loops, exact_sums, sum_layout
from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.contributions import Contribution
from subfleet.elastic.grid import WeightGrid
from subfleet.elastic.maps import Placement, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.submodel import Architecture, Explicit, Roll
from subfleet.testing.submodels import find_held_elements, have_same_bits


@cache
def network() -> Network:
    return network_of(MLP)


def uncut() -> Architecture:
    return network().full_architecture()


def make_contributions(network: Network, architectures: Sequence[Architecture]) -> list[Contribution]:
    """Changes from 1e-8 to 1e4; the large ones cancel out, so that the rounding of float64 sums would show."""
    generator = torch.Generator().manual_seed(0)
    contributions = []
    for seed, architecture in enumerate(architectures):
        large = random_change(network, architecture, seed)
        large = {
            name: tensor.sign() * 10 ** (torch.rand(tensor.shape, generator=generator) * 12 - 8)
            for name, tensor in large.items()
        }
        opposite = {name: -tensor for name, tensor in large.items()}
        small = random_change(network, architecture, seed + 50, scale=1e-8)
        contributions += [
            Contribution(architecture=architecture, change=change, weight=0.1 + seed / 3)
            for change in (large, opposite, small)
        ]
    return contributions


def cut_architectures() -> list[Architecture]:
    """Prefixes, a roll over the end, and explicit indices."""
    space = uniform_space(network(), (0.25, 0.5, 1))
    axis = next(axis for axis in network().axes.values() if axis.kind == "channel" and axis.size == 8)
    rolled = Architecture(axes=((axis.name, Roll(start=6, size=4)),), blocks=uncut().blocks)
    listed = Architecture(axes=((axis.name, Explicit(indices=(4, 5, 0, 1))),), blocks=uncut().blocks)
    return [space[0], space[-1], rolled, listed]


@pytest.mark.slow
def test_every_order_batch_and_grouping_gives_the_same_bits(device: torch.device) -> None:
    contributions = make_contributions(network(), cut_architectures())
    total = sum(contribution.weight for contribution in contributions)
    names = ("section0.block0.layer1.weight", "section2.block1.norm2.bias", "norm.weight", "head.weight")
    state = {name: torch.zeros(network().tensors[name].shape) for name in names}
    on_cpu = Accumulator(network(), state, total_weight=total)
    on_cpu.add_many(contributions)
    expected = on_cpu.finish()
    order = random.Random(0)
    for _ in range(100):
        order.shuffle(contributions)
        cut, end = sorted(order.randrange(len(contributions) + 1) for _ in range(2))
        left, right = (Accumulator(network(), to_device(device, state), total_weight=total) for _ in range(2))
        left.add_many(contributions[:cut])
        for contribution in contributions[cut:end]:
            right.add(contribution.architecture, contribution.change, contribution.weight)
        right.add_many(contributions[end:])
        left.merge(right)
        assert have_same_bits(to_device(torch.device("cpu"), left.finish()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cut", [True, False])
def test_chunks_kernels_and_threads_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, threads: int, cut: bool
) -> None:
    contributions = make_contributions(network(), [uncut(), *(cut_architectures() if cut else []), uncut()])
    state = random_state(network(), 1)

    def aggregate() -> dict[str, Tensor]:
        accumulator = Accumulator(network(), state, total_weight=30)
        accumulator.add_many(contributions)
        return accumulator.finish()

    expected = aggregate()
    for module, name in (
        (exact_sums, "CPU_CHUNK"),
        (exact_sums, "COMPILED_MOVE_CHUNK"),
        (sum_layout, "ADD_CHUNK"),
        (sum_layout, "LONGEST_ROW"),
    ):
        monkeypatch.setattr(module, name, 7)
    monkeypatch.setattr(compiled_loops, "WORTH_COMPILING", 0)
    if not compiled:
        monkeypatch.setattr(compiled_loops, "compile_loops", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert have_same_bits(aggregate(), expected)


def draw_architecture(network: Network, seed: int) -> Architecture:
    """Indices of its own of every axis, in any order."""
    drawn = random.Random(seed)
    axes = []
    for name, axis in sorted(network.axes.items()):
        groups = drawn.sample(range(axis.size // axis.granularity), drawn.randint(1, axis.size // axis.granularity))
        indices = tuple(group * axis.granularity + own for group in groups for own in range(axis.granularity))
        if axis.kind == "channel":
            axes.append((name, Explicit(indices=indices)))
    return Architecture(axes=tuple(axes), blocks=tuple(block.name for block in network.blocks if drawn.random() < 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_every_client_may_hold_other_elements(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Against sums of the same integers, element by element; regions are more than are counted together."""
    monkeypatch.setattr(compiled_loops, "WORTH_COMPILING", 0)
    if not compiled:
        monkeypatch.setattr(compiled_loops, "compile_loops", lambda: None)
    network = network_of(RESNET)
    architectures = [network.full_architecture(), *(draw_architecture(network, seed) for seed in range(24))]
    changes = [random_change(network, architecture, seed) for seed, architecture in enumerate(architectures)]
    state = random_state(network, 1)
    accumulator, halves = Accumulator(network, state, total_weight=25), Accumulator(network, state, total_weight=25)
    accumulator.add_many(
        [
            Contribution(architecture=architecture, change=change, weight=1.0)
            for architecture, change in zip(architectures, changes, strict=True)
        ]
    )
    other = Accumulator(network, state, total_weight=25)
    for index, (architecture, change) in enumerate(zip(architectures, changes, strict=True)):
        (halves if index % 2 else other).add(architecture, change, 1.0)
    halves.merge(other)
    new = accumulator.finish()
    assert have_same_bits(halves.finish(), new)
    for name, old in state.items():
        total, held = torch.zeros(old.shape, dtype=torch.float64), torch.zeros(old.shape, dtype=torch.int64)
        for architecture, change in zip(architectures, changes, strict=True):
            if name in change:
                tensor_map = tensor_maps(network, architecture)[name]
                tensor_map.scatter(change[name].double(), total)
                tensor_map.scatter(torch.ones_like(change[name], dtype=torch.int64), held)
        expected = torch.where(held > 0, old.double() + total / held.clamp(min=1), old.double())
        torch.testing.assert_close(new[name].double(), expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(accumulator.find_held()[name], held > 0)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
def test_a_refused_batch_adds_nothing(monkeypatch: pytest.MonkeyPatch, compiled: bool, bad: float) -> None:
    monkeypatch.setattr(exact_sums, "CPU_CHUNK", 7)
    monkeypatch.setattr(sum_layout, "ADD_CHUNK", 7)
    if compiled:
        monkeypatch.setattr(compiled_loops, "WORTH_COMPILING", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    state, good = random_state(network(), 1), make_contributions(network(), cut_architectures())
    accumulator = Accumulator(network(), state, total_weight=100)
    accumulator.add_many(good)
    before, held = accumulator.finish(), accumulator.find_held()
    for name in ("section0.block0.layer1.weight", "head.bias"):
        damaged = random_change(network(), uncut(), 3)
        damaged[name].view(-1)[-1] = bad
        with pytest.raises(ProtocolError, match=name):
            accumulator.add_many([*good, Contribution(architecture=uncut(), change=damaged, weight=1.0), *good])
        assert have_same_bits(accumulator.finish(), before)
        assert all(torch.equal(accumulator.find_held()[other], held[other]) for other in held)
    # The weight was not counted either.
    accumulator.add(
        uncut(),
        random_change(network(), uncut(), 4),
        100 - 1e-3 - sum(contribution.weight for contribution in good),
    )


def test_elements_move_only_where_enough_clients_hold_them(device: torch.device) -> None:
    architectures = [uncut(), *cut_architectures()]
    state = random_state(network(), 0)
    accumulator = Accumulator(network(), to_device(device, state), total_weight=10, min_contributors=3)
    counts = {name: torch.zeros(decl.shape, dtype=torch.int64) for name, decl in network().tensors.items()}
    for seed, architecture in enumerate(architectures):
        accumulator.add(architecture, random_change(network(), architecture, seed), 1.0)
        for name, held in find_held_elements(network(), architecture).items():
            counts[name] += held
    # A client without weight does not count.
    accumulator.add(uncut(), random_change(network(), uncut(), 9), 0.0)
    new, held_now = to_device(torch.device("cpu"), accumulator.finish()), accumulator.find_held()
    stayed = 0
    for name, count in counts.items():
        assert torch.equal(held_now[name].cpu(), count >= 3)
        assert torch.equal(new[name].view(torch.int32)[count < 3], state[name].view(torch.int32)[count < 3])
        assert bool((new[name] != state[name])[count >= 3].all())
        stayed += int((count < 3).sum())
    assert stayed


@pytest.mark.slow
def test_factors_weigh_tensors_and_their_rows(device: torch.device) -> None:
    state = random_state(network(), 0)
    accumulator = Accumulator(network(), to_device(device, state), total_weight=12, min_contributors=2)
    rows = [torch.tensor([[1.0], [0.0], [0.5], [0.0]]), torch.tensor([[1.0], [1.0], [0.25], [0.0]])]
    changes, weights = [random_change(network(), uncut(), seed) for seed in (1, 2)], (2.0, 8.0)
    for change, weight, factor in zip(changes, weights, rows, strict=True):
        accumulator.add(
            uncut(),
            change,
            weight,
            factors={"head.weight": factor.to(device), "head.bias": factor[:, 0], "norm.bias": 0.25, "norm.weight": 0},
        )
    new = to_device(torch.device("cpu"), accumulator.finish())
    shares = np.stack([factor.numpy() * weight for factor, weight in zip(rows, weights, strict=True)])
    both = np.all(shares > 0, axis=0).reshape(-1)
    assert torch.equal(accumulator.find_held()["head.bias"].cpu(), torch.from_numpy(both))
    moved = np.stack([change["head.weight"].double().numpy() for change in changes])
    expected = state["head.weight"].numpy() + (moved * shares).sum(axis=0) / np.maximum(shares.sum(axis=0), 1e-9)
    np.testing.assert_allclose(new["head.weight"].numpy()[both], expected[both], rtol=1e-6, atol=1e-6)
    for name, unchanged in (("head.weight", ~torch.from_numpy(both)), ("norm.weight", torch.ones(6, dtype=torch.bool))):
        assert torch.equal(new[name].view(torch.int32)[unchanged], state[name].view(torch.int32)[unchanged])
    mean = (changes[0]["norm.bias"] * 2 + changes[1]["norm.bias"] * 8) / 10
    torch.testing.assert_close(new["norm.bias"], state["norm.bias"] + mean, atol=1e-6, rtol=1e-6)


def test_one_local_tensor_is_added_at_several_places(device: torch.device) -> None:
    """FedFA grafts the last block of a shallow client onto the blocks that it lacks."""
    state = random_state(network(), 0)
    shallow = Architecture(blocks=())
    maps = tensor_maps(network(), uncut())
    own = [Placement(local=name, name=name, map=maps[name]) for name in network().shapes(shallow)]
    grafted = Placement(
        local="section2.block0.norm1.weight", name="section2.block1.norm1.weight", map=maps["norm.weight"]
    )
    change = random_change(network(), shallow, 1)
    accumulator = Accumulator(network(), to_device(device, state), total_weight=1)
    accumulator.add(shallow, change, 1.0, placements=[*own, grafted])
    new = to_device(torch.device("cpu"), accumulator.finish())
    for name in (grafted.local, grafted.name):
        assert torch.equal(new[name], state[name] + change[grafted.local])
    assert not accumulator.find_held()["section2.block1.norm2.weight"].any()


@pytest.mark.parametrize(
    "factor", [-0.5, 1.5, float("nan"), torch.tensor([0.5, 2.0, 0.5, 0.5]), torch.tensor([0.5, 0.5, 0.5])]
)
def test_factors_out_of_range_or_shape_are_refused(factor: float | Tensor) -> None:
    state = random_state(network(), 0)
    accumulator = Accumulator(network(), state, total_weight=1)
    with pytest.raises(ProtocolError, match=r"head\.bias"):
        accumulator.add(
            uncut(),
            random_change(network(), uncut(), 1),
            1.0,
            factors={"head.bias": factor},
        )
    assert have_same_bits(accumulator.finish(), state)


def test_some_tensors_alone_are_aggregated(device: torch.device) -> None:
    state, change = random_state(network(), 0), random_change(network(), uncut(), 1)
    whole = Accumulator(network(), to_device(device, state), total_weight=1)
    part = Accumulator(network(), to_device(device, {"head.bias": state["head.bias"]}), total_weight=1)
    for accumulator in (whole, part):
        accumulator.add(uncut(), change, 1.0)
    assert part.finish().keys() == {"head.bias"}
    assert torch.equal(part.finish()["head.bias"], whole.finish()["head.bias"])


@pytest.mark.slow
def test_a_tensor_that_few_hold_is_not_pulled_towards_its_old_value() -> None:
    # A denominator of at least 1 would pull it.
    state = random_state(network(), 0)
    change = random_change(network(), uncut(), 1)
    accumulator = Accumulator(network(), state, total_weight=100)
    accumulator.add(uncut(), change, 0.01)
    for name, tensor in accumulator.finish().items():
        torch.testing.assert_close(tensor, state[name] + change[name], atol=1e-6, rtol=1e-6)


def test_numbers_of_samples_are_weights_without_an_error() -> None:
    grid = WeightGrid(2.0**29 - 1)
    unit = grid.units(1.0)
    for count in (3, 1000, 12345, 2**29 - 1):
        assert grid.units(float(count)) == count * unit
    halves = grid.element_units(7.0, torch.tensor([[1.0], [0.5], [0.0]]))
    assert halves.flatten().tolist() == [7 * unit, 7 * unit // 2, 0]


def test_units_of_factors_are_those_of_the_product() -> None:
    grid = WeightGrid(10.0)
    factors = torch.rand(200, generator=torch.Generator().manual_seed(0)).double() ** 20
    assert grid.element_units(3.3, factors).tolist() == [grid.units(3.3 * factor) for factor in factors.tolist()]


def test_networks_with_convolutions_are_aggregated_alike_on_every_device(device: torch.device) -> None:
    network = network_of(RESNET)
    contributions = make_contributions(network, uniform_space(network, (0.5, 1))[:3])
    state = random_state(network, 0)
    results = []
    for target in (torch.device("cpu"), device):
        accumulator = Accumulator(network, to_device(target, state), total_weight=10)
        accumulator.add_many(contributions)
        results.append(to_device(torch.device("cpu"), accumulator.finish()))
    assert have_same_bits(*results)


def test_changes_in_double_precision_are_not_written_to_and_are_undone() -> None:
    state, change = random_state(network(), 0), random_change(network(), uncut(), 1)
    double = {name: tensor.double() for name, tensor in change.items()}
    wrong = {
        name: torch.full_like(tensor, torch.nan) if name == "head.bias" else tensor for name, tensor in double.items()
    }
    accumulator, plain = (Accumulator(network(), state, total_weight=2) for _ in range(2))
    with pytest.raises(ProtocolError, match=r"head\.bias"):
        accumulator.add(uncut(), wrong, 1.0)
    assert have_same_bits(accumulator.finish(), state)
    for own, added in ((accumulator, double), (plain, change)):
        own.add(uncut(), added, 1.0)
    assert have_same_bits(accumulator.finish(), plain.finish())
    assert all(torch.equal(double[name], tensor.double()) for name, tensor in change.items())


@pytest.mark.parametrize("compiled", [True, False])
def test_states_in_another_order_are_merged(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled:
        monkeypatch.setattr(compiled_loops, "WORTH_COMPILING", 0)
    state, change = random_state(network(), 0), random_change(network(), uncut(), 1)
    whole, first = Accumulator(network(), state, total_weight=1), Accumulator(network(), state, total_weight=1)
    second = Accumulator(network(), dict(reversed(state.items())), total_weight=1)
    for accumulator in (whole, second):
        accumulator.add_many([])
        accumulator.add(uncut(), change, 1.0)
        accumulator.add_many([])
    first.merge(second)
    assert have_same_bits(first.finish(), whole.finish())


def test_fewer_than_one_contributor_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_contributors"):
        Accumulator(network(), random_state(network(), 0), total_weight=1, min_contributors=0)
