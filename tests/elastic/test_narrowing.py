"""FedADP's conversion of a larger network into a smaller one, as printed."""

import random
from dataclasses import replace

import torch

from subfleet.elastic.building import network_of
from subfleet.elastic.exchanges import Narrowing
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.replication import Replication, size_in

SMALL = Mlp(input_shape=(5,), class_count=4, widths=(4,), depths=(1,), norm="none")
LARGE = replace(SMALL, widths=(8,))


def make_narrowing() -> Narrowing:
    network = network_of(LARGE)
    return Narrowing(replication=Replication.draw(network, size_in(network, network_of(SMALL)), random.Random(1)))


def test_the_readers_of_removed_neurons_are_shared_out_among_the_others() -> None:
    """Algorithm 3 for the weights that read a layer; the layer itself keeps its first neurons."""
    narrowing = make_narrowing()
    state = {name: torch.randn(decl.shape) for name, decl in narrowing.replication.network.tensors.items()}
    small = narrowing.down(state)
    head, stem = state["head.weight"], state["stem.weight"]
    torch.testing.assert_close(small["head.weight"], head[:, :4] + head[:, 4:].sum(1, keepdim=True) / 4)
    assert torch.equal(small["stem.weight"], stem[:4])
    torch.testing.assert_close(small["head.weight"].sum(1), head.sum(1), msg="nothing that is read is lost")


def test_a_change_comes_back_as_by_copies_and_down_after_up_is_another_network() -> None:
    narrowing = make_narrowing()
    own = {name: torch.randn(decl.shape) for name, decl in network_of(SMALL).tensors.items()}
    up = narrowing.up(own)
    assert all(torch.equal(tensor, narrowing.replication.up(own)[name]) for name, tensor in up.items())
    assert narrowing.key != narrowing.replication.key
    assert not torch.allclose(narrowing.down(up)["head.weight"], own["head.weight"])
