import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from elastic.elastic_cases import MLP, RESNET
from elastic.zico_reference import list_scored_tensors, zico_score
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.arrays import Arrays
from subfleet.arrays.zico import zico
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import DataError


def draw_gradients(count: int, seed: int = 0) -> list[Arrays]:
    generator = np.random.default_rng(seed)
    return [
        {"a": generator.normal(size=(3, 4)).astype(np.float32), "b": generator.normal(size=5).astype(np.float32)}
        for _ in range(count)
    ]


def draw_batches(network: Network, count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn((size, *network.config.input_shape), generator=generator),
            torch.randint(network.config.class_count, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def test_the_score_of_two_batches_in_closed_form() -> None:
    # The deviation of two numbers is half their distance, and their mean magnitude half the sum of magnitudes.
    first = {"a": np.array([1.0, -2.0], np.float32), "b": np.array([[4.0]], np.float32)}
    second = {"a": np.array([3.0, 2.0], np.float32), "b": np.array([[5.0]], np.float32)}
    assert zico([first, second]) == pytest.approx(math.log((1 + 3) / 2 + (2 + 2) / 4) + math.log(9))


@pytest.mark.slow
@given(count=st.integers(2, 5), seed=st.integers(0, 1000), data=st.data())
def test_the_order_of_batches_does_not_matter(count: int, seed: int, data: st.DataObject) -> None:
    batches = draw_gradients(count, seed)
    order = data.draw(st.permutations(batches))
    assert zico(order) == pytest.approx(zico(batches), rel=1e-12)


@given(scale=st.floats(1e-3, 1e3))
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    batches = draw_gradients(3)
    scaled = [
        {name: (array * np.float32(scale)).astype(np.float32) for name, array in batch.items()} for batch in batches
    ]
    assert zico(scaled) == pytest.approx(zico(batches), rel=1e-4)


def test_layers_without_gradients_or_without_variation_add_nothing() -> None:
    batches = draw_gradients(3)
    alone = zico(batches)
    for constant in (0.0, 0.1):
        flat: list[Arrays] = [{**batch, "c": np.full(7, constant)} for batch in batches]
        assert zico(flat) == alone
    assert zico([{"c": np.zeros(3)}] * 2) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda batches: batches[:1], "gradients of 1 batches"),
        (lambda batches: [batches[0], {"a": batches[1]["a"]}], "names or shapes"),
        (lambda batches: [batches[0], {**batches[1], "a": np.zeros(2)}], "names or shapes"),
        (lambda batches: [batches[0], {**batches[1], "b": np.full(5, np.nan)}], "gradient of 'b' is not finite"),
    ],
)
def test_gradients_that_cannot_be_scored_are_refused(
    change: Callable[[list[Arrays]], list[Arrays]], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        zico(change(list(draw_gradients(2))))


@pytest.mark.slow
@pytest.mark.parametrize("config", [RESNET, MLP])
def test_a_submodel_is_scored_by_the_gradients_of_its_layers(config: object, device: torch.device) -> None:
    network = network_of(RESNET if config is RESNET else MLP)
    state = build_module(network, network.full_architecture()).state_dict()
    architecture = uniform_space(network, (0.5,))[0]
    batches = draw_batches(network, 2)
    on_device = {name: tensor.to(device) for name, tensor in state.items()}
    score = zico_score(network, architecture, on_device, batches)
    full_score = zico_score(network, network.full_architecture(), state, batches)
    assert score != full_score
    assert score == pytest.approx(zico_score(network, architecture, on_device, batches[::-1]), rel=1e-4)
    names = list_scored_tensors(network, architecture)
    assert {"stem.weight", "head.weight", "section0.block0.layer2.weight"} <= set(names)
    assert not {"head.bias", "norm.weight", "norm.bias"} & set(names)


def test_padding_has_no_gradient() -> None:
    network = network_of(MLP)
    state, full = build_module(network, network.full_architecture()).state_dict(), network.full_architecture()
    batches = draw_batches(network, 2)
    padded = [
        (torch.cat([inputs, inputs + 1]), torch.cat([labels, torch.full_like(labels, -1)]))
        for inputs, labels in batches
    ]
    assert zico_score(network, full, state, padded) == pytest.approx(
        zico_score(network, full, state, batches), rel=1e-5
    )


def test_zero_residual_layers_hide_the_layers_before_them() -> None:
    network = network_of(MLP)
    batches, full = draw_batches(network, 2), network.full_architecture()
    shown = zico_score(network, full, build_module(network, full).state_dict(), batches)
    assert zico_score(network, full, init_state(network, 0), batches) < shown
