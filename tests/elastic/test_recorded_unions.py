"""Unions of recorded networks: sizes of one module, which lie in the smallest network that has them all."""

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from elastic.recorded_cases import Residual
from torch import Tensor, nn

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.replication import Replication, size_in
from subfleet.elastic.unions import unite_families
from subfleet.protocol.errors import ConfigError


class Stages(nn.Module):
    """Two stages of residual blocks; the last ones of a stage may be missing in a smaller network."""

    def __init__(self, width: int, depths: Sequence[int], activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width + 4, 3, stride=2)
        self.first = nn.Sequential(*(Residual(width) for _ in range(depths[0])))
        self.second = nn.Sequential(*(Residual(width + 4) for _ in range(depths[1])))
        self.head, self.activation = nn.Linear(width + 4, 3), activation

    def forward(self, images: Tensor) -> Tensor:
        features = self.second(self.activation(self.down(self.first(self.activation(self.stem(images))))))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


@cache
def stages(width: int, *depths: int) -> Recorded:
    return record_network(Stages(width, depths), (1, 7, 7))


def compute(network: Network, state: dict[str, Tensor], images: Tensor) -> Tensor:
    module = build_module(network, network.full_architecture()).to(images.dtype).eval()
    module.load_state_dict(state)
    with torch.no_grad():
        logits: Tensor = module(images)
    return logits


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_every_network_is_a_submodel_of_the_union(order: tuple[int, ...]) -> None:
    """The first has the most blocks in one stage, the second in the other, the third is the widest."""
    families = (stages(8, 3, 1), stages(6, 1, 2), stages(12, 2, 1))
    union = network_of(unite_families([families[index] for index in order]))
    assert [block.name for block in union.blocks] == ["first.0", "first.1", "first.2", "second.0", "second.1"]
    assert {union.axes[name].size for name in ("stem", "down")} == {12, 16}
    state, images = init_state(union, 1), torch.randn(3, 1, 7, 7)
    for family in families:
        network = network_of(family)
        size = size_in(union, network)
        own = extract(union, size, state)
        assert own.keys() == network.tensors.keys()
        submodel = build_module(union, size).eval()
        submodel.load_state_dict(own)
        assert torch.equal(submodel(images), compute(network, own, images))


def test_a_union_is_the_same_in_every_order() -> None:
    families = (stages(8, 3, 1), stages(6, 1, 2), stages(12, 2, 1))
    shapes = [
        {name: decl.shape for name, decl in network_of(unite_families(own)).tensors.items()}
        for own in (families, families[::-1])
    ]
    assert shapes[0] == shapes[1]


def test_a_network_that_is_copied_into_the_union_computes_the_same() -> None:
    """FedADP widens and deepens a network to the union by copies."""
    small = network_of(stages(6, 1, 2))
    union = network_of(unite_families([stages(12, 2, 1), small.config]))
    state, first = (
        {name: tensor.double() for name, tensor in init_state(network, 3).items()} for network in (small, union)
    )
    grown = Replication.draw(union, size_in(union, small), random.Random(0)).grow(state, first)
    images = torch.randn(3, 1, 7, 7).double()
    torch.testing.assert_close(compute(union, grown, images), compute(small, state, images), rtol=1e-12, atol=1e-12)


def test_the_union_with_itself_is_the_network() -> None:
    family = stages(8, 2, 2)
    assert unite_families([family, family]) == family


def test_networks_of_other_code_have_no_union() -> None:
    other = record_network(Stages(8, (1, 1), nn.functional.gelu), (1, 7, 7))
    with pytest.raises(ConfigError, match=r"no union, because in one of them layer '' calls torch\.\S+ differently"):
        unite_families([stages(8, 2, 1), other])


def test_a_block_without_neighbours_cannot_be_joined() -> None:
    with pytest.raises(ConfigError, match=r"has the block 'second\.0', but another one has no block in that part"):
        unite_families([stages(8, 3, 0), stages(8, 1, 1)])
