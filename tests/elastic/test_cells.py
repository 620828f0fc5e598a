"""Networks that grow cell by cell keep their outputs: FedTrans' invariants T1 and T7."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from elastic.elastic_cases import CONFIGS, CONVOLUTIONAL, LAYERED, MLP, RESNET, relaxed
from elastic.test_growing import deepen, inputs_of, shapes_of
from elastic.token_cases import LSTM, TOKEN_CONFIGS, VIT
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples, mostly_long
from torch import Tensor

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.families import preset
from subfleet.elastic.families.records.plain import DsCnn, Vgg
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.growing import can_deepen, count_cell_parameters, deepen_cell, find_changed_cells, widen_cells
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.lineage import Replicated
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import Replication, size_in
from subfleet.protocol.errors import ConfigError

EVERY = (*CONFIGS, *LAYERED.values(), *TOKEN_CONFIGS)
CHAINS = (Vgg, DsCnn)
PUBLISHED = ("mobilenet_v2", "mobilenet_v3_small", "efficientnet_v2_s", "resnet18", "vit_tiny")
_declared = cache(network_of)


@dataclass(frozen=True, kw_only=True)
class Morph:
    """A network before and after growth, its widened cells, and its cells that new ones follow."""

    before: Network
    after: Network
    wider: tuple[str, ...]
    followed: tuple[str, ...]


@st.composite
def morphs(draw: st.DrawFn, configs: Sequence[Family] = EVERY) -> Morph:
    """Any network, with up to three cells widened or deepened in turn."""
    before = _declared(draw(st.sampled_from(configs)))
    config, wider, followed = before.config, set[str](), set[str]()
    for _ in range(draw(st.integers(1, 3))):
        network = network_of(config)
        cell = draw(st.sampled_from(network.cells))
        widen: bool = draw(st.booleans())
        if cell.axes and widen:
            config = widen_cells(config, (cell.name,), draw(st.sampled_from([1.1, 1.5, 2.0, 3.0])))
            wider.add(cell.name)
        elif can_deepen(network, cell):
            config = deepen_cell(config, cell, draw(st.integers(1, 2)))
            followed.add(cell.name)
    return Morph(before=before, after=network_of(config), wider=tuple(wider), followed=tuple(followed))


def weights_of(network: Network, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: 0.3 * torch.randn(decl.shape, generator=generator, dtype=torch.float64)
        for name, decl in network.tensors.items()
    }
    return {
        name: 1 + tensor.abs() if network.tensors[name].role in ("variance", "gain") else tensor
        for name, tensor in state.items()
    }


def outputs(network: Network, state: dict[str, Tensor], *, training: bool, count: int = 6) -> Tensor:
    module = build_module(network, network.full_architecture()).to(next(iter(state.values())).dtype)
    module.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    inputs = inputs_of(network, count)
    with torch.no_grad():
        result: Any = module.train(training)(inputs if network.symbols else inputs.to(next(module.parameters()).dtype))
    prediction: Tensor = result[-1] if isinstance(result, tuple) else result
    return prediction


def grow(
    morph: Morph, state: dict[str, Tensor], seed: int = 1, noise: float = 0.0, *, shares: bool = False
) -> dict[str, Tensor]:
    stream = random.Random(seed)
    replication = Replication.draw(morph.after, size_in(morph.after, morph.before), stream)
    weighted = replication.draw_shares(stream) if shares else replication
    parts = tuple(sorted(weighted.shares.items()))
    replicated = Replicated(sources=tuple(sorted(weighted.sources.items())), shares=parts, noise=noise)
    return inherit(replicated, morph.after, morph.before, state, seed=seed)


def check_outputs(morph: Morph, *, shares: bool) -> None:
    """T1, in float64 and float32; also in training, except for plain chains with batch norms."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        state = {name: tensor.to(dtype) for name, tensor in weights_of(morph.before).items()}
        grown = grow(morph, state, shares=shares)
        assert {tensor.dtype for tensor in grown.values()} == {dtype}
        for training in (False, True):
            chained = isinstance(morph.before.config, CHAINS) and morph.before.config.norm == "batch"
            if training and chained and morph.followed:
                continue
            expected = outputs(morph.before, state, training=training)
            actual = outputs(morph.after, grown, training=training)
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


def check_changes(morph: Morph) -> None:
    """T7: exactly the named cells change."""
    before, after = count_cell_parameters(morph.before), count_cell_parameters(morph.after)
    if not morph.wider and not morph.followed:
        assert morph.before == morph.after
        return
    costs = [
        estimate_cost(network, network.full_architecture(), batch_size=1).forward_macs
        for network in (morph.before, morph.after)
    ]
    assert costs[0] < costs[1]
    assert (len(after) > len(before)) == bool(morph.followed)
    longer = {name for name, axis in morph.before.axes.items() if morph.after.axes[name].size != axis.size}
    named = {axis for cell in morph.after.cells if cell.name in morph.wider for axis in cell.axes}
    assert longer == named & morph.before.axes.keys()
    inserted = tuple(f"{cell.name}." for cell in morph.after.cells if cell.name not in before)
    assert all(name.startswith(inserted) for name in morph.after.axes.keys() - morph.before.axes.keys())


@pytest.mark.slow
@relaxed
@given(morphs(), st.booleans())
def test_a_grown_network_keeps_its_outputs(morph: Morph, shares: bool) -> None:
    check_outputs(morph, shares=shares)


@pytest.mark.slow
@relaxed
@given(morphs())
def test_a_grown_network_costs_more_and_nothing_else_changes(morph: Morph) -> None:
    check_changes(morph)


def find_longer(before: Family, after: Family) -> dict[str, int]:
    """The axes that have another size in a network that grew, and that size."""
    own = network_of(before).axes
    return {name: axis.size for name, axis in network_of(after).axes.items() if axis != own[name]}


@pytest.mark.slow
def test_a_cell_becomes_wider_inside_and_a_layer_of_a_plain_chain_with_its_section() -> None:
    grown = widen_cells(MLP, ["section0.block1"], 1.5)
    assert find_longer(MLP, grown) == {"section0.block1.inner": 12}
    assert shapes_of(grown) == shapes_of(replace(MLP, hidden_widths=(8, 12, 6, 6, 6)))
    assert find_longer(grown, widen_cells(grown, ["section1.block0"], 2)) == {"section1.block0.inner": 12}
    vgg = CONVOLUTIONAL["vgg"]
    wider = widen_cells(vgg, ["section1.block1", "section1.block2"], 2)
    assert shapes_of(wider) == shapes_of(replace(vgg, widths=(4, 12)))
    ds_cnn = CONVOLUTIONAL["ds_cnn"]
    assert isinstance(ds_cnn, DsCnn)
    assert shapes_of(widen_cells(replace(ds_cnn, stem_width=0), ["section0.block0"], 2)) == shapes_of(
        replace(ds_cnn, widths=(8, 6), stem_width=4)
    )
    assert find_longer(VIT, widen_cells(VIT, ["section1.block0"], 2)) == {
        "section1.block0.heads": 4, "section1.block0.hidden": 10,
    }  # fmt: skip
    squeezed = CONVOLUTIONAL["mobilenet_v3"]
    assert find_longer(squeezed, widen_cells(squeezed, ["section2.block0"], 1.1)) == {
        "section2.block0.inner": 9, "section2.block0.squeezed": 4,
    }  # fmt: skip


def test_a_factor_is_exact_and_goes_up_to_whole_groups() -> None:
    """1.1 times 10 is 11, although 1.1 as a float is slightly larger."""
    plain = Mlp(input_shape=(5,), class_count=4, widths=(10,), depths=(1,), norm="none")
    for config, size in ((plain, 11), (replace(plain, norm="group", group_size=5), 15)):
        assert find_longer(config, widen_cells(config, ["section0.block0"], 1.1)) == {"section0.block0.inner": size}


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONVOLUTIONAL["vgg"], CONVOLUTIONAL["ds_cnn"]], ids=lambda config: config.TYPE)
def test_a_new_layer_of_a_chain_with_batch_norms_is_almost_the_identity(config: Family) -> None:
    """Its norm compensates for a ReLU of normal numbers, and so starts closer to its parent than a fresh norm."""
    before = _declared(config)
    morph = Morph(before=before, after=network_of(deepen_cell(config, before.cells[-1])), wider=(), followed=())
    distance, fresh_distance = 0.0, 0.0
    for seed in range(4):
        state = weights_of(before, seed)
        grown = grow(morph, state)
        fresh = dict(grown)
        for name in morph.after.identities:
            if name.endswith("norm.weight") and name not in before.tensors:
                for suffix, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                    key = name.removesuffix("weight") + suffix
                    fresh[key] = torch.full_like(grown[key], value)
        expected = outputs(before, state, training=True, count=64)
        spread = float((expected - expected.mean(dim=0)).norm())
        distance += float((outputs(morph.after, grown, training=True, count=64) - expected).norm()) / spread
        fresh_distance += float((outputs(morph.after, fresh, training=True, count=64) - expected).norm()) / spread
    assert distance < 0.6 * fresh_distance


def test_noise_tells_copies_apart_and_leaves_the_rest() -> None:
    before = _declared(RESNET)
    morph = Morph(before=before, after=network_of(widen_cells(RESNET, ["section0.block1"], 2)), wider=(), followed=())
    state = weights_of(before)
    plain, noisy, again = (grow(morph, state, noise=noise) for noise in (0.0, 0.05, 0.05))
    changed = {name for name in plain if not torch.equal(plain[name], noisy[name])}
    assert changed == {"section0.block1.layer1.weight"}
    (name,) = changed
    width = before.axes["section0.block1.inner"].size
    assert torch.equal(plain[name][:width], noisy[name][:width])
    added = noisy[name][width:] - plain[name][width:]
    assert float(added.std()) == pytest.approx(0.05 * float(plain[name].std()), rel=0.2)
    assert all(torch.equal(noisy[name], again[name]) for name in noisy)
    with pytest.raises(ValueError, match=r"noise is -0\.1, but must be 0 or more"):
        Replicated(noise=-0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(PUBLISHED, "mobilenet_v3_small", "vit_tiny"))
def test_published_networks_grow_as_well(name: str) -> None:
    config = preset(name, input_shape=(3, 32, 32), class_count=10, norm="batch")
    before = _declared(config)
    cells = [cell for cell in before.cells if can_deepen(before, cell)]
    chosen = [cells[index] for index in (1, len(cells) // 2, -1)]
    config = widen_cells(config, [cell.name for cell in chosen if cell.axes], 1.5)
    for cell in chosen:
        config = deepen_cell(config, cell)
    morph = Morph(before=before, after=network_of(config), wider=(), followed=())
    state = weights_of(before)
    expected = outputs(before, state, training=False)
    actual = outputs(morph.after, grow(morph, state), training=False)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


def test_impossible_growth_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"widened by a factor of 1, but it must be above 1"):
        widen_cells(MLP, ["section0.block0"], 1)
    with pytest.raises(
        ConfigError, match=r"cell 'section9\.block0' is to be widened, but the network has the cells \['section0"
    ):
        widen_cells(MLP, ["section9.block0"], 2)
    with pytest.raises(ConfigError, match="has no width of its own; deepen it instead"):
        widen_cells(CONVOLUTIONAL["efficientnet_v2"], ["section0.block1"], 2)
    narrow: Any = replace(CONVOLUTIONAL["mobilenet_v2"], hidden_widths=(6, 4, 10, 12))
    with pytest.raises(ConfigError, match="has no width of its own; deepen it instead"):
        widen_cells(narrow, ["section1.block0"], 2)
    with pytest.raises(ConfigError, match=r"'section1\.block0' changes the shape of its input, so no copy of it can"):
        deepen(MLP, "section1.block0")
    grouped = replace(CONVOLUTIONAL["plain vgg"], norm="group", widths=(4, 4))
    for config, index in ((LSTM, 0), (grouped, 0), (MLP, 2)):
        assert not can_deepen(network_of(config), network_of(config).cells[index])


def check_found_changes(morph: Morph) -> None:
    """The changed cells follow from the two networks alone."""
    wider, deeper = find_changed_cells(morph.before, morph.after)
    before = {cell.name: cell for cell in morph.before.cells}
    assert {*deeper} == {*morph.followed} & before.keys()
    longer = {axis for cell in morph.after.cells if cell.name in morph.wider for axis in cell.axes}
    # Cells that share a width become wider together.
    assert {*wider} == {name for name, cell in before.items() if longer & {*cell.axes}}


@pytest.mark.slow
@examples(15)
@given(morphs())
def test_changed_cells_are_found_from_the_two_networks(morph: Morph) -> None:
    check_found_changes(morph)
