"""A person says what of a recorded network may be cut."""

import pytest
import torch
from elastic.recorded_cases import Joined, Residual
from torch import Tensor, nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.recording.cuts import Cuts
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.recording.record import unpack_record
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Explicit, Prefix, Roll


def make_blocks() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def test_axes_that_are_kept_stay_whole_with_the_reason() -> None:
    family = record_network(make_blocks(), (1, 6, 6), cuts=Cuts(keep=("1.*",)))
    assert set(network_of(family).axes) == {"0", "2.conv", "class"}
    assert unpack_record(family.recording).whole["the settings keep it whole"] == (
        "1.conv.weight[0]", "1.conv.bias[0]", "1.norm.weight[0]", "1.norm.bias[0]", "1.norm.running_mean[0]",
        "1.norm.running_var[0]", "1.last.weight[1]",
    )  # fmt: skip


class Split(nn.Module):
    """Two parts of a layer's outputs, each read by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(5, 10), nn.Linear(3, 4), nn.Linear(7, 6)
        self.head = nn.Linear(10, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = self.first(inputs).split([3, 7], 1)
        logits: Tensor = self.head(torch.relu(torch.cat([self.left(left), self.right(right)], 1)))
        return logits


def test_axes_have_the_same_names_whatever_is_kept() -> None:
    sizes = {"first": 3, "first 2": 7, "left": 4, "right": 6, "class": 3}
    for keep in ((), ("left",), ("first",), ("*",)):
        network = network_of(record_network(Split(), (5,), cuts=Cuts(keep=keep)))
        cut = {name for name in sizes if name not in keep and "*" not in keep} | {"class"}
        assert {name: axis.size for name, axis in network.axes.items()} == {
            name: sizes[name] for name in sizes if name in cut
        }


def test_a_concatenation_may_have_parts_that_are_kept() -> None:
    network = network_of(record_network(Joined(), (6,), cuts=Cuts(keep=("left",))))
    assert network.shapes(Architecture(axes=(("right", Prefix(size=2)),)))["hidden.weight"] == (10, 6)
    whole = network_of(record_network(Joined(), (6,), cuts=Cuts(keep=("left", "right"))))
    assert (set(whole.axes), whole.sums) == ({"hidden", "class"}, {})


def test_only_some_blocks_can_be_left_out() -> None:
    module = make_blocks().eval()
    network = network_of(record_network(module, (1, 6, 6), cuts=Cuts(blocks=("2",))))
    assert [block.name for block in network.blocks] == ["2"]
    submodel = build_module(network, Architecture()).eval()
    submodel.load_state_dict(
        {name: tensor for name, tensor in module.state_dict().items() if name in submodel.state_dict()}
    )
    images = torch.randn(2, 1, 6, 6)
    expected = nn.Sequential(*(layer for name, layer in module.named_children() if name != "2"))
    assert torch.equal(submodel(images), expected(images))


def test_no_block_can_be_left_out() -> None:
    assert not network_of(record_network(make_blocks(), (1, 6, 6), cuts=Cuts(blocks=()))).blocks


def test_channels_are_cut_in_groups_where_their_number_is_a_multiple() -> None:
    module = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    network = network_of(record_network(module, (4,), cuts=Cuts(granularity=4)))
    assert {name: axis.granularity for name, axis in network.axes.items()} == {"0": 4, "2": 1, "class": 3}


def test_no_axis_keeps_fewer_channels_than_the_settings_say() -> None:
    module = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    network = network_of(record_network(module, (4,), cuts=Cuts(granularity=4, min_width=7)))
    assert {name: axis.least for name, axis in network.axes.items()} == {"0": 7, "2": 6, "class": 1}
    smallest, *_ = uniform_space(network, (0.1, 0.5, 1.0))
    assert smallest.axes == (("0", Prefix(size=8)),), "whole groups, and all of an axis with fewer channels"
    sizes = {dict(own.axes)["0"] for gene in search_space(network).genes for own in gene.options if own.axes}
    assert sizes == {Prefix(size=8)}
    for kept in (Prefix(size=4), Roll(start=4, size=4), Explicit(indices=(0, 1, 2, 3))):
        with pytest.raises(ConfigError, match="a submodel keeps 4 of axis '0', but must keep 7 or more"):
            network.check(Architecture(axes=(("0", kept),)))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (
            Cuts(keep=("0", "nothing")),
            r"keep names 'nothing', but the network has \['0', '1.conv', '2.conv'\]",
        ),
        (Cuts(blocks=("3.*",)), r"blocks names '3\.\*', but the network has \['1', '2'\]; name some of these"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(cuts: Cuts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record_network(make_blocks(), (1, 6, 6), cuts=cuts)


def test_a_granularity_below_1_is_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="granularity is 0"):
        Cuts(granularity=0)
