import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch
from elastic.elastic_cases import RESNET, random_state
from elastic.plain_modules import Divisions
from torch import Tensor, nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.elastic.norm_layers import norm_layers, norm_tensors
from subfleet.elastic.running_statistics import (
    NormMoments,
    measure_moments,
    merge_statistics,
    pool_statistics,
    recalibrate,
)
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import DataError
from subfleet.protocol.submodel import Architecture
from subfleet.testing.submodels import find_held_elements, have_same_bits

BATCH_RESNET = replace(RESNET, norm="batch", widths=(8, 8))


def state_of(network: Network) -> dict[str, Tensor]:
    state = random_state(network, 0)
    return {
        name: state[name].square() + 0.5 if decl.role == "variance" else state[name]
        for name, decl in network.tensors.items()
    }


def samples(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, *BATCH_RESNET.input_shape), generator=torch.Generator().manual_seed(seed)) * 2 + 1


def module_of(network: Network, architecture: Architecture, state: dict[str, Tensor]) -> nn.Module:
    module = build_module(network, architecture)
    module.load_state_dict(extract(network, architecture, state))
    return module.train()


def plain_of(network: Network, architecture: Architecture, state: dict[str, Tensor]) -> nn.Module:
    """The plain module of a family that is as small as the submodel."""
    halves = architecture != network.full_architecture()
    module = (replace(BATCH_RESNET, widths=(4, 4), depths=(2, 1)) if halves else BATCH_RESNET).module()
    module.load_state_dict(extract(network, architecture, state))
    return module.train()


def inputs_of_norms(
    network: Network, architecture: Architecture, state: dict[str, Tensor], batches: list[Tensor]
) -> Tensor:
    """All inputs of the deepest norm of section 0, as (channels, values) in float64."""
    module, recorded = plain_of(network, architecture, state), []
    layer = module.get_submodule("section0.block1.norm2")
    layer.register_forward_pre_hook(lambda _module, inputs: recorded.append(inputs[0].detach().double()))
    for batch in batches:
        module(batch)
    return torch.cat(recorded).transpose(0, 1).flatten(1)


def small(network: Network) -> Architecture:
    return next(architecture for architecture in uniform_space(network, (0.5,)) if architecture.name.endswith("d2-1"))


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_statistics_are_those_of_all_inputs_of_a_norm(size: str, device: torch.device) -> None:
    network = network_of(BATCH_RESNET)
    architecture, state = network.full_architecture() if size == "full" else small(network), state_of(network)
    # Batches of different sizes, so that the mean of their means would differ.
    batches = [samples(7, seed=1), samples(3, seed=2) + 5, samples(12, seed=3)]
    on_device = {name: tensor.to(device) for name, tensor in state.items()}
    with torch.backends.cudnn.flags(enabled=False):
        # Convolutions in full precision on a GPU too.
        new = recalibrate(network, on_device, architecture, batches)
    norm_inputs = inputs_of_norms(network, architecture, state, batches)
    local = extract(network, architecture, new)
    for name, expected in (("running_mean", norm_inputs.mean(1)), ("running_var", norm_inputs.var(1))):
        measured = local[f"section0.block1.norm2.{name}"].cpu().double()
        torch.testing.assert_close(measured, expected, atol=1e-6, rtol=1e-5)


def test_nothing_else_moves_a_bit() -> None:
    network = network_of(BATCH_RESNET)
    architecture, state = small(network), state_of(network)
    before = {name: tensor.clone() for name, tensor in state.items()}
    new = recalibrate(network, state, architecture, [samples(9)])
    assert have_same_bits(state, before)
    held = find_held_elements(network, architecture)
    for name, decl in network.tensors.items():
        moves = held[name] if decl.role in ("mean", "variance") else torch.zeros_like(held[name])
        assert have_same_bits({name: new[name][~moves]}, {name: state[name][~moves]})
        assert not bool((new[name] == state[name])[moves].any())


def test_one_batch_gives_what_pytorch_gives() -> None:
    network = network_of(BATCH_RESNET)
    state, full = state_of(network), network.full_architecture()
    module = plain_of(network, full, state)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    module(samples(8))
    new = recalibrate(network, state, full, [samples(8)])
    for name, tensor in module.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(new[name], tensor, atol=1e-6, rtol=1e-5)


def test_sums_of_clients_are_the_statistics_of_all_their_data() -> None:
    network = network_of(BATCH_RESNET)
    state, architecture = state_of(network), small(network)
    batches = [samples(count, seed=count) for count in (5, 2, 8, 4)]
    pooled = merge_statistics([measure_moments(network, architecture, state, batches)])
    clients = [measure_moments(network, architecture, state, part) for part in (batches[:1], batches[1:3], batches[3:])]
    merged, reverse_merged = merge_statistics(clients), merge_statistics(clients[::-1])
    assert len(pooled) == 2 * 7
    for name, tensor in pooled.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(reverse_merged[name], tensor, atol=1e-7, rtol=1e-6)


def draw_moments(network: Network, architecture: Architecture, seed: int) -> dict[str, NormMoments]:
    """Moments of a client: small, or so large that they hide the others until they cancel out."""
    generator = torch.Generator().manual_seed(seed)
    huge = {0: 1e17, 3: -1e17}.get(seed, 0.0)

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * 10.0 ** (4 * seed % 13 - 8)

    shapes = network.shapes(architecture)
    return {
        norm.name: NormMoments(
            total=draw(size := shapes[f"{norm.name}.running_mean"][0]) + huge,
            squares=draw(size).abs() * 1e9,
            count=seed + 3,
        )
        for norm in norm_layers(network, architecture)
    }


@pytest.mark.slow
def test_merged_sums_have_the_same_bits_for_every_order() -> None:
    network = network_of(BATCH_RESNET)
    state, architectures = (
        state_of(network),
        (network.full_architecture(), small(network), uniform_space(network, (0.5,))[0]),
    )
    clients = [(architectures[seed % 3], draw_moments(network, architectures[seed % 3], seed)) for seed in range(9)]
    first = pool_statistics(network, state, clients)
    same_architecture = [moments for architecture, moments in clients if architecture == architectures[0]]
    merged = merge_statistics(same_architecture)
    for order in itertools.islice(itertools.permutations(range(9)), 5, 40_000, 2017):
        assert have_same_bits(pool_statistics(network, state, [clients[index] for index in order]), first)
    assert have_same_bits(merge_statistics(same_architecture[::-1]), merged)


def test_pooled_statistics_are_those_of_all_data_of_the_holders_of_a_channel(device: torch.device) -> None:
    network = network_of(BATCH_RESNET)
    state, full, part = state_of(network), network.full_architecture(), small(network)
    batches = [samples(6, seed=1), samples(9, seed=2) + 3]
    measured = [(full, measure_moments(network, full, state, batches[:1]))]
    measured.append((part, measure_moments(network, part, state, batches[1:])))
    on_device = {name: tensor.to(device) for name, tensor in state.items()}
    new = {name: tensor.cpu() for name, tensor in pool_statistics(network, on_device, measured).items()}
    layer, held = "section0.block1.norm2", 4
    norm_inputs = [
        inputs_of_norms(network, architecture, state, [batch])
        for architecture, batch in zip((full, part), batches, strict=True)
    ]
    assert norm_inputs[1].shape[0] == held
    both = torch.cat([norm_inputs[0][:held], norm_inputs[1]], dim=1)
    for name, shared, unshared in (
        ("running_mean", both.mean(1), norm_inputs[0][held:].mean(1)),
        ("running_var", both.var(1), norm_inputs[0][held:].var(1)),
    ):
        expected = torch.cat([shared, unshared]).float()
        torch.testing.assert_close(new[f"{layer}.{name}"], expected, atol=1e-6, rtol=1e-5)
    assert set(new) == {name for name, decl in network.tensors.items() if decl.role in ("mean", "variance")}


def test_a_channel_that_nobody_has_measured_keeps_its_bits() -> None:
    network = network_of(BATCH_RESNET)
    state, part = state_of(network), small(network)
    new = pool_statistics(network, state, [(part, measure_moments(network, part, state, [samples(6)]))])
    held = find_held_elements(network, part)
    assert any(not bool(held[name].all()) for name in new)
    for name, tensor in new.items():
        assert have_same_bits({name: tensor[~held[name]]}, {name: state[name][~held[name]]})
        assert not bool((tensor == state[name])[held[name]].any())
    alone = {name: replace(moments, count=1) for name, moments in draw_moments(network, part, 1).items()}
    assert have_same_bits(pool_statistics(network, state, [(part, alone)]), {name: state[name] for name in new})
    assert pool_statistics(network, state, []) == {}


def test_norm_layers_have_what_devices_need_for_calibration() -> None:
    network = network_of(BATCH_RESNET)
    architecture = small(network)
    norms = {norm.name: norm for norm in norm_layers(network, architecture)}
    moments = measure_moments(network, architecture, state_of(network), [samples(1)])
    assert {name: norm.positions for name, norm in norms.items()} == {
        name: norm_moments.count for name, norm_moments in moments.items()
    }
    assert {(norm.momentum, norm.scale) for norm in norms.values()} == {(0.1, 1.0)}
    scaled = network_of(replace(BATCH_RESNET, scaler=True))
    assert {norm.scale for norm in norm_layers(scaled, small(scaled))} == {0.5}
    assert norm_layers(network_of(RESNET), network_of(RESNET).full_architecture()) == ()


def test_evaluation_no_longer_depends_on_what_was_measured_before() -> None:
    network = network_of(BATCH_RESNET)
    state, full = state_of(network), network.full_architecture()
    stale = {**state, "norm.running_mean": state["norm.running_mean"] + 100}
    assert have_same_bits(
        recalibrate(network, stale, full, [samples(6)]), recalibrate(network, state, full, [samples(6)])
    )


def scaled_like(network: Network, state: dict[str, Tensor]) -> tuple[Network, dict[str, Tensor]]:
    """The same network with scalers; its norms have other names."""
    scaled = network_of(replace(network.config, scaler=True))
    return scaled, dict(zip(scaled.tensors, state.values(), strict=True))


def test_a_scaler_does_not_change_what_is_measured() -> None:
    # A scaler divides in training only, and evaluation uses the statistics of undivided values.
    network = network_of(BATCH_RESNET)
    state, architecture = state_of(network), small(network)
    scaled, same = scaled_like(network, state)
    measured, expected = (
        recalibrate(scaled, same, architecture, [samples(6)]),
        recalibrate(network, state, architecture, [samples(6)]),
    )
    assert have_same_bits(dict(zip(expected, measured.values(), strict=True)), expected)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_norm_undoes_a_scaler_in_training(norm: Literal["batch", "group"]) -> None:
    network = network_of(replace(BATCH_RESNET, norm=norm))
    state, architecture = state_of(network), small(network)
    scaled, same = scaled_like(network, state)
    modules = module_of(network, architecture, state), module_of(scaled, architecture, same)
    divisions = Divisions()
    with divisions:
        plain, divided = (module.double()(samples(6).double()) for module in modules)
    assert divisions.rates == [0.5] * 7
    torch.testing.assert_close(divided, plain, rtol=1e-3, atol=1e-3)


def test_networks_without_running_statistics_stay_as_they_are() -> None:
    network = network_of(RESNET)
    state = random_state(network, 0)
    assert have_same_bits(recalibrate(network, state, network.full_architecture(), [samples(4)]), state)


def test_impossible_measurements_are_refused() -> None:
    network = network_of(BATCH_RESNET)
    state, full = state_of(network), network.full_architecture()
    moments = measure_moments(network, full, state, [samples(4)])
    other = measure_moments(network, small(network), state, [samples(4)])
    with pytest.raises(DataError, match="different networks"):
        merge_statistics([moments, other])
    single = {name: replace(norm_moments, count=1) for name, norm_moments in moments.items()}
    with pytest.raises(DataError, match="needs two"):
        merge_statistics([single])


def test_the_tensors_of_norms_are_found_by_their_layers() -> None:
    network = network_of(BATCH_RESNET)
    names = norm_tensors(network)
    assert {name for name in names if name.startswith("norm.")} == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }
    assert not names & {"stem.weight", "head.weight", "head.bias", "section0.block0.layer1.weight"}
    assert all("norm" in name for name in names)
    assert len(names) == 4 * len([decl for decl in network.tensors.values() if decl.role == "gain"])
