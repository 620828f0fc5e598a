import dataclasses

import pytest
import torch
from elastic.elastic_cases import CONFIGS, MLP, RESNET, networks_and_architectures, relaxed
from hypothesis import given

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Explicit, IndexSet, Prefix, Roll


@pytest.mark.slow
@relaxed
@given(case=networks_and_architectures())
def test_a_submodels_module_has_exactly_the_shapes_of_its_maps(case: tuple[Network, Architecture]) -> None:
    network, architecture = case
    module = build_module(network, architecture)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    local = extract(network, architecture, init_state(network, 0))
    assert shapes == network.shapes(architecture) == {name: tuple(tensor.shape) for name, tensor in local.items()}
    assert list(shapes) == list(network.shapes(architecture))
    logits = module(torch.zeros(2, *network.config.input_shape))
    assert logits.shape == (2, network.config.class_count)
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in module.parameters())


def test_the_resnet_is_the_one_that_its_description_draws() -> None:
    network = network_of(RESNET)
    assert [block.name for block in network.blocks] == ["section0.block1", "section1.block1", "section1.block2"]
    shapes = network.shapes(network.full_architecture())
    assert shapes["stem.weight"] == (8, 2, 3, 3)
    assert shapes["section1.block0.layer1.weight"] == (12, 8, 3, 3)
    assert shapes["section1.block0.shortcut.weight"] == (12, 8, 1, 1)
    assert [name for name in shapes if "shortcut" in name] == ["section1.block0.shortcut.weight"]
    assert [name for name in shapes if name.endswith("bias") and "norm" not in name] == ["head.bias"]
    assert network.tensors["section1.block2.layer2.weight"].axes[:2] == ("section1.stream", "section1.block2.inner")


@pytest.mark.parametrize("config", CONFIGS)
def test_the_full_architecture_keeps_everything(config: Family) -> None:
    network = network_of(config)
    assert network.shapes(network.full_architecture()) == {name: decl.shape for name, decl in network.tensors.items()}
    assert len(network.shapes(Architecture())) < len(network.tensors)


def test_first_weights_depend_on_the_seed_and_the_tensors_name_alone() -> None:
    network, deeper = network_of(RESNET), network_of(dataclasses.replace(RESNET, depths=(2, 4)))
    first, again, other, more = (
        init_state(n, seed) for n, seed in ((network, 7), (network, 7), (network, 8), (deeper, 7))
    )
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], more[name]) for name in first)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(12))
    assert torch.equal(first["head.bias"], torch.zeros(3))
    assert not first["section1.block2.layer2.weight"].any()
    spread = init_state(network_of(dataclasses.replace(RESNET, widths=(64, 64))), 0)["section1.block1.layer1.weight"]
    assert float(spread.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"class_count": 0}, "class_count"),
        ({"input_shape": ()}, "input_shape"),
        ({"input_shape": (64,)}, "channels, height, width"),
        ({"input_shape": (0, 8, 8)}, "input_shape"),
        ({"widths": (8,)}, "one entry for each section"),
        ({"widths": (), "depths": ()}, "widths is empty, but must have 1 or more; depths is empty"),
        ({"widths": (8, 10)}, "multiples of group_size 4"),
        ({"depths": (2, 0)}, r"depths\[1\] is 0, but must be 1 or more"),
        ({"input_shape": (1, 2, 2), "group_size": 1}, "groups of a single number"),
    ],
)
def test_a_wrong_configuration_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        network_of(dataclasses.replace(RESNET, **change))  # type: ignore[arg-type]  # each case replaces one field


def test_batches_of_one_number_cannot_be_normalised() -> None:
    with pytest.raises(ConfigError, match="groups of a single number each"):
        network_of(dataclasses.replace(MLP, group_size=1))


@pytest.mark.parametrize(
    ("index_set", "reason"),
    [
        (Prefix(size=6), "whole aligned groups of 4"),
        (Prefix(size=16), "only 12"),
        (Roll(start=2, size=4), "whole aligned groups of 4"),
        (Roll(start=0, size=16), "only 12"),
        (Roll(start=12, size=4), "beyond its size 12"),
        (Roll(start=2**62, size=4), "beyond its size 12"),  # without listing what lies between
        (Explicit(indices=(0, 1, 2, 12)), "beyond its size 12"),
        (Explicit(indices=(0, 1, 2, 4)), "whole aligned groups of 4"),
        (Explicit(indices=(0, 4, 1, 5, 2, 6, 3, 7)), "whole aligned groups of 4"),
        (Explicit(indices=(0, 1, 2, 3, 4)), "whole aligned groups of 4"),
    ],
)
def test_indices_that_an_axis_cannot_keep_are_refused(index_set: IndexSet, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        network_of(RESNET).check(Architecture(axes=(("section1.stream", index_set),)))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        (Architecture(axes=(("section7.stream", Prefix(size=4)),)), "names the axis"),
        (Architecture(axes=(("class", Prefix(size=2)),)), "all 3 in order"),
        (Architecture(axes=(("class", Explicit(indices=(1, 0, 2))),)), "all 3 in order"),
        (Architecture(axes=(("class", Roll(start=1, size=3)),)), "all 3 in order"),
        (Architecture(blocks=("section0.block0",)), "in order"),
        (Architecture(blocks=("section1.block2", "section0.block1")), "in order"),
        (Architecture(choices=(("op", ("conv",)),)), "no choices"),
    ],
)
def test_an_architecture_of_another_network_is_refused(architecture: Architecture, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        network_of(RESNET).shapes(architecture)


def test_callers_may_change_the_shapes_that_they_are_given() -> None:
    network = network_of(MLP)
    size = network.full_architecture()
    before = dict(network.shapes(size))
    network.shapes(size).clear()
    assert network.shapes(size) == before
