"""Costs of submodels over tokens, against the counts of PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from elastic.elastic_cases import relaxed
from elastic.token_cases import TOKEN_CONFIGS, inputs_of, token_cases
from hypothesis import given
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.backends import mkldnn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.network import Family, Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.submodel import Architecture

pytestmark = pytest.mark.slow


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Run attention as plain products and LSTMs as plain linear layers, which PyTorch can count."""
    # Setting TF32 is deprecated, even to its current value.
    with sdpa_kernel(SDPBackend.MATH), mkldnn.flags(enabled=False, allow_tf32=None):
        yield


def few_inputs(config: Family, batch_size: int) -> Tensor:
    inputs = inputs_of(config, batch_size)
    return inputs if network_of(config).symbols else inputs.float()


@relaxed
@given(case=token_cases())
def test_counts_are_those_of_the_real_module(case: tuple[Network, Architecture]) -> None:
    network, architecture = case
    cost = estimate_cost(network, architecture, batch_size=3)
    module = build_module(network, architecture)
    assert cost.parameters == sum(tensor.numel() for tensor in module.state_dict().values())
    inputs = few_inputs(network.config, 1)
    with FlopCounterMode(display=False) as counter, without_fused_kernels():
        module(inputs)
    # torch counts a multiplication and an addition as two.
    assert 2 * cost.forward_macs == counter.get_total_flops()


def saved_numbers(network: Network, architecture: Architecture, batch_size: int) -> int:
    """The count of numbers that autograd saves in a forward pass, without weights."""
    module = build_module(network, architecture)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, Tensor] = {}  # kept alive, so that no two tensors have the same address

    def save(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs = few_inputs(network.config, batch_size)
    with saved_tensors_hooks(save, lambda tensor: tensor), without_fused_kernels():
        assert module(inputs).requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) // 4


@pytest.mark.parametrize("config", TOKEN_CONFIGS, ids=lambda config: config.TYPE)
def test_memory_is_about_what_autograd_keeps(config: Family) -> None:
    network = network_of(config)
    for architecture in uniform_space(network, (0.5, 1)):
        small, large = (estimate_cost(network, architecture, batch_size=size) for size in (1, 33))
        growth = (large.training_memory_bytes - small.training_memory_bytes) / 32 / 4
        saved_growth = (saved_numbers(network, architecture, 33) - saved_numbers(network, architecture, 1)) / 32
        assert 0.5 * saved_growth <= growth <= 2 * saved_growth
