import dataclasses

import pytest
import torch
from elastic.elastic_cases import (
    CONFIGS,
    CONVOLUTIONAL,
    networks_and_architectures,
    random_state,
    relaxed,
)
from hypothesis import given

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.maps import extract, tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

pytestmark = pytest.mark.slow


def scatter(network: Network, architecture: Architecture, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    full = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    for name, tensor_map in tensor_maps(network, architecture).items():
        tensor_map.scatter(local[name], full[name])
    return full


def inputs_of(network: Network) -> torch.Tensor:
    return torch.randn(3, *network.config.input_shape, generator=torch.Generator().manual_seed(5))


@relaxed
@given(case=networks_and_architectures())
def test_a_submodel_computes_what_the_full_network_does_with_all_else_set_to_zero(
    case: tuple[Network, Architecture],
) -> None:
    # Norms see whole groups, so this holds up to rounding for widths, for kernels and, where blocks add to a stream,
    # for skipped blocks.
    network, architecture = case
    if network.config.TYPE in ("vgg", "ds_cnn") or network.config == CONVOLUTIONAL["pooling cells"]:
        architecture = dataclasses.replace(architecture, blocks=network.full_architecture().blocks)
    local = extract(network, architecture, random_state(network, 1))
    submodel, full = (
        build_module(network, architecture).eval(),
        build_module(network, network.full_architecture()).eval(),
    )
    submodel.load_state_dict(local)
    full.load_state_dict(scatter(network, architecture, local))
    expected = full(inputs_of(network))
    torch.testing.assert_close(
        submodel(inputs_of(network)), expected, atol=1e-4 * float(expected.detach().abs().max()), rtol=0
    )


@relaxed
@given(case=networks_and_architectures())
def test_what_was_extracted_is_contiguous_and_shares_no_memory(case: tuple[Network, Architecture]) -> None:
    network, architecture = case
    state = random_state(network, 3)
    for name, tensor in extract(network, architecture, state).items():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().data_ptr() != state[name].untyped_storage().data_ptr()


def test_a_model_without_a_declared_tensor_is_refused() -> None:
    network = network_of(CONFIGS[0])
    state = random_state(network, 0)
    del state["norm.weight"]
    with pytest.raises(ConfigError, match=r"lacks the tensors \['norm.weight'\]"):
        extract(network, network.full_architecture(), state)
