"""Two clients of HeteroFL, against a reference that shares no code with the product."""

import numpy as np
import numpy.typing as npt
import torch
from elastic.elastic_cases import random_change, random_state

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.spaces import uniform_space

CONFIG = PreactResNet(input_shape=(1, 4, 4), class_count=3, widths=(8,), depths=(2,), group_size=4)

Array = npt.NDArray[np.float64]


def reference(old: Array, clients: list[tuple[Array, float]]) -> Array:
    """Leading slices: the weighted mean where a client trained, the old value elsewhere."""
    total, weights = np.zeros_like(old), np.zeros_like(old)
    for change, weight in clients:
        region = tuple(slice(0, size) for size in change.shape)
        total[region] += weight * change
        weights[region] += weight
    new: Array = np.where(weights > 0, old + total / np.maximum(weights, 1e-300), old)
    return new


def test_random_changes_agree_with_the_reference() -> None:
    network = network_of(CONFIG)
    state = random_state(network, 0)
    small, large = uniform_space(network, (0.5, 1))[0], network.full_architecture()
    updates = [(small, random_change(network, small, 1), 2.0), (large, random_change(network, large, 2), 6.0)]
    accumulator = Accumulator(network, state, total_weight=8)
    for architecture, change, weight in updates:
        accumulator.add(architecture, change, weight)
    new = accumulator.finish()
    for name, tensor in state.items():
        clients = [(change[name].double().numpy(), weight) for _, change, weight in updates if name in change]
        np.testing.assert_allclose(new[name].numpy(), reference(tensor.double().numpy(), clients), rtol=1e-6, atol=1e-6)


def test_golden_numbers() -> None:
    network = network_of(CONFIG)
    state = {name: torch.full(decl.shape, 10.0) for name, decl in network.tensors.items()}
    narrow, shallow = uniform_space(network, (0.5,))[-1], uniform_space(network, (1,))[0]
    assert (narrow.name, shallow.name) == ("w1/2 d2", "w1 d1")
    accumulator = Accumulator(network, state, total_weight=4)
    for architecture, value, weight in ((narrow, -1.0, 1.0), (shallow, 1.0, 3.0)):
        accumulator.add(
            architecture,
            {name: torch.full(shape, value) for name, shape in network.shapes(architecture).items()},
            weight,
        )
    new = accumulator.finish()
    both, wide_only, narrow_only, nobody = 10.5, 11.0, 9.0, 10.0
    assert new["norm.weight"].tolist() == [both] * 4 + [wide_only] * 4
    assert new["head.bias"].tolist() == [both] * 3
    assert new["head.weight"].tolist() == [[both] * 4 + [wide_only] * 4] * 3
    assert new["section0.block1.norm1.bias"].tolist() == [narrow_only] * 4 + [nobody] * 4
    block = new["section0.block1.layer1.weight"][:, :, 0, 0].tolist()
    assert block == [[narrow_only] * 4 + [nobody] * 4] * 4 + [[nobody] * 8] * 4
