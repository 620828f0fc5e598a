"""Maps, permutations and scale factors: the bits of the CPU on every device, with results where the model is."""

import pytest
import torch
from elastic.elastic_cases import CONFIGS, random_state, to_device

from subfleet.elastic.building import network_of
from subfleet.elastic.maps import extract, tensor_maps
from subfleet.elastic.network import Family, Network
from subfleet.elastic.permuting import permute, rank_indices
from subfleet.elastic.scaling import compute_scale_factors
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.submodel import Architecture
from subfleet.testing.submodels import find_held_elements, have_same_bits

CPU = torch.device("cpu")
NETWORKS = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.TYPE} {config.norm}")


def _smallest_and_whole(network: Network) -> tuple[Architecture, Architecture]:
    return (uniform_space(network, (0.5, 1.0))[0], network.full_architecture())


@NETWORKS
def test_submodels_are_cut_out_and_put_back_where_the_model_is(config: Family, device: torch.device) -> None:
    network = network_of(config)
    state = random_state(network, 1)
    on_device = to_device(device, state)
    for architecture in _smallest_and_whole(network):
        local = extract(network, architecture, on_device)
        assert {tensor.device.type for tensor in local.values()} == {device.type}
        assert have_same_bits(to_device(CPU, local), extract(network, architecture, state))
        held = find_held_elements(network, architecture)
        for name, tensor_map in tensor_maps(network, architecture).items():
            full = torch.zeros_like(on_device[name])
            tensor_map.scatter(local[name], full)
            assert torch.equal(full.cpu(), state[name] * held[name]), name


@NETWORKS
def test_channels_are_sorted_where_the_model_is(config: Family, device: torch.device) -> None:
    network = network_of(config)
    state = random_state(network, 2)
    on_device = to_device(device, state)
    moved = permute(network, on_device, rank_indices(network, on_device))
    assert {tensor.device.type for tensor in moved.values()} == {device.type}
    back = to_device(CPU, moved)
    assert have_same_bits(back, permute(network, state, rank_indices(network, state)))
    assert all(order == tuple(range(len(order))) for order in rank_indices(network, back).values())


@NETWORKS
def test_sizes_of_clients_are_the_same_on_every_device(config: Family, device: torch.device) -> None:
    network = network_of(config)
    clients = [
        (architecture, extract(network, architecture, random_state(network, seed)))
        for seed, architecture in enumerate(_smallest_and_whole(network))
    ]
    factors = compute_scale_factors(
        network, [(architecture, to_device(device, state)) for architecture, state in clients]
    )
    for client_factors, expected in zip(factors, compute_scale_factors(network, clients), strict=True):
        assert client_factors == pytest.approx(expected, rel=1e-12)
