import pytest
import torch
from elastic.elastic_cases import RESNET, networks_and_architectures, relaxed
from hypothesis import given
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture


@pytest.mark.slow
@relaxed
@given(case=networks_and_architectures())
def test_counts_are_those_of_the_real_module(case: tuple[Network, Architecture]) -> None:
    network, architecture = case
    cost = estimate_cost(network, architecture, batch_size=3)
    module = build_module(network, architecture)
    assert cost.parameters == sum(tensor.numel() for tensor in module.state_dict().values())
    assert cost.parameters == network.parameter_count(architecture)
    assert cost.weight_bytes == 4 * cost.parameters
    with FlopCounterMode(display=False) as counter:
        module.eval()(torch.zeros(1, *network.config.input_shape))
    # torch counts a multiplication and an addition as two.
    assert 2 * cost.forward_macs == counter.get_total_flops()


def saved_bytes(network: Network, architecture: Architecture, batch_size: int) -> int:
    """The bytes that autograd saves in a forward pass, without weights."""
    module = build_module(network, architecture)
    inputs = torch.zeros(batch_size, *network.config.input_shape)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, int] = {inputs.untyped_storage().data_ptr(): inputs.untyped_storage().nbytes()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        logits = module(inputs)
    assert logits.requires_grad
    return sum(saved.values())


@pytest.mark.slow
@relaxed
@given(case=networks_and_architectures())
def test_memory_holds_what_autograd_keeps(case: tuple[Network, Architecture]) -> None:
    network, architecture = case
    small, large = (estimate_cost(network, architecture, batch_size=size) for size in (2, 66))
    growth = (large.training_memory_bytes - small.training_memory_bytes) / 64
    saved_growth = (saved_bytes(network, architecture, 66) - saved_bytes(network, architecture, 2)) / 64
    # The estimate adds a workspace and leaves out the head's input.
    assert growth >= 0.95 * saved_growth
    assert small.training_memory_bytes >= 4.5 * small.weight_bytes


def test_memory_grows_with_batch_width_and_depth() -> None:
    network = network_of(RESNET)
    space = {architecture.name: architecture for architecture in uniform_space(network, (0.5, 1))}
    sizes = [
        estimate_cost(network, space[name], batch_size=batch).training_memory_bytes
        for name, batch in (("w1/2 d1-1", 1), ("w1/2 d1-1", 8), ("w1/2 d2-3", 8), ("w1 d2-3", 8), ("w1 d2-3", 32))
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)


def test_a_batch_of_nothing_is_refused() -> None:
    network = network_of(RESNET)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        estimate_cost(network, network.full_architecture(), batch_size=0)
