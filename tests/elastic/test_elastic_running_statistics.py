from dataclasses import replace
from typing import Literal

import pytest
import torch
from elastic.elastic_cases import RESNET, held_places, random_state, same_bits
from torch import Tensor, nn

from subfleet.elastic.families import build_module, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import measured_moments, merged_statistics, norm_tensors, recalibrated
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import DataError
from subfleet.protocol.subnet import SubnetSpec

BATCH_RESNET = replace(RESNET, norm="batch", widths=(8, 8))


def state_of(network: Network) -> dict[str, Tensor]:
    state = random_state(network, 0)
    return {
        name: state[name].square() + 0.5 if decl.role == "variance" else state[name]
        for name, decl in network.tensors.items()
    }


def samples(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, *BATCH_RESNET.input_shape), generator=torch.Generator().manual_seed(seed)) * 2 + 1


def module_of(network: Network, spec: SubnetSpec, state: dict[str, Tensor]) -> nn.Module:
    module = build_module(network, spec)
    module.load_state_dict(extract(network, spec, state))
    return module.train()


def inputs_of_norms(network: Network, spec: SubnetSpec, state: dict[str, Tensor], batches: list[Tensor]) -> Tensor:
    """Everything that the deepest norm of section 0 was given, as (channels, values) in float64."""
    module, seen = module_of(network, spec, state), []
    layer = module.get_submodule("section0.block1.norm2")
    layer.register_forward_pre_hook(lambda _module, given: seen.append(given[0].detach().double()))
    for batch in batches:
        module(batch)
    return torch.cat(seen).transpose(0, 1).flatten(1)


def small(network: Network) -> SubnetSpec:
    return next(spec for spec in uniform_space(network, (0.5,)) if spec.name.endswith("d2-1"))


@pytest.mark.parametrize("which", ["full", "small"])
def test_the_statistics_are_those_of_all_that_a_norm_was_given(which: str, device: torch.device) -> None:
    network = network_of(BATCH_RESNET)
    spec, state = network.full_spec() if which == "full" else small(network), state_of(network)
    # Batches of different sizes: a mean of their means would be another one.
    batches = [samples(7, seed=1), samples(3, seed=2) + 5, samples(12, seed=3)]
    there = {name: tensor.to(device) for name, tensor in state.items()}
    with torch.backends.cudnn.flags(enabled=False):
        # Convolutions in full precision on a GPU too.
        new = recalibrated(network, there, spec, batches)
    given = inputs_of_norms(network, spec, state, batches)
    local = extract(network, spec, new)
    for name, expected in (("running_mean", given.mean(1)), ("running_var", given.var(1))):
        found = local[f"section0.block1.norm2.{name}"].cpu().double()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_nothing_else_moves_a_bit() -> None:
    network = network_of(BATCH_RESNET)
    spec, state = small(network), state_of(network)
    before = {name: tensor.clone() for name, tensor in state.items()}
    new = recalibrated(network, state, spec, [samples(9)])
    assert same_bits(state, before)
    held = held_places(network, spec)
    for name, decl in network.tensors.items():
        moves = held[name] if decl.role in ("mean", "variance") else torch.zeros_like(held[name])
        assert same_bits({name: new[name][~moves]}, {name: state[name][~moves]})
        assert not bool((new[name] == state[name])[moves].any())


def test_one_batch_gives_what_pytorch_gives() -> None:
    network = network_of(BATCH_RESNET)
    state, full = state_of(network), network.full_spec()
    module = module_of(network, full, state)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    module(samples(8))
    new = recalibrated(network, state, full, [samples(8)])
    for name, tensor in module.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(new[name], tensor, atol=1e-6, rtol=1e-5)


def test_sums_of_clients_are_the_statistics_of_all_their_data() -> None:
    network = network_of(BATCH_RESNET)
    state, spec = state_of(network), small(network)
    batches = [samples(count, seed=count) for count in (5, 2, 8, 4)]
    pooled = merged_statistics([measured_moments(network, spec, state, batches)])
    clients = [measured_moments(network, spec, state, part) for part in (batches[:1], batches[1:3], batches[3:])]
    merged, turned = merged_statistics(clients), merged_statistics(clients[::-1])
    assert len(pooled) == 2 * 7
    for name, tensor in pooled.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(turned[name], tensor, atol=1e-7, rtol=1e-6)


def test_evaluation_no_longer_depends_on_what_was_measured_before() -> None:
    network = network_of(BATCH_RESNET)
    state, full = state_of(network), network.full_spec()
    stale = {**state, "norm.running_mean": state["norm.running_mean"] + 100}
    assert same_bits(recalibrated(network, stale, full, [samples(6)]), recalibrated(network, state, full, [samples(6)]))


def scaled_like(network: Network, state: dict[str, Tensor]) -> tuple[Network, dict[str, Tensor]]:
    """The same network with scalers, whose norms have other names."""
    scaled = network_of(replace(network.config, scaler=True))
    return scaled, dict(zip(scaled.tensors, state.values(), strict=True))


def test_a_scaler_does_not_change_what_is_measured() -> None:
    # It divides in training alone, and evaluation reads the statistics of what is not divided.
    network = network_of(BATCH_RESNET)
    state, spec = state_of(network), small(network)
    scaled, same = scaled_like(network, state)
    found, expected = recalibrated(scaled, same, spec, [samples(6)]), recalibrated(network, state, spec, [samples(6)])
    assert same_bits(dict(zip(expected, found.values(), strict=True)), expected)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_norm_undoes_a_scaler_in_training(norm: Literal["batch", "group"]) -> None:
    network = network_of(replace(BATCH_RESNET, norm=norm))
    state, spec = state_of(network), small(network)
    scaled, same = scaled_like(network, state)
    modules = module_of(network, spec, state), module_of(scaled, spec, same)
    assert [part.rate for part in modules[1].modules() if hasattr(part, "rate")] == [0.5] * 7
    plain, divided = (module.double()(samples(6).double()) for module in modules)
    torch.testing.assert_close(divided, plain, rtol=1e-3, atol=1e-3)


def test_networks_without_running_statistics_stay_as_they_are() -> None:
    network = network_of(RESNET)
    state = random_state(network, 0)
    assert same_bits(recalibrated(network, state, network.full_spec(), [samples(4)]), state)


def test_what_cannot_be_measured_is_refused() -> None:
    network = network_of(BATCH_RESNET)
    state, full = state_of(network), network.full_spec()
    moments = measured_moments(network, full, state, [samples(4)])
    other = measured_moments(network, small(network), state, [samples(4)])
    with pytest.raises(DataError, match="different networks"):
        merged_statistics([moments, other])
    single = {name: replace(found, count=1) for name, found in moments.items()}
    with pytest.raises(DataError, match="needs two"):
        merged_statistics([single])


def test_the_tensors_of_norms_are_found_by_their_layers() -> None:
    network = network_of(BATCH_RESNET)
    found = norm_tensors(network)
    assert {name for name in found if name.startswith("norm.")} == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }
    assert not found & {"stem.weight", "head.weight", "head.bias", "section0.block0.layer1.weight"}
    assert all("norm" in name for name in found)
    assert len(found) == 4 * len([decl for decl in network.tensors.values() if decl.role == "gain"])
