import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from subfleet.elastic.server_optimisers import (
    SERVER_OPTIMISERS,
    AnyServerOptimiser,
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerYogi,
)
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import from_plain
from subfleet.testing.submodels import have_same_bits

ALL = [kind() for kind in SERVER_OPTIMISERS.values()]
Round = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def draw_round(seed: int, device: torch.device, old: Mapping[str, Tensor] | None = None) -> Round:
    """An old model, an aggregated one, and the held elements, about half; all others have their old bits."""
    generator = torch.Generator().manual_seed(seed)
    names = ("layer.weight", "norm.running_mean")
    before = dict(old) if old else {name: torch.randn(4, 6, generator=generator).to(device) for name in names}
    held = {name: (torch.rand(4, 6, generator=generator) < 0.5).to(device) for name in names}
    change = {name: torch.randn(4, 6, generator=generator).to(device) for name in names}
    if old is None:
        before["layer.weight"][0] = -0.0
    aggregated = {name: torch.where(held[name], before[name] + change[name], before[name]) for name in names}
    return before, aggregated, held


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.TYPE)
def test_what_was_not_trained_keeps_the_bits_of_weight_and_moments(
    settings: AnyServerOptimiser, device: torch.device
) -> None:
    old, aggregated, held = draw_round(0, device)
    model, moments = settings.step(old, aggregated, held, {})
    for seed in range(1, 4):
        before, aggregated, held = draw_round(seed, device, model)
        after, next_moments = settings.step(before, aggregated, held, moments)
        for name, mask in held.items():
            assert torch.equal(bits(after[name])[~mask], bits(before[name])[~mask])
            assert bool((after[name] != before[name])[mask].all())
            for kind, tensors in moments.items():
                assert torch.equal(bits(next_moments[kind][name])[~mask], bits(tensors[name])[~mask])
        model, moments = after, next_moments


def test_without_momentum_and_with_rate_1_it_is_federated_averaging_bit_by_bit(device: torch.device) -> None:
    old, aggregated, held = draw_round(0, device)
    # A mean change from which float64 arithmetic does not restore the aggregated value.
    old["layer.weight"][1], aggregated["layer.weight"][1] = 1.0, 1e-20
    held["layer.weight"][1] = True
    new, _ = ServerMomentum(momentum=0.0).step(old, aggregated, held, {})
    assert have_same_bits(
        {name: tensor.cpu() for name, tensor in new.items()},
        {name: tensor.cpu() for name, tensor in aggregated.items()},
    )


def test_adam_with_a_second_moment_of_1_is_federated_averaging() -> None:
    old, aggregated, held = draw_round(0, torch.device("cpu"))
    ones = {"square": {name: torch.ones_like(tensor) for name, tensor in old.items()}}
    settings = ServerAdam(learning_rate=1.0, beta1=0.0, beta2=1.0, tau=1e-30)
    new, moments = settings.step(old, aggregated, held, ones)
    assert have_same_bits(new, aggregated)
    assert have_same_bits(moments["square"], ones["square"])


def test_steps_are_those_of_the_paper() -> None:
    """Two rounds of one element, computed by hand."""
    rate, b1, b2, tau = 0.1, 0.9, 0.99, 1e-3
    changes = (0.5, -0.2)

    def square(kind: type[AnyServerOptimiser], v: float, d: float) -> float:
        if kind is ServerAdam:
            return b2 * v + (1 - b2) * d * d
        return v + d * d if kind is ServerAdagrad else v - (1 - b2) * d * d * math.copysign(1, v - d * d)

    for kind in (ServerAdam, ServerYogi, ServerAdagrad):
        settings = kind(learning_rate=rate, beta1=b1, tau=tau)
        weight, mean, v = 2.0, 0.0, tau**2
        model, moments = {"w": torch.tensor([2.0])}, dict[str, dict[str, Tensor]]()
        for change in changes:
            mean, v = b1 * mean + (1 - b1) * change, square(kind, v, change)
            weight += rate * mean / (math.sqrt(v) + tau)
            aggregated = {"w": model["w"] + change}
            model, moments = settings.step(model, aggregated, {"w": torch.tensor([True])}, moments)
        assert model["w"].item() == pytest.approx(weight, rel=1e-5)
        assert moments["square"]["w"].item() == pytest.approx(v, rel=1e-5)
    model, moments = {"w": torch.tensor([2.0])}, {}
    for change in changes:
        held = {"w": torch.tensor([True])}
        model, moments = ServerMomentum(momentum=0.5).step(model, {"w": model["w"] + change}, held, moments)
    assert model["w"].item() == pytest.approx(2.0 + 0.5 + (0.5 * 0.5 - 0.2))


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.TYPE)
def test_running_statistics_take_the_plain_mean_and_have_no_moments(settings: AnyServerOptimiser) -> None:
    old, aggregated, held = draw_round(0, torch.device("cpu"))
    new, moments = settings.step(old, aggregated, held, {}, buffers={"norm.running_mean"})
    assert have_same_bits({"a": new["norm.running_mean"]}, {"a": aggregated["norm.running_mean"]})
    assert all(tensors.keys() == {"layer.weight"} for tensors in moments.values())


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.TYPE)
def test_a_round_without_any_change_moves_no_bit(settings: AnyServerOptimiser) -> None:
    old, _, held = draw_round(0, torch.device("cpu"))
    new, _ = settings.step(old, old, held, {})
    assert have_same_bits(new, old)


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.TYPE)
def test_a_step_writes_to_none_of_its_arguments(settings: AnyServerOptimiser) -> None:
    old, aggregated, held = draw_round(0, torch.device("cpu"))
    _, moments = settings.step(old, aggregated, held, {})
    copies = [
        {name: tensor.clone() for name, tensor in tensors.items()} for tensors in (old, aggregated, *moments.values())
    ]
    settings.step(old, aggregated, held, moments)
    for tensors, copy in zip((old, aggregated, *moments.values()), copies, strict=True):
        assert have_same_bits(tensors, copy)


def test_settings_are_read_from_plain_data() -> None:
    for name, kind in SERVER_OPTIMISERS.items():
        assert from_plain(AnyServerOptimiser, {"type": name, "learning_rate": 0.5}) == kind(learning_rate=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (ServerMomentum(), "momentum", 1.0),
        (ServerMomentum(), "learning_rate", 0.0),
        (ServerAdam(), "beta1", -0.1),
        (ServerAdam(), "beta2", 1.1),
        (ServerYogi(), "tau", 0.0),
        (ServerAdagrad(), "learning_rate", math.inf),
    ],
)
def test_settings_out_of_range_are_refused(settings: AnyServerOptimiser, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(settings, **{name: value})  # type: ignore[arg-type]
