import dataclasses

import pytest
import torch
from elastic.elastic_cases import CONFIGS, CONVOLUTIONAL, RESNET, random_state
from elastic.grouped_network import record_grouped_network
from torch import Tensor

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.network import Family, Network
from subfleet.elastic.permuting import permute, rank_indices
from subfleet.protocol.errors import ConfigError


def random_orders(network: Network, seed: int) -> dict[str, tuple[int, ...]]:
    """Whole groups in another order, and another order inside each."""
    generator = torch.Generator().manual_seed(seed)
    orders = {}
    for name, axis in network.axes.items():
        if axis.kind not in ("class", "kernel"):
            groups = torch.randperm(axis.size // axis.granularity, generator=generator)
            inside = torch.randperm(axis.granularity, generator=generator)
            orders[name] = tuple((groups[:, None] * axis.granularity + inside).flatten().tolist())
    return orders


def logits(network: Network, state: dict[str, Tensor], *, training: bool) -> Tensor:
    module = build_module(network, network.full_architecture()).double().train(training)
    module.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    shape = (3, *network.config.input_shape)
    with torch.no_grad():
        result: Tensor = module(torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.TYPE} {config.norm}")
def test_permuting_every_axis_alike_keeps_the_logits(config: Family, training: bool) -> None:
    network = network_of(config)
    state = random_state(network, 2)
    moved = permute(network, state, random_orders(network, 3))
    assert any(not torch.equal(moved[name], state[name]) for name in state)
    expected = logits(network, state, training=training)
    torch.testing.assert_close(logits(network, moved, training=training), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (RESNET, "section1.block2.layer2.weight"),
        (CONVOLUTIONAL["mobilenet_v3"], "section2.block0.layers.squeeze.excite.weight"),
    ],
)
def test_a_tensor_left_in_its_old_order_is_seen(config: Family, tensor: str) -> None:
    network = network_of(config)
    state = random_state(network, 2)
    moved = permute(network, state, random_orders(network, 3)) | {tensor: state[tensor]}
    expected = logits(network, state, training=False)
    assert not torch.allclose(logits(network, moved, training=False), expected, rtol=1e-3)


def test_groups_of_a_grouped_convolution_move_together() -> None:
    network = record_grouped_network()
    state = random_state(network, 5)
    moved = permute(network, state, {"reduce": (2, 0, 1), "start": (4, 1, 0, 3, 2)})
    assert torch.equal(moved["reduce.weight"][:2], state["reduce.weight"][4:6][:, [4, 1, 0, 3, 2]])
    expected = logits(network, state, training=False)
    torch.testing.assert_close(logits(network, moved, training=False), expected, rtol=1e-9, atol=1e-9)


def test_the_most_important_indices_come_first() -> None:
    network = network_of(dataclasses.replace(RESNET, norm="none", group_size=1))
    state = random_state(network, 0)
    decl = network.tensors["section0.block0.layer1.weight"]
    state[decl.name][5] += 100
    state[decl.name][3] -= 50
    assert rank_indices(network, state)["section0.block0.inner"][:2] == (5, 3)
    moved = permute(network, state, rank_indices(network, state))
    assert torch.equal(
        moved[decl.name][:2], state[decl.name][[5, 3]][:, list(rank_indices(network, state)["section0.stream"])]
    )
    again = rank_indices(network, moved)
    assert all(order == tuple(range(len(order))) for order in again.values())


def test_importance_counts_every_tied_tensor_and_no_running_statistics() -> None:
    network = network_of(CONVOLUTIONAL["batch mlp"])
    state = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    for name, index, value in (
        ("section1.block0.norm2.running_var", 4, 9.0),
        ("section1.block0.norm2.bias", 3, 1.5),
        ("section1.block0.layer1.weight", 1, 1.0),
        ("section1.block0.layer2.weight", (slice(None), 2), 0.5),
    ):
        state[name][index] = value
    # Squares of 4 ones, of 1.5, and of 6 halves.
    assert rank_indices(network, state)["section1.block0.inner"] == (1, 3, 2, 0, 4)


def test_groups_stay_whole() -> None:
    network = network_of(RESNET)
    state = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    state["norm.weight"][9] = 1.0
    assert rank_indices(network, state)["section1.stream"] == (8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7)


def test_some_tensors_are_permuted_as_they_are_among_all() -> None:
    network = network_of(RESNET)
    state, orders = random_state(network, 2), random_orders(network, 3)
    whole = permute(network, state, orders)
    some = {name: tensor for name, tensor in state.items() if name.endswith("weight")}
    assert {name: tensor.tolist() for name, tensor in permute(network, some, orders).items()} == {
        name: whole[name].tolist() for name in some
    }
    with pytest.raises(ConfigError, match="tensor 'elsewhere' is to be permuted"):
        permute(network, {"elsewhere": state["norm.weight"]}, orders)


@pytest.mark.parametrize(
    ("orders", "reason"),
    [
        ({"section0.stream": (0, 1, 2, 3)}, "must have all 8"),
        ({"section0.stream": (0, 4, 1, 5, 2, 6, 3, 7)}, "whole aligned groups"),
        ({"class": (1, 0, 2)}, "in order"),
        ({"nowhere": (0,)}, "names the axis"),
    ],
)
def test_a_wrong_order_is_refused(orders: dict[str, tuple[int, ...]], reason: str) -> None:
    network = network_of(RESNET)
    with pytest.raises(ConfigError, match=reason):
        permute(network, random_state(network, 0), orders)
