"""Aggregated means against rational arithmetic, over submodels of every family and magnitudes from 1e-30 to 1e30."""

import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
import torch
from elastic.elastic_cases import CONFIGS, architectures, random_change, relaxed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.contributions import Contribution
from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.network import Family, Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.submodel import Architecture

NEAR, FAR = Fraction(1, 2**23), Fraction(1, 2**48)
CHECKED = 12
"""Elements of each tensor."""


def draw_change(
    network: Network, architecture: Architecture, seed: int, scales: Mapping[str, float]
) -> dict[str, Tensor]:
    """Changes of a submodel: each tensor of its own magnitude, and its elements over six more."""
    generator = torch.Generator().manual_seed(seed)
    change = {}
    for name, shape in network.shapes(architecture).items():
        spread = 10 ** (-6 * torch.rand(shape, generator=generator, dtype=torch.float64))
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        change[name] = (scales[name] * spread * signs).float()
    return change


def find_largest(changes: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    largest = dict[str, float]()
    for change in changes:
        for name, tensor in change.items():
            largest[name] = max(largest.get(name, 0.0), float(tensor.abs().max()))
    return largest


def spread_out(network: Network, contribution: Contribution) -> dict[str, Tensor]:
    """The change of each element of the whole network; NaN where the submodel lacks it."""
    maps = tensor_maps(network, contribution.architecture)
    whole = {}
    for name, change in contribution.change.items():
        target = torch.full(network.tensors[name].shape, math.nan, dtype=torch.float64)
        maps[name].scatter(change.double().nan_to_num(), target.zero_())
        held = torch.zeros(network.tensors[name].shape, dtype=torch.float64)
        maps[name].scatter(torch.ones_like(change, dtype=torch.float64), held)
        whole[name] = torch.where(held > 0, target, math.nan)
    return whole


def check_means(
    network: Network, contributions: Sequence[Contribution], new: Mapping[str, Tensor], largest: Mapping[str, float]
) -> int:
    """Compare some elements with their rational means; returns how many."""
    whole, checked, rng = [spread_out(network, contribution) for contribution in contributions], 0, random.Random(0)
    for name, tensor in new.items():
        flat = tensor.reshape(-1)
        for index in rng.sample(range(len(flat)), min(CHECKED, len(flat))):
            parts = [
                (Fraction(contribution.weight), Fraction(value))
                for contribution, spread in zip(contributions, whole, strict=True)
                if name in spread and not math.isnan(value := float(spread[name].reshape(-1)[index]))
            ]
            total = sum(weight for weight, _ in parts)
            if not total:
                assert flat[index] == 0
                continue
            mean = sum(weight * value for weight, value in parts) / total
            magnitude = sum(weight * abs(value) for weight, value in parts) / total
            allowed = max(NEAR * magnitude, FAR * Fraction(largest[name]))
            assert abs(Fraction(float(flat[index])) - mean) <= allowed, (name, index)
            checked += 1
    return checked


def aggregate(
    network: Network, contributions: Sequence[Contribution], scales: Mapping[str, float]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The mean changes in double precision, and the largest changes. The model has a number as large as they are."""
    state = {name: torch.zeros(decl.shape, dtype=torch.float64) for name, decl in network.tensors.items()}
    for name, tensor in state.items():
        tensor.view(-1)[0] = scales[name]
    largest = find_largest([contribution.change for contribution in contributions])
    total = math.fsum(contribution.weight for contribution in contributions)
    accumulator = Accumulator(network, state, total_weight=total, largest=largest)
    accumulator.add_many(contributions)
    return {name: tensor - state[name] for name, tensor in accumulator.finish().items()}, largest


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.TYPE)
@relaxed
@given(data=st.data())
def test_means_are_those_of_rational_arithmetic(config: Family, data: st.DataObject) -> None:
    network = network_of(config)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    scales = {name: 10.0 ** rng.uniform(-30, 30) for name in network.tensors}
    contributions = []
    for seed in range(data.draw(st.integers(1, 4))):
        architecture = data.draw(architectures(network))
        change, weight = draw_change(network, architecture, seed, scales), float(data.draw(st.integers(1, 2**13)))
        contributions.append(Contribution(architecture=architecture, change=change, weight=weight))
    means, largest = aggregate(network, contributions, scales)
    assert check_means(network, contributions, means, largest)


def test_a_large_claim_takes_nothing_from_the_others() -> None:
    """Elements that one client alone holds move by its change, however much another one counts."""
    network, scales = network_of(CONFIGS[0]), dict.fromkeys(network_of(CONFIGS[0]).tensors, 1e-3)
    sizes, weights = (network.full_architecture(), uniform_space(network, (0.5,))[0]), (100.0, 1e7)
    contributions = [
        Contribution(
            architecture=size,
            change={name: 1e-3 * change for name, change in random_change(network, size, seed).items()},
            weight=weight,
        )
        for seed, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    means, largest = aggregate(network, contributions, scales)
    assert check_means(network, contributions, means, dict.fromkeys(largest, 0.0)) > 50


def test_a_change_above_the_measured_one_is_refused() -> None:
    network = network_of(CONFIGS[0])
    state = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    whole = network.full_architecture()
    change = {name: torch.full(shape, 0.75) for name, shape in network.shapes(whole).items()}
    name = next(iter(change))
    accumulator = Accumulator(network, state, total_weight=1, largest={name: 0.3})
    with pytest.raises(ProtocolError, match=r"must be finite and at most 0\.5"):
        accumulator.add(whole, change, 1.0)
