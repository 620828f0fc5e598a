"""Grafting and scaling: FedFA's invariants F1 to F6, and the drift of its L2 norm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL, MLP, RESNET, architectures, random_change, random_state
from hypothesis import assume, given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.grafting import graft, graft_change, is_graftable
from subfleet.elastic.maps import extract, tensor_maps
from subfleet.elastic.network import Family, Network
from subfleet.elastic.scaling import compute_scale_factors, scale_change
from subfleet.elastic.spaces import uniform_space
from subfleet.elastic.technique_settings import NORMS, Central, WeightNorm
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Explicit, Prefix, Roll
from subfleet.testing.submodels import find_held_elements, have_same_bits

DEEP = replace(MLP, widths=(8, 6), depths=(4, 3))
State = Mapping[str, Tensor]
EVERY_NORM: tuple[WeightNorm, ...] = ("l2", "rms", "common")


def with_depths(network: Network, *depths: int, rate: float = 1.0) -> Architecture:
    """The submodel with this many first blocks in each section, including the block that is always kept."""
    name = f" d{'-'.join(map(str, depths))}"
    return next(architecture for architecture in uniform_space(network, (rate,)) if architecture.name.endswith(name))


def zeros(network: Network, architecture: Architecture) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in network.shapes(architecture).items()}


def aggregate_as_in_the_paper(
    network: Network,
    state: State,
    clients: Sequence[tuple[Architecture, State, float]],
    norm: WeightNorm | None,
) -> dict[str, Tensor]:
    """Algorithm 1 without local training: graft, scale (unless norm is None) and average by samples."""
    grafts = [graft(network, architecture) for architecture, _, _ in clients]
    changes = [
        graft_change(network, client_graft, state, change)
        for client_graft, (_, change, _) in zip(grafts, clients, strict=True)
    ]
    if norm is not None:
        received = [extract(network, client_graft.architecture, state) for client_graft in grafts]
        trained = [
            {name: old[name] + change[name] for name in old} for old, change in zip(received, changes, strict=True)
        ]
        factors = compute_scale_factors(
            network, [(g.architecture, t) for g, t in zip(grafts, trained, strict=True)], norm=norm
        )
        changes = [scale_change(*parts) for parts in zip(received, changes, factors, strict=True)]
    accumulator = Accumulator(network, state, total_weight=sum(weight for _, _, weight in clients))
    for client_graft, change, (_, _, weight) in zip(grafts, changes, clients, strict=True):
        accumulator.add(client_graft.architecture, change, weight)
    return accumulator.finish()


def block_of(state: State, section: int, position: int) -> dict[str, Tensor]:
    prefix = f"section{section}.block{position}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def test_a_copy_is_the_last_kept_block_with_the_axes_of_its_own() -> None:
    network = network_of(DEEP)
    architecture = Architecture(
        axes=(
            ("section0.block1.inner", Explicit(indices=(2, 3, 0, 1))),
            ("section0.block2.inner", Prefix(size=2)),
            ("section0.stream", Roll(start=6, size=4)),
        ),
        blocks=("section0.block1", "section1.block2"),
    )
    client_graft = graft(network, architecture)
    assert client_graft.architecture.blocks == tuple(block.name for block in network.blocks)
    for position in (1, 2, 3):
        inner = client_graft.architecture.make_index_set(f"section0.block{position}.inner")
        assert inner == Explicit(indices=(2, 3, 0, 1))
        assert client_graft.sources[f"section0.block{position}.layer1.weight"] == "section0.block1.layer1.weight"
    assert client_graft.sources["section1.block1.layer1.weight"] == "section1.block2.layer1.weight"
    shapes = network.shapes(architecture)
    assert {name: shapes[source] for name, source in client_graft.sources.items()} == network.shapes(
        client_graft.architecture
    )


@pytest.mark.slow
@examples(6)
@given(data=st.data())
def test_a_grafted_submodel_is_a_submodel_that_holds_its_own_tensors(data: st.DataObject) -> None:
    configs: tuple[Family, ...] = (DEEP, RESNET, *CONVOLUTIONAL.values())
    network = network_of(data.draw(st.sampled_from(configs)))
    assume(_has_alike_blocks(network))
    architecture = data.draw(architectures(network))
    assume(is_graftable(network, architecture))
    client_graft = graft(network, architecture)
    own, shapes = network.shapes(architecture), network.shapes(client_graft.architecture)
    assert list(client_graft.sources) == list(shapes)
    assert {name: source for name, source in client_graft.sources.items() if name in own} == {
        name: name for name in own
    }
    assert all(own[source] == shapes[name] for name, source in client_graft.sources.items())
    assert client_graft.architecture.blocks == tuple(block.name for block in network.blocks)


def test_a_section_of_one_block_is_grafted_where_that_is_like_the_others() -> None:
    """FedFA claims that every block is trained by many clients, however shallow some of them are."""
    network = network_of(replace(MLP, widths=(8,), depths=(3,)))
    architecture = with_depths(network, 1, rate=0.5)
    assert architecture.blocks == ()
    client_graft = graft(network, architecture)
    assert client_graft.architecture.blocks == ("section0.block1", "section0.block2")
    for position in (1, 2):
        assert client_graft.sources[f"section0.block{position}.layer1.weight"] == "section0.block0.layer1.weight"
        assert client_graft.architecture.make_index_set(
            f"section0.block{position}.inner"
        ) == architecture.make_index_set("section0.block0.inner")
    assert client_graft.architecture.make_index_set("section0.stream") == architecture.make_index_set("section0.stream")


def test_a_section_of_one_block_that_is_unlike_the_others_is_refused() -> None:
    """The first block of a section reads other channels and has a shortcut, so nothing could be grafted."""
    network = network_of(replace(RESNET, depths=(2, 2)))
    architecture = with_depths(network, 2, 1)
    assert not is_graftable(network, architecture)
    with pytest.raises(ConfigError, match="besides the section's first"):
        graft(network, architecture)


def _has_alike_blocks(network: Network) -> bool:
    """Whether the blocks of each section that can be left out have tensors of the same shapes."""
    shapes = {
        block: [decl.shape for decl in network.tensors.values() if decl.part == block.name] for block in network.blocks
    }
    return all(
        shapes[first] == shapes[second] for first in shapes for second in shapes if first.section == second.section
    )


def test_a_full_submodel_has_nothing_to_graft() -> None:
    network = network_of(DEEP)
    client_graft = graft(network, network.full_architecture())
    assert client_graft.architecture == network.full_architecture()
    assert all(name == source for name, source in client_graft.sources.items())


def test_blocks_that_are_not_alike_are_refused() -> None:
    network = network_of(DEEP)
    name = "section0.block2.layer1.weight"
    wider = replace(network.tensors[name], shape=(9, 8))
    other = replace(network, tensors={**network.tensors, name: wider})
    with pytest.raises(ConfigError, match=r"cannot replace 'section0\.block2'"):
        graft(other, with_depths(network, 2, 3))


def test_grafting_gives_every_block_of_the_common_width_to_every_client() -> None:
    network = network_of(DEEP)
    clients = [
        (with_depths(network, 2, 2, rate=0.5), 3),
        (with_depths(network, 3, 2), 5),
        (network.full_architecture(), 7),
    ]
    grafted_weights = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    plain_weights = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    for architecture, weight in clients:
        for target, submodel in (
            (grafted_weights, graft(network, architecture).architecture),
            (plain_weights, architecture),
        ):
            for name, tensor_map in tensor_maps(network, submodel).items():
                tensor_map.scatter(torch.full(network.shapes(submodel)[name], float(weight)), target[name])
    common = find_held_elements(network, with_depths(network, 4, 3, rate=0.5))
    for name in network.tensors:
        assert bool((grafted_weights[name][common[name]] == 15).all()), name
    deepest = plain_weights["section0.block3.layer1.weight"]
    assert bool((deepest == 7).all())


def test_extracting_the_clients_depth_gives_its_own_blocks_back() -> None:
    network = network_of(DEEP)
    state, architecture = random_state(network, 0), with_depths(network, 2, 3, rate=0.5)
    change = random_change(network, architecture, 1)
    client_graft = graft(network, architecture)
    grafted = graft_change(network, client_graft, state, change)
    assert have_same_bits({name: grafted[name] for name in change}, change)
    new = aggregate_as_in_the_paper(network, state, [(architecture, change, 4.0)], None)
    trained = {name: tensor + change[name] for name, tensor in extract(network, architecture, state).items()}
    back = extract(network, architecture, new)
    for name, tensor in trained.items():
        torch.testing.assert_close(back[name], tensor, atol=1e-6, rtol=0)
    for position in (1, 2, 3):
        # Inner channels of a deeper block are its own; those that the client grafted hold its last block.
        copies = {name: extract(network, client_graft.architecture, new)[name] for name in client_graft.sources}
        for suffix, tensor in block_of(copies, 0, position).items():
            torch.testing.assert_close(tensor, trained[f"section0.block1.{suffix}"], atol=1e-6, rtol=0)


def test_without_training_a_block_becomes_the_mean_of_the_clients_last_blocks() -> None:
    network = network_of(DEEP)
    state = random_state(network, 0)
    clients = [(with_depths(network, depth, 3), float(weight)) for depth, weight in ((2, 3), (3, 5), (4, 2))]
    new = aggregate_as_in_the_paper(
        network, state, [(architecture, zeros(network, architecture), w) for architecture, w in clients], None
    )
    for position in (1, 2, 3):
        for suffix, tensor in block_of(new, 0, position).items():
            expected = sum(
                weight * state[f"section0.block{min(position, depth - 1)}.{suffix}"].double()
                for depth, (_, weight) in zip((2, 3, 4), clients, strict=True)
            )
            assert isinstance(expected, Tensor)
            torch.testing.assert_close(tensor, (expected / 10).float(), atol=1e-6, rtol=0)
    assert have_same_bits(block_of(new, 0, 0), block_of(state, 0, 0))
    assert have_same_bits(block_of(new, 1, 1), block_of(state, 1, 1))


@pytest.mark.parametrize("norm", EVERY_NORM)
def test_equal_clients_are_scaled_by_exactly_one(norm: WeightNorm, device: torch.device) -> None:
    network = network_of(RESNET)
    clients = [(network.full_architecture(), _to_device(device, random_state(network, 1)))] * 3
    factors = compute_scale_factors(network, clients, norm=norm)
    assert all(factor == 1 for client_factors in factors for factor in client_factors.values())
    change = random_change(network, network.full_architecture(), 2)
    assert have_same_bits(scale_change(random_state(network, 1), change, factors[0]), change)


@pytest.mark.parametrize("norm", EVERY_NORM)
@pytest.mark.parametrize("central", ["absolute", "below", "between"])
def test_the_factor_is_the_mean_norm_over_the_own(norm: WeightNorm, central: Central) -> None:
    network = network_of(MLP)
    states = [random_state(network, seed) for seed in range(3)]
    factors = compute_scale_factors(
        network, [(network.full_architecture(), state) for state in states], norm=norm, central=central
    )
    name = "section0.block0.layer1.weight"
    sizes = []
    for state in states:
        weights = sorted(state[name].double().flatten().tolist(), key=abs if central == "absolute" else None)
        count = len(weights)
        # 95 % of 64 weights are 61; 97.5 % from either side are 63, so that 62 remain between.
        central_weights = weights[1:63] if central == "between" else weights[: math.ceil(0.95 * count)]
        squares = sum(weight**2 for weight in central_weights)
        sizes.append(math.sqrt(squares / len(central_weights)) if norm == "rms" else math.sqrt(squares))
    assert [client_factors[name] for client_factors in factors] == pytest.approx(
        [sum(sizes) / 3 / size for size in sizes], rel=1e-9
    )
    assert all(
        client_factors[tensor] == 1
        for client_factors in factors
        for tensor in network.tensors
        if len(states[0][tensor].shape) < 2
    )


@pytest.mark.slow
def test_the_order_of_clients_changes_no_factor() -> None:
    network = network_of(MLP)
    submodels = _some_submodels(network) * 3
    clients = [
        (architecture, extract(network, architecture, random_state(network, seed)))
        for seed, architecture in enumerate(submodels)
    ]
    factors = compute_scale_factors(network, clients, norm="l2")
    for shift in range(1, len(clients)):
        rotated = compute_scale_factors(network, [*clients[shift:], *clients[:shift]], norm="l2")
        assert rotated == (*factors[shift:], *factors[:shift])


@pytest.mark.parametrize("norm", EVERY_NORM)
def test_multiplying_all_clients_changes_no_factor(norm: WeightNorm) -> None:
    network = network_of(MLP)
    clients = [
        (architecture, extract(network, architecture, random_state(network, seed)))
        for seed, architecture in enumerate(_some_submodels(network))
    ]
    tripled = [(architecture, {name: 3 * tensor for name, tensor in state.items()}) for architecture, state in clients]
    for factors, tripled_factors in zip(
        compute_scale_factors(network, clients, norm=norm),
        compute_scale_factors(network, tripled, norm=norm),
        strict=True,
    ):
        assert factors == pytest.approx(tripled_factors, rel=1e-6)


@pytest.mark.parametrize("norm", EVERY_NORM)
@pytest.mark.parametrize("boost", [0.1, 20.0])
def test_a_client_that_boosts_its_weights_changes_the_length_alone(norm: WeightNorm, boost: float) -> None:
    network, clients = network_of(MLP), 5
    state, full = random_state(network, 0), network_of(MLP).full_architecture()
    name = "section0.block0.layer1.weight"
    changes = [zeros(network, full) for _ in range(clients)]
    changes[0][name] = (boost - 1) * state[name]
    new = aggregate_as_in_the_paper(network, state, [(full, change, 1.0) for change in changes], norm)
    expected = state[name] * (clients - 1 + boost) / clients
    torch.testing.assert_close(new[name], expected, rtol=1e-5, atol=1e-6)


def test_a_tensor_without_size_is_not_scaled() -> None:
    network = network_of(MLP)
    empty = zeros(network, network.full_architecture())
    clients = [(network.full_architecture(), state) for state in (empty, random_state(network, 0))]
    factors = compute_scale_factors(network, clients, norm="rms")
    assert factors[0]["stem.weight"] == 1
    assert factors[1]["stem.weight"] == pytest.approx(0.5)


def test_what_no_client_has_in_common_is_not_scaled() -> None:
    network = network_of(MLP)
    front, back = (Architecture(axes=(("section0.stream", Roll(start=start, size=4)),)) for start in (0, 4))
    state = random_state(network, 0)
    clients = [(architecture, extract(network, architecture, state)) for architecture in (front, back)]
    assert all(
        client_factors["stem.weight"] == 1 for client_factors in compute_scale_factors(network, clients, norm="common")
    )


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "drifts"), [("l2", True), ("rms", False), ("common", False)])
def test_only_the_papers_norm_shrinks_what_wide_clients_hold_without_any_training(
    norm: WeightNorm, drifts: bool
) -> None:
    network = network_of(replace(MLP, widths=(16,), depths=(2,)))
    start = random_state(network, 0)
    narrow, wide = with_depths(network, 2, rate=0.25), network.full_architecture()
    state = start
    for _ in range(40):
        clients = [(architecture, zeros(network, architecture), 1.0) for architecture in (narrow, narrow, wide, wide)]
        state = aggregate_as_in_the_paper(network, state, clients, norm)
    if norm == "common":
        assert have_same_bits(state, start)
    name = "section0.block0.layer1.weight"
    wide_only = ~find_held_elements(network, narrow)[name]
    ratio = float(state[name][wide_only].norm() / start[name][wide_only].norm())
    assert (ratio < 0.5) == drifts
    assert drifts or 0.8 < ratio < 1.25


def test_a_copy_of_the_wide_clients_channels_in_another_order_is_in_common() -> None:
    network = network_of(MLP)
    state = random_state(network, 0)
    shuffled = Architecture(
        axes=(("section0.stream", Explicit(indices=(6, 7, 2, 3, 0, 1, 4, 5))),),
        blocks=network.full_architecture().blocks,
    )
    clients = [
        (architecture, extract(network, architecture, state))
        for architecture in (shuffled, network.full_architecture())
    ]
    assert all(
        factor == 1 for client_factors in compute_scale_factors(network, clients) for factor in client_factors.values()
    )


def test_fidelity_names_the_norm() -> None:
    assert NORMS == {"paper": "l2", "fixed": "common"}


def _some_submodels(network: Network) -> list[Architecture]:
    return [with_depths(network, 1, 1, 1, rate=0.5), with_depths(network, 2, 1, 1), network.full_architecture()]


def _to_device(device: torch.device, state: State) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in state.items()}
