from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from elastic.elastic_cases import MLP, random_change, random_state, relaxed
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.robust_aggregation import (
    ROBUST_AGGREGATIONS,
    AnyRobustAggregation,
    CoordinateMedian,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from subfleet.elastic.robust_rules import ReadChanges, Stack, StackMember, aggregate_robustly, choose_by_krum
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.schema import from_plain
from subfleet.protocol.submodel import Architecture
from subfleet.testing.submodels import find_held_elements, have_same_bits

Change = dict[str, Tensor]
ROBUST: list[AnyRobustAggregation] = [CoordinateMedian(), TrimmedMean(fraction=0.2), MultiKrum()]
EVERY: list[AnyRobustAggregation] = [*ROBUST, NormClipping(max_norm=1e9)]


@cache
def mlp() -> Network:
    return network_of(MLP)


def read_from(changes: Sequence[Change]) -> ReadChanges:
    return lambda name: [change.get(name) for change in changes]


def stack(state: Change, members: Sequence[StackMember], read: ReadChanges) -> Stack:
    return Stack(network=mlp(), state=state, members=members, read=read)


def aggregate(
    aggregation: AnyRobustAggregation, state: Change, architectures: Sequence[Architecture], changes: Sequence[Change]
) -> Change:
    members = [
        StackMember(architecture=architecture, weight=1.0 + index) for index, architecture in enumerate(architectures)
    ]
    return aggregate_robustly(aggregation, stack(state, members, read_from(changes)))


def mixed_architectures(network: Network) -> list[Architecture]:
    space = uniform_space(network, (0.5, 1))
    return [space[0], space[-1], space[-1], space[len(space) // 2], space[-1], space[0]]


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", EVERY, ids=lambda aggregation: aggregation.TYPE)
def test_identical_updates_give_that_update(aggregation: AnyRobustAggregation, device: torch.device) -> None:
    state = {name: tensor.to(device) for name, tensor in random_state(mlp(), 0).items()}
    change = {name: tensor.to(device) for name, tensor in random_change(mlp(), mlp().full_architecture(), 1).items()}
    new = aggregate(aggregation, state, [mlp().full_architecture()] * 5, [change] * 5)
    for name, tensor in new.items():
        torch.testing.assert_close(tensor, state[name] + change[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ROBUST, ids=lambda aggregation: aggregation.TYPE)
def test_an_outlier_moves_nothing_beyond_the_honest_range(aggregation: AnyRobustAggregation) -> None:
    state = {name: torch.zeros(decl.shape) for name, decl in mlp().tensors.items()}
    honest = [random_change(mlp(), mlp().full_architecture(), seed) for seed in range(6)]
    outlier = {name: tensor * 1e6 for name, tensor in random_change(mlp(), mlp().full_architecture(), 9).items()}
    new = aggregate(aggregation, state, [mlp().full_architecture()] * 7, [*honest[:3], outlier, *honest[3:]])
    for name, tensor in new.items():
        stacked = torch.stack([change[name] for change in honest])
        assert bool((tensor >= stacked.amin(dim=0)).all())
        assert bool((tensor <= stacked.amax(dim=0)).all())
    # With the plain mean it does.
    mean = aggregate(
        NormClipping(max_norm=1e12), state, [mlp().full_architecture()] * 7, [*honest[:3], outlier, *honest[3:]]
    )
    assert mean["head.weight"].abs().max() > 1000


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_medians_and_trimmed_means_agree_with_numpy(count: int) -> None:
    state = {name: torch.zeros(decl.shape) for name, decl in mlp().tensors.items()}
    changes = [random_change(mlp(), mlp().full_architecture(), seed) for seed in range(count)]
    medians = aggregate(CoordinateMedian(), state, [mlp().full_architecture()] * count, changes)
    # Exactly one of three, four and five values, and two of eight, are cut at either end.
    trimmed = aggregate(TrimmedMean(fraction=0.2), state, [mlp().full_architecture()] * count, changes)
    cut = {3: 1, 4: 1, 5: 1, 8: 2}[count]
    for name in state:
        stacked = np.stack([change[name].double().numpy() for change in changes])
        np.testing.assert_allclose(medians[name].numpy(), np.median(stacked, axis=0), rtol=1e-6, atol=1e-7)
        oracle = np.sort(stacked, axis=0)[cut : count - cut].mean(axis=0)
        np.testing.assert_allclose(trimmed[name].numpy(), oracle, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("otherwise", ["mean", "stay"])
def test_elements_are_merged_over_their_holders_and_the_others_take_the_mean_or_stay(otherwise: str) -> None:
    architectures = mixed_architectures(mlp())
    state = random_state(mlp(), 0)
    changes = [random_change(mlp(), architecture, seed) for seed, architecture in enumerate(architectures)]
    aggregation = from_plain(CoordinateMedian, {"least_clients": 4, "otherwise": otherwise})
    new = aggregate(aggregation, state, architectures, changes)
    held = [find_held_elements(mlp(), architecture) for architecture in architectures]
    few = 0
    for name, old in state.items():
        full = [torch.zeros_like(old, dtype=torch.float64) for _ in architectures]
        for target, architecture, change in zip(full, architectures, changes, strict=True):
            if name in change:
                tensor_maps(mlp(), architecture)[name].scatter(change[name].double(), target)
        for index in np.ndindex(*old.shape):
            holders = [client for client in range(len(architectures)) if held[client][name][index]]
            values = [full[client][index].item() for client in holders]
            weights = [1.0 + client for client in holders]
            if len(holders) >= 4:
                expected = old[index].item() + float(np.median(values))
            elif otherwise == "stay" or not holders:
                few += 1
                assert new[name][index].item() == old[index].item()
                continue
            else:
                expected = old[index].item() + float(np.average(values, weights=weights))
            assert new[name][index].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert few or otherwise == "mean"


@pytest.mark.parametrize("aggregation", EVERY, ids=lambda aggregation: aggregation.TYPE)
def test_what_nobody_holds_and_what_does_not_change_keeps_its_bits(aggregation: AnyRobustAggregation) -> None:
    narrow = uniform_space(mlp(), (0.5,))[0]
    state = random_state(mlp(), 0)
    for tensor in state.values():
        tensor.view(-1)[0] = -0.0
    before = {name: tensor.clone() for name, tensor in state.items()}
    zeros = {name: torch.zeros(shape) for name, shape in mlp().shapes(narrow).items()}
    assert have_same_bits(aggregate(aggregation, state, [narrow] * 4, [zeros] * 4), state)
    new = aggregate(aggregation, state, [narrow] * 4, [random_change(mlp(), narrow, seed) for seed in range(4)])
    for name, held in find_held_elements(mlp(), narrow).items():
        assert torch.equal(new[name].view(torch.int32)[~held], state[name].view(torch.int32)[~held])
    assert have_same_bits(state, before)


@pytest.mark.parametrize(
    "aggregation", [CoordinateMedian(), TrimmedMean(), NormClipping(max_norm=1e9)], ids=lambda m: m.TYPE
)
def test_the_order_of_clients_changes_no_bit(aggregation: AnyRobustAggregation) -> None:
    state = {"head.weight": torch.zeros(mlp().tensors["head.weight"].shape)}
    changes: list[Change] = []
    for seed in range(3):
        # Large changes cancel out, so that the rounding of float64 sums shows in the rest.
        large, small = (
            random_change(mlp(), mlp().full_architecture(), seed, scale=1e4),
            random_change(mlp(), mlp().full_architecture(), seed + 9, scale=1e-8),
        )
        changes += [large, {name: -tensor for name, tensor in large.items()}, small]
    members = [StackMember(architecture=mlp().full_architecture(), weight=0.1)] * len(changes)
    expected = aggregate_robustly(aggregation, stack(state, members, read_from(changes)))
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(changes))
        shuffled = stack(state, members, read_from([changes[index] for index in order]))
        assert have_same_bits(aggregate_robustly(aggregation, shuffled), expected)


@pytest.mark.slow
def test_krum_chooses_as_brute_force_does() -> None:
    state = random_state(mlp(), 0)
    architectures = mixed_architectures(mlp())
    members = [StackMember(architecture=architecture, weight=1.0) for architecture in architectures]
    common = {
        name: torch.stack([find_held_elements(mlp(), architecture)[name] for architecture in architectures]).all(dim=0)
        for name in mlp().tensors
    }
    for seed in range(5):
        changes = [
            random_change(mlp(), architecture, 10 * seed + index) for index, architecture in enumerate(architectures)
        ]
        changes[seed] = {name: tensor * 3 for name, tensor in changes[seed].items()}
        # Elements that not all clients hold do not count for distances.
        maps = tensor_maps(mlp(), architectures[1])
        for name, client_tensor in changes[1].items():
            changes[1][name] = torch.where(maps[name].extract(common[name]), client_tensor, 100 * client_tensor)
        vectors = []
        for architecture, change in zip(architectures, changes, strict=True):
            values = []
            for name, tensor_map in tensor_maps(mlp(), architecture).items():
                full = torch.zeros(mlp().tensors[name].shape)
                tensor_map.scatter(change[name], full)
                values.append(full[common[name]])
            vectors.append(torch.cat(values).double().numpy())
        scores = []
        for vector in vectors:
            distances = sorted(float(np.sum((vector - other) ** 2)) for other in vectors if other is not vector)
            scores.append(sum(distances[: len(architectures) - 1 - 2]))
        best = sorted(sorted(range(len(architectures)), key=lambda index: scores[index])[: len(architectures) - 1])
        aggregation = MultiKrum(malicious_count=1)
        assert choose_by_krum(aggregation, stack(state, members, read_from(changes))) == best
        assert seed not in best
        new = aggregate_robustly(aggregation, stack(state, members, read_from(changes)))
        accumulator = Accumulator(mlp(), state, total_weight=len(best))
        for index in best:
            accumulator.add(architectures[index], changes[index], 1.0)
        for name, tensor in accumulator.finish().items():
            torch.testing.assert_close(new[name], tensor, atol=1e-6, rtol=1e-6)


def krum_by_definition(vectors: Sequence[Sequence[int]], malicious: int) -> tuple[list[int], list[int]]:
    """Scores and choice as in the paper, in integers: the n - f - 2 closest, squared; the n - f lowest scores."""
    count = len(vectors)
    scores = []
    for index, vector in enumerate(vectors):
        neighbours = [neighbour for position, neighbour in enumerate(vectors) if position != index]
        squares = sorted(
            sum((left - right) ** 2 for left, right in zip(vector, neighbour, strict=True)) for neighbour in neighbours
        )
        scores.append(sum(squares[: count - malicious - 2]))
    return scores, sorted(sorted(range(count), key=scores.__getitem__)[: count - malicious])


def krum_by_product(vectors: Sequence[Sequence[int]], malicious: int) -> list[int]:
    """The clients that Krum chooses, given their changes of the biases of the head."""
    changes = [{"head.bias": torch.tensor(vector, dtype=torch.float32)} for vector in vectors]
    members = [StackMember(architecture=mlp().full_architecture(), weight=1.0)] * len(vectors)
    state = {"head.bias": torch.zeros(len(vectors[0]))}
    return choose_by_krum(MultiKrum(malicious_count=malicious), stack(state, members, read_from(changes)))


def test_krum_by_hand() -> None:
    """Seven clients on a line, at most two of them malicious: three neighbours count, and five clients are averaged.

    The scores are 29, 9, 11, 14, 22, 30, 46. With four neighbours or without squares, the second to the sixth would be
    chosen, and with two neighbours yet others.
    """
    line = [2, 4, 5, 6, 9, 11, 12]
    vectors = [[value, 0, 0, 0] for value in line]
    assert krum_by_definition(vectors, 2)[0] == [29, 9, 11, 14, 22, 30, 46]
    assert krum_by_product(vectors, 2) == [0, 1, 2, 3, 4]


@pytest.mark.slow
@relaxed
@given(
    vectors=st.lists(st.lists(st.integers(-20, 20), min_size=4, max_size=4), min_size=5, max_size=9),
    data=st.data(),
)
def test_krum_chooses_what_the_paper_does(vectors: list[list[int]], data: st.DataObject) -> None:
    malicious = data.draw(st.integers(1, (len(vectors) - 3) // 2))
    scores, best = krum_by_definition(vectors, malicious)
    # Distances are roots that are squared again, so rounding decides between equal scores.
    assume(
        max(scores[index] for index in best) < min(scores[index] for index in range(len(vectors)) if index not in best)
    )
    assert krum_by_product(vectors, malicious) == best


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_krum_with_few_clients_averages_them_all(count: int) -> None:
    state = random_state(mlp(), 0)
    members = [StackMember(architecture=mlp().full_architecture(), weight=1.0)] * count
    changes = [random_change(mlp(), mlp().full_architecture(), seed) for seed in range(count)]
    assert choose_by_krum(MultiKrum(malicious_count=3), stack(state, members, read_from(changes))) == list(range(count))


def test_clipping_scales_long_updates_down_and_no_other() -> None:
    long, short = (
        random_change(mlp(), mlp().full_architecture(), 0),
        random_change(mlp(), mlp().full_architecture(), 1, scale=1e-3),
    )
    aggregation = NormClipping(max_norm=1.0)
    norm = torch.cat([tensor.reshape(-1) for tensor in long.values()]).norm()
    # The aggregate of the stack is that of the accumulator for clipped updates.
    state = random_state(mlp(), 2)
    accumulator = Accumulator(mlp(), state, total_weight=3)
    for weight, change in ((1.0, {name: tensor / norm for name, tensor in long.items()}), (2.0, short)):
        accumulator.add(mlp().full_architecture(), change, weight)
    new = aggregate(aggregation, state, [mlp().full_architecture()] * 2, [long, short])
    for name, tensor in accumulator.finish().items():
        torch.testing.assert_close(new[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("aggregation", EVERY, ids=lambda aggregation: aggregation.TYPE)
def test_a_change_that_is_not_finite_or_of_another_shape_is_refused(aggregation: AnyRobustAggregation) -> None:
    state, good = random_state(mlp(), 0), random_change(mlp(), mlp().full_architecture(), 1)
    for value in (torch.full((4,), float("nan")), torch.zeros(3)):
        with pytest.raises(ProtocolError):
            aggregate(aggregation, state, [mlp().full_architecture()] * 3, [good, {**good, "head.bias": value}, good])


def test_settings_are_read_from_plain_data_and_checked() -> None:
    for name, kind in ROBUST_AGGREGATIONS.items():
        plain = {"type": name, **({"max_norm": 1.0} if kind is NormClipping else {})}
        assert isinstance(from_plain(AnyRobustAggregation, plain), kind)  # type: ignore[arg-type]
    for bad in (
        lambda: NormClipping(max_norm=0),
        lambda: TrimmedMean(fraction=0.5),
        lambda: CoordinateMedian(least_clients=0),
        lambda: MultiKrum(malicious_count=-1),
    ):
        with pytest.raises(ConfigError):
            bad()
