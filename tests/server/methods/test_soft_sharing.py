"""FedTrans: what the networks of a lineage give to each other."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server.aggregating import aggregate_clients
from server.methods.test_fedtrans import LOSSES, METHOD, closed
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
    method: FedTrans, folder: Path, place: torch.device = CPU, **settings: Any
) -> tuple[ModelState, tuple[Lineage, ...]]:
    """Three networks, each of which grew from the one before by the server's own aggregation, where the model is."""
    context = make_context(method, **settings)
    state, lineages, memory = (
        draw_state(context.network).to(place),
        tuple[Lineage, ...](),
        method.roles().memory.initial,
    )
    remember = method.roles().memory.remember
    assert remember is not None
    for number in range(1, 9):
        living = lineages[-1] if lineages else Lineage(id="", config=context.config.model)
        drawn = clients_of(replace(context, first=context.get_declared(living)), folder, number)
        found = aggregate_clients(context, BlobStore(folder), state, number, drawn, memory, lineages)
        memory = remember(memory, closed(found.observation, LOSSES))
        state, lineages = found.state, found.lineages
        if len(lineages) == 3:
            return state, lineages
    raise AssertionError("nothing grew")


def clients_of(context: RunContext, folder: Path, number: int) -> list[ClientState]:
    blobs, place = BlobStore(folder), len(context.space) - 1
    drawn = [store_update(context, DrawnClient(name=name, size=place), blobs, number) for name in LOSSES]
    return [
        replace(
            client,
            offer=replace(client.offer, runtime="onnx", budget=Budget(memory_bytes=2**40)),
        )
        for client in drawn
    ]


class Line:
    """Three networks, as they would be without anything shared, and as each was born of the one before."""

    def __init__(self, folder: Path) -> None:
        state, self.lineages = family(replace(METHOD, share="none"), folder)
        self.networks = {one.id: replace(network_of(one.config), id=one.id) for one in self.lineages}
        self.parameters = {name: sum(count_cell_parameters(one).values()) for name, one in self.networks.items()}
        self.states: States = {name: dict(state.of(name).shared) for name in self.networks}

    def born(self, states: States) -> States:
        """Each network as it would begin with what the one before it is now."""
        found = {}
        for parent, child in pairwise(self.lineages):
            own, other = self.networks[child.id], self.networks[parent.id]
            found[child.id] = inherit(child.map, own, other, states[parent.id], seed=0)
        return found

    def apart(self, states: States, name: str, ancestor: str) -> dict[str, Tensor]:
        """What a network is beyond the nearest that an ancestor could be: what tells its copies apart."""
        ids, found = [one.id for one in self.lineages], dict(states)
        ways = list(pairwise(self.lineages[ids.index(ancestor) : ids.index(name) + 1]))
        for parent, child in reversed(ways):
            assert isinstance(child.map, Replicated)
            grown = Replication.of(self.networks[child.id], self.networks[parent.id], child.map)
            found[parent.id] = grown.down(found[child.id])
        for parent, child in ways:
            found[child.id] = self.born({**states, parent.id: found[parent.id]})[child.id]
        return {key: own - found[name][key] for key, own in states[name].items()}

    def shared(self, states: States, **settings: Any) -> States:
        method = replace(METHOD, **{"decay": 0.9, **settings})
        return share_weights(method, self.lineages, self.networks, states, self.parameters, ROUND)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    return Line(tmp_path_factory.mktemp("line"))


def altered(states: States, seed: int) -> States:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {key: one + torch.randn(one.shape, generator=generator) for key, one in own.items()}
        for name, own in states.items()
    }


def inherited_elements(line: Line) -> dict[str, dict[str, Tensor]]:
    """Of each network but the first, which elements come from its parent: those that move where all of that moves."""
    states = line.states
    lifted = {name: {key: one + 7.0 for key, one in own.items()} for name, own in states.items()}
    before, after = line.born(states), line.born(lifted)
    return {name: {key: before[name][key] != after[name][key] for key in before[name]} for name in before}


# --- what networks share ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("share", ["transform", "crop", "none"])
def test_the_first_network_takes_in_nothing(share: Any, tmp_path: Path) -> None:
    """T5: to the bit what it is without sharing; the others are moved where something is shared."""
    apart, lines = family(replace(METHOD, share="none"), tmp_path / "apart")
    together, same = family(replace(METHOD, share=share), tmp_path / "together")
    assert [one.config for one in lines] == [one.config for one in same]
    assert have_same_bits(apart.of("").shared, together.of("").shared)
    assert have_same_bits(apart.of("m1").shared, together.of("m1").shared) == (share == "none")
    both, _ = family(replace(METHOD, share="crop", large_to_small=True), tmp_path / "both")
    assert not have_same_bits(apart.of("").shared, both.of("").shared)


def test_networks_that_compute_the_same_share_nothing_new(line: Line) -> None:
    """T4: each is what it would begin as, and stays that; nothing of mass is made or lost."""
    states = dict(line.states)
    for parent, child in pairwise(line.lineages):
        born = inherit(child.map, line.networks[child.id], line.networks[parent.id], states[parent.id], seed=0)
        states[child.id] = dict(born)
    for decay in (0.5, 1.0):
        found = line.shared(states, decay=decay)
        for name, own in states.items():
            for key, one in own.items():
                torch.testing.assert_close(found[name][key], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("share", ["transform", "crop"])
def test_without_anything_left_of_the_decay_all_keep_their_bits(line: Line, share: Share) -> None:
    """T4 with eta = 0: the rounds since a network appeared are one or more."""
    states = altered(line.states, 3)
    found = line.shared(states, share=share, decay=0.0)
    assert all(have_same_bits(found[name], own) for name, own in states.items())


def test_a_child_takes_in_its_parent_by_likeness_and_age(line: Line) -> None:
    """Equation 5, against the weights that the child would begin with if it were born of the parent as that is now."""
    states = altered(line.states, 4)
    parent, child = line.lineages[:2]
    image, ours = line.born(states)[child.id], inherited_elements(line)[child.id]
    apart = line.apart(states, child.id, parent.id)
    alike = line.parameters[parent.id] / line.parameters[child.id]
    assert 0 < alike < 1
    for by, age in (("network", ROUND - child.born_round), ("run", ROUND)):
        for normalised in (True, False):
            fading = 0.9**age
            found = line.shared(states, decay_by=by, normalised=normalised)[child.id]
            for key, own in states[child.id].items():
                share = alike * (fading if normalised else 1.0)
                expected = (own + alike * fading * (image[key] + apart[key])) / (1 + share)
                expected = torch.where(ours[key], expected, own)
                torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(found[key][~ours[key]], own[~ours[key]])


@pytest.mark.slow
def test_copies_stay_apart(line: Line) -> None:
    """What a child's copies have in common moves towards the parent; what tells them apart stays, round after round."""
    states = altered(line.states, 7)
    parent, child = (one.id for one in line.lineages[:2])
    before, found = line.apart(states, child, parent), states
    for _ in range(20):
        found = {**states, child: line.shared(found, decay=1.0)[child]}
    after, born = line.apart(found, child, parent), line.born(states)[child]
    copied = 0
    for key, ours in inherited_elements(line)[child].items():
        torch.testing.assert_close(after[key][ours], before[key][ours], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close((found[child][key] - after[key])[ours], born[key][ours], rtol=1e-3, atol=1e-3)
        copied += int(before[key][ours].abs().sum() > 0)
    assert copied, "the child has copies"


def test_what_lies_in_front_is_shared_as_published(line: Line) -> None:
    """With "crop" the parent lies in the front of every axis, and what is beyond stays as it is."""
    states = altered(line.states, 5)
    parent, child = (one.id for one in line.lineages[:2])
    found = line.shared(states, share="crop")[child]
    weight = line.parameters[parent] / line.parameters[child] * 0.9 ** (ROUND - line.lineages[1].born_round)
    moved = 0
    for key, own in states[child].items():
        expected = own.clone()
        if key in states[parent]:
            front = tuple(slice(0, size) for size in states[parent][key].shape)
            expected[front] = (own[front] + weight * states[parent][key]) / (1 + weight)
            moved += int(states[parent][key].shape != own.shape)
        torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-6)
    assert moved, "the child is wider somewhere"


@pytest.mark.slow
def test_grandchildren_take_in_both(line: Line) -> None:
    """Likeness is that of the ends, and what the first has comes through both maps."""
    states = altered(line.states, 6)
    first, second, third = (one.id for one in line.lineages)
    through = line.born({**states, second: line.born(states)[second]})[third]
    direct = line.born(states)[third]
    fading = 0.9 ** (ROUND - line.lineages[2].born_round)
    weights = [fading * line.parameters[name] / line.parameters[third] for name in (first, second)]
    found = line.shared(states)[third]
    everywhere = inherited_elements(line)
    kept = line.born({**states, second: {key: one.float() for key, one in everywhere[second].items()}})[third]
    whole = {key: kept[key] != 0 for key in kept}  # whose origin is the first network
    for key, own in states[third].items():
        both = everywhere[third][key] & whole[key]
        given = (
            through[key] + line.apart(states, third, first)[key],
            direct[key] + line.apart(states, third, second)[key],
        )
        expected = (own + weights[0] * given[0] + weights[1] * given[1]) / (1 + sum(weights))
        torch.testing.assert_close(found[key][both], expected[both], rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(parts=st.lists(st.integers(1, 10**6), min_size=3, max_size=3))
def test_likeness_multiplies_along_a_lineage(parts: list[int]) -> None:
    first, second, third = sorted(parts)
    assert similarity(first, third) == pytest.approx(similarity(first, second) * similarity(second, third))
    assert similarity(first, first) == 1.0
    assert 0 < similarity(first, third) <= 1


@pytest.mark.slow
def test_each_network_has_a_server_optimiser_of_its_own(tmp_path: Path) -> None:
    """FedYogi under FedTrans: what it remembers of a network is of that network's tensors, and begins with it."""
    method = replace(METHOD, mu=0.1)
    state, _ = family(method, tmp_path / "yogi", server_optimiser=ServerYogi())
    plain, _ = family(method, tmp_path / "plain")
    assert not have_same_bits(state.of("").shared, plain.of("").shared)
    moments = {name: state.of(name).moments for name in ("", "m1", "m2")}
    assert moments["m2"] == {}, "it has not been trained"
    for name in ("", "m1"):
        own = state.of(name)
        assert own.moments
        for kept in own.moments.values():
            assert {key: one.shape for key, one in kept.items()}.items() <= {
                key: one.shape for key, one in own.shared.items()
            }.items()
    training = method.roles().training.for_round(TrainingSettings(), 1)
    assert (training.objective.proximal, training.proximal_mu) == (True, 0.1)


def test_a_child_of_drawn_weights_shares_by_the_front(line: Line) -> None:
    """Without warm-up there is no map that the networks grew by."""
    first, second, _ = line.lineages
    drawn = Line.__new__(Line)
    drawn.lineages = (first, replace(second, map=Drawn()))
    drawn.networks, drawn.parameters = line.networks, line.parameters
    states = {name: own for name, own in altered(line.states, 8).items() if name != line.lineages[2].id}
    crop, transform = (drawn.shared(states, share=share)[second.id] for share in ("crop", "transform"))
    assert have_same_bits(crop, transform)
