"""FedTrans: how the networks of a lineage share weights."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server.aggregating import aggregate_clients
from server.methods.test_fedtrans import LOSSES, METHOD, close_round
from torch import Tensor

from subfleet.elastic.building import network_of
from subfleet.elastic.growing import count_cell_parameters
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.lineage import Drawn, Lineage, Replicated
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.replication import Replication
from subfleet.elastic.server_optimisers import ServerYogi
from subfleet.methods.fedtrans import FedTrans
from subfleet.methods.growth import Share, share_weights, similarity
from subfleet.protocol.readings import Budget
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import ClientState
from subfleet.testing.rounds import DrawnClient, draw_state, make_context, store_update
from subfleet.testing.submodels import have_same_bits
from subfleet.transport.blob_store import BlobStore

States = dict[str, dict[str, Tensor]]
ROUND = 5
CPU = torch.device("cpu")


def family(
    method: FedTrans, folder: Path, device: torch.device = CPU, **settings: Any
) -> tuple[ModelState, tuple[Lineage, ...]]:
    """Return three networks, each grown from the one before by the server's aggregation on the model's device."""
    context = make_context(method, **settings)
    state, lineages, memory = (
        draw_state(context.network).to(device),
        tuple[Lineage, ...](),
        method.roles().memory.initial,
    )
    remember = method.roles().memory.remember
    assert remember is not None
    for number in range(1, 9):
        living = lineages[-1] if lineages else Lineage(id="", config=context.config.model)
        clients = make_clients(replace(context, first=context.get_declared(living)), folder, number)
        aggregated = aggregate_clients(context, BlobStore(folder), state, number, clients, memory, lineages)
        memory = remember(memory, close_round(aggregated.observation, LOSSES))
        state, lineages = aggregated.state, aggregated.lineages
        if len(lineages) == 3:
            return state, lineages
    raise AssertionError("nothing grew")


def make_clients(context: RunContext, folder: Path, number: int) -> list[ClientState]:
    blobs, size = BlobStore(folder), len(context.space) - 1
    clients = [store_update(context, DrawnClient(name=name, size=size), blobs, number) for name in LOSSES]
    return [
        replace(
            client,
            offer=replace(client.offer, runtime="onnx", budget=Budget(memory_bytes=2**40)),
        )
        for client in clients
    ]


class Line:
    """Three networks of a lineage: their weights without sharing, and how each was derived from its parent."""

    def __init__(self, folder: Path) -> None:
        state, self.lineages = family(replace(METHOD, share="none"), folder)
        self.networks = {lineage.id: replace(network_of(lineage.config), id=lineage.id) for lineage in self.lineages}
        self.parameters = {
            name: sum(count_cell_parameters(network).values()) for name, network in self.networks.items()
        }
        self.states: States = {name: dict(state.of(name).shared) for name in self.networks}

    def derive(self, states: States) -> States:
        """Return each network as it would begin if derived from its parent's current weights."""
        derived = {}
        for parent, child in pairwise(self.lineages):
            own, other = self.networks[child.id], self.networks[parent.id]
            derived[child.id] = inherit(child.map, own, other, states[parent.id], seed=0)
        return derived

    def find_difference(self, states: States, name: str, ancestor: str) -> dict[str, Tensor]:
        """Return how a network differs from the nearest one that an ancestor gives: how its copies differ."""
        ids, nearest = [lineage.id for lineage in self.lineages], dict(states)
        steps = list(pairwise(self.lineages[ids.index(ancestor) : ids.index(name) + 1]))
        for parent, child in reversed(steps):
            assert isinstance(child.map, Replicated)
            grown = Replication.of(self.networks[child.id], self.networks[parent.id], child.map)
            nearest[parent.id] = grown.down(nearest[child.id])
        for parent, child in steps:
            nearest[child.id] = self.derive({**states, parent.id: nearest[parent.id]})[child.id]
        return {key: own - nearest[name][key] for key, own in states[name].items()}

    def share(self, states: States, **settings: Any) -> States:
        method = replace(METHOD, **{"decay": 0.9, **settings})
        return share_weights(method, self.lineages, self.networks, states, self.parameters, ROUND)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    return Line(tmp_path_factory.mktemp("line"))


def perturb(states: States, seed: int) -> States:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {key: tensor + torch.randn(tensor.shape, generator=generator) for key, tensor in own.items()}
        for name, own in states.items()
    }


def find_inherited(line: Line) -> dict[str, dict[str, Tensor]]:
    """Return which elements of each network but the first come from its parent: they change if all of that changes."""
    states = line.states
    lifted = {name: {key: tensor + 7.0 for key, tensor in own.items()} for name, own in states.items()}
    before, after = line.derive(states), line.derive(lifted)
    return {name: {key: before[name][key] != after[name][key] for key in before[name]} for name in before}


# --- what networks share ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("share", ["transform", "crop", "none"])
def test_the_first_network_takes_in_nothing(share: Any, tmp_path: Path) -> None:
    """T5: it keeps the bits that it has without sharing; the other networks change if something is shared."""
    apart, lines = family(replace(METHOD, share="none"), tmp_path / "apart")
    together, same = family(replace(METHOD, share=share), tmp_path / "together")
    assert [lineage.config for lineage in lines] == [lineage.config for lineage in same]
    assert have_same_bits(apart.of("").shared, together.of("").shared)
    assert have_same_bits(apart.of("m1").shared, together.of("m1").shared) == (share == "none")
    both, _ = family(replace(METHOD, share="crop", large_to_small=True), tmp_path / "both")
    assert not have_same_bits(apart.of("").shared, both.of("").shared)


@pytest.mark.slow
def test_networks_that_compute_the_same_share_nothing_new(line: Line) -> None:
    """T4: each network equals what its parent derives, and sharing leaves it unchanged."""
    states = dict(line.states)
    for parent, child in pairwise(line.lineages):
        derived = inherit(child.map, line.networks[child.id], line.networks[parent.id], states[parent.id], seed=0)
        states[child.id] = dict(derived)
    for decay in (0.5, 1.0):
        shared = line.share(states, decay=decay)
        for name, own in states.items():
            for key, tensor in own.items():
                torch.testing.assert_close(shared[name][key], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("share", ["transform", "crop"])
def test_with_a_decay_of_0_all_networks_keep_their_bits(line: Line, share: Share) -> None:
    """T4 with eta = 0: the rounds since a network appeared are one or more."""
    states = perturb(line.states, 3)
    shared = line.share(states, share=share, decay=0.0)
    assert all(have_same_bits(shared[name], own) for name, own in states.items())


@pytest.mark.slow
def test_a_child_takes_in_its_parent_by_likeness_and_age(line: Line) -> None:
    """Equation 5, with the weights that the child would begin with if derived from the parent's current weights."""
    states = perturb(line.states, 4)
    parent, child = line.lineages[:2]
    image, inherited = line.derive(states)[child.id], find_inherited(line)[child.id]
    difference = line.find_difference(states, child.id, parent.id)
    alike = line.parameters[parent.id] / line.parameters[child.id]
    assert 0 < alike < 1
    for by, age in (("network", ROUND - child.born_round), ("run", ROUND)):
        for normalised in (True, False):
            fading = 0.9**age
            shared = line.share(states, decay_by=by, normalised=normalised)[child.id]
            for key, own in states[child.id].items():
                weight = alike * (fading if normalised else 1.0)
                expected = (own + alike * fading * (image[key] + difference[key])) / (1 + weight)
                expected = torch.where(inherited[key], expected, own)
                torch.testing.assert_close(shared[key], expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(shared[key][~inherited[key]], own[~inherited[key]])


@pytest.mark.slow
def test_copies_stay_apart(line: Line) -> None:
    """The common part of a child's copies moves towards the parent; their differences stay, round after round."""
    states = perturb(line.states, 7)
    parent, child = (lineage.id for lineage in line.lineages[:2])
    before, current = line.find_difference(states, child, parent), states
    for _ in range(20):
        current = {**states, child: line.share(current, decay=1.0)[child]}
    after, derived = line.find_difference(current, child, parent), line.derive(states)[child]
    copied = 0
    for key, inherited in find_inherited(line)[child].items():
        torch.testing.assert_close(after[key][inherited], before[key][inherited], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            (current[child][key] - after[key])[inherited], derived[key][inherited], rtol=1e-3, atol=1e-3
        )
        copied += int(before[key][inherited].abs().sum() > 0)
    assert copied, "the child has copies"


def test_what_lies_in_front_is_shared_as_published(line: Line) -> None:
    """With "crop" the parent is at the front of every axis, and the rest is unchanged."""
    states = perturb(line.states, 5)
    parent, child = (lineage.id for lineage in line.lineages[:2])
    shared = line.share(states, share="crop")[child]
    weight = line.parameters[parent] / line.parameters[child] * 0.9 ** (ROUND - line.lineages[1].born_round)
    moved = 0
    for key, own in states[child].items():
        expected = own.clone()
        if key in states[parent]:
            front = tuple(slice(0, size) for size in states[parent][key].shape)
            expected[front] = (own[front] + weight * states[parent][key]) / (1 + weight)
            moved += int(states[parent][key].shape != own.shape)
        torch.testing.assert_close(shared[key], expected, rtol=1e-5, atol=1e-6)
    assert moved, "the child is wider somewhere"


@pytest.mark.slow
def test_grandchildren_take_in_both(line: Line) -> None:
    """The similarity is that of the two ends, and the first network's weights come through both maps."""
    states = perturb(line.states, 6)
    first, second, third = (lineage.id for lineage in line.lineages)
    through = line.derive({**states, second: line.derive(states)[second]})[third]
    direct = line.derive(states)[third]
    fading = 0.9 ** (ROUND - line.lineages[2].born_round)
    weights = [fading * line.parameters[name] / line.parameters[third] for name in (first, second)]
    shared = line.share(states)[third]
    inherited = find_inherited(line)
    traced = line.derive({**states, second: {key: mask.float() for key, mask in inherited[second].items()}})[third]
    whole = {key: traced[key] != 0 for key in traced}  # elements that come from the first network
    for key, own in states[third].items():
        both = inherited[third][key] & whole[key]
        contributions = (
            through[key] + line.find_difference(states, third, first)[key],
            direct[key] + line.find_difference(states, third, second)[key],
        )
        expected = (own + weights[0] * contributions[0] + weights[1] * contributions[1]) / (1 + sum(weights))
        torch.testing.assert_close(shared[key][both], expected[both], rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(parts=st.lists(st.integers(1, 10**6), min_size=3, max_size=3))
def test_likeness_multiplies_along_a_lineage(parts: list[int]) -> None:
    first, second, third = sorted(parts)
    assert similarity(first, third) == pytest.approx(similarity(first, second) * similarity(second, third))
    assert similarity(first, first) == 1.0
    assert 0 < similarity(first, third) <= 1


@pytest.mark.slow
def test_each_network_has_a_server_optimiser_of_its_own(tmp_path: Path) -> None:
    """FedYogi under FedTrans: the moments of a network are for its tensors, and begin with the network."""
    method = replace(METHOD, mu=0.1)
    state, _ = family(method, tmp_path / "yogi", server_optimiser=ServerYogi())
    plain, _ = family(method, tmp_path / "plain")
    assert not have_same_bits(state.of("").shared, plain.of("").shared)
    moments = {name: state.of(name).moments for name in ("", "m1", "m2")}
    assert moments["m2"] == {}, "it has not been trained"
    for name in ("", "m1"):
        own = state.of(name)
        assert own.moments
        for moment in own.moments.values():
            assert {key: tensor.shape for key, tensor in moment.items()}.items() <= {
                key: tensor.shape for key, tensor in own.shared.items()
            }.items()
    training = method.roles().training.for_round(TrainingSettings(), 1)
    assert (training.objective.proximal, training.proximal_mu) == (True, 0.1)


def test_a_child_of_drawn_weights_shares_by_the_front(line: Line) -> None:
    """Without warm-up, networks have no replication map."""
    first, second, _ = line.lineages
    drawn = Line.__new__(Line)
    drawn.lineages = (first, replace(second, map=Drawn()))
    drawn.networks, drawn.parameters = line.networks, line.parameters
    states = {name: own for name, own in perturb(line.states, 8).items() if name != line.lineages[2].id}
    crop, transform = (drawn.share(states, share=share)[second.id] for share in ("crop", "transform"))
    assert have_same_bits(crop, transform)
