"""FedTrans: when a network grows, and how."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server.test_networks import evolution_context

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.lineage import Drawn, Lineage, Replicated
from subfleet.elastic.model_state import ModelState
from subfleet.methods import AnyMethod
from subfleet.methods.aggregator import Participant
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedtrans import FedTrans, FedTransMemory, Growth
from subfleet.methods.growth import activeness, convergence, transform_cells
from subfleet.methods.roles import ClosedRound
from subfleet.methods.run_networks import Evolution, EvolutionContext
from subfleet.methods.selector import LastUpdate
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.testing.rounds import DrawnClient, draw_state, make_context, play
from subfleet.testing.submodels import have_same_bits

METHOD = FedTrans(first="configured", gamma=1, delta=1, beta=1e9)
"""Grows as soon as a loss has been reported twice."""
relaxed = settings(deadline=None)
LOSSES = {"ada": 1.0, "bob": 3.0}


@cache
def plan() -> RunContext:
    return make_context(METHOD)


def find_whole() -> Architecture:
    return plan().network.full_architecture()


def past(network: str, loss: float) -> LastUpdate:
    size = replace(find_whole(), network=network)
    return LastUpdate(
        round=1,
        size=size,
        architecture=size,
        sample_count=1,
        epochs=1,
        loss=loss,
        square_loss=loss**2,
        change_norm=1.0,
        train_s=0.0,
        took_s=0.0,
    )


def close_round(growth: Growth, losses: Mapping[str, float], *, accuracy: float = 0.5) -> ClosedRound:
    clients = {name: past(growth.newest, loss) for name, loss in losses.items()}
    return ClosedRound(round=1, clients=clients, observation=growth, accuracy=accuracy)


def make_participants(names: Mapping[str, float], lineage: Lineage) -> tuple[Participant, ...]:
    size = replace(find_whole(), network=lineage.id)
    return tuple(Participant(client_id=name, architecture=size, size=size) for name in names)


def move_blocks(state: ModelState, network_id: str, fractions: Mapping[str, float]) -> ModelState:
    """Return the model after a round that has changed a network's blocks by these fractions of their weights."""
    own = state.of(network_id)
    shared = {
        name: tensor
        * (1 + next((fraction for block, fraction in fractions.items() if name.startswith(f"{block}.")), 0.0))
        for name, tensor in own.shared.items()
    }
    return state.with_network(network_id, replace(own, shared=shared))


def evolve_once(
    method: FedTrans,
    moves: Mapping[str, float],
    *,
    carried: bool = True,
    client_losses: Mapping[str, float] = LOSSES,
    **memory: Any,
) -> tuple[Evolution, EvolutionContext]:
    before = draw_state(plan().network)
    known = FedTransMemory(**{"losses": (2.0,), **memory})
    (first,) = evolution_context(before).lineages
    context = evolution_context(
        before,
        after=move_blocks(before, "", moves),
        clients=make_participants(client_losses, first),
        losses=client_losses,
        carried_by=lambda lineage: ("ada",) * carried,
        memory=known,
    )
    evolve = method.roles().networks.evolve
    assert evolve is not None
    return evolve(context), context


# --- runs without growth ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_network_that_never_grows_is_fedavg_to_the_bit(tmp_path: Path) -> None:
    """T2."""
    methods: tuple[AnyMethod, ...] = (FedTrans(first="configured", beta=-1e9), FedAvg())
    states = []
    for method in methods:
        context = make_context(method)
        state = draw_state(context.network)
        for number in range(1, 4):
            clients = [DrawnClient(name=name, size=0, samples=10 + number) for name in LOSSES]
            state = play(context, state, clients, tmp_path / method.TYPE, number).state
        states.append(state)
    assert have_same_bits(states[0].shared, states[1].shared)


# --- when a network grows, and which cells ----------------------------------------------------------------------------


@given(slope=st.floats(-1, 1), gamma=st.integers(1, 6), delta=st.integers(1, 6), more=st.integers(0, 5))
def test_a_loss_that_falls_evenly_has_converged_to_that_degree(slope: float, gamma: int, delta: int, more: int) -> None:
    losses = [10 - slope * index for index in range(gamma + delta + more)]
    assert convergence(losses, gamma=gamma, delta=delta) == pytest.approx(slope, abs=1e-9)
    assert convergence(losses[: gamma + delta - 1], gamma=gamma, delta=delta) == math.inf


def test_the_degree_is_a_mean_over_rounds_of_falls_over_rounds() -> None:
    losses = [9.0, 7.0, 6.0, 2.0, 1.0]
    assert convergence(losses, gamma=2, delta=3) == pytest.approx(((9 - 2) / 3 + (7 - 1) / 3) / 2)
    assert convergence(losses, gamma=3, delta=1) == pytest.approx((1 + 4 + 1) / 3)


def test_activeness_is_the_share_by_which_a_cell_has_moved() -> None:
    before = draw_state(plan().network)
    after = move_blocks(before, "", {"section0.block1": 0.25, "section1.block0": -0.5})
    active = activeness(plan().network, before.shared, after.shared)
    assert active["section0.block1"] == pytest.approx(0.25, rel=1e-6)
    assert active["section1.block0"] == pytest.approx(0.5, rel=1e-6)
    assert active["section0.block0"] == 0.0


@pytest.mark.parametrize(
    ("moves", "alpha", "expected"),
    [
        ({"section0.block1": 0.2, "section1.block1": 0.1}, 0.9, {"section0.block1"}),
        ({"section0.block1": 0.2, "section1.block1": 0.1}, 0.45, {"section0.block1", "section1.block1"}),
        ({"section0.block1": 0.2, "section1.block1": 0.19}, 0.9, {"section0.block1", "section1.block1"}),
    ],
)
def test_exactly_the_cells_that_move_most_are_changed(
    moves: Mapping[str, float], alpha: float, expected: set[str]
) -> None:
    """T7, and the grown network costs more to compute."""
    answer, context = evolve_once(replace(METHOD, alpha=alpha), moves)
    (born,) = answer.born
    grown = network_of(born.config)
    cells = {cell.name: cell for cell in plan().network.cells}
    longer = {name for name, axis in plan().network.axes.items() if grown.axes[name].size > axis.size}
    assert longer == {axis for name in expected for axis in cells[name].axes}
    assert {name for name in expected if name in born.reason} == expected
    ((before, _),), ((after, _),) = (
        Costs(network).of([network.full_architecture()]) for network in (plan().network, grown)
    )
    assert after > before
    assert (born.parent, born.born_round, born.id) == ("", 1, "m1")
    assert answer.observation.wide == tuple(name for name in cells if name in expected)
    assert answer.observation.newest == ""
    assert context.carried_by(born)


def test_random_cells_are_as_many_but_different() -> None:
    moves = {"section0.block1": 0.2, "section1.block1": 0.19}
    drawn = set()
    for number in range(12):
        before = draw_state(plan().network)
        context = evolution_context(
            before,
            round=number,
            after=move_blocks(before, "", moves),
            clients=make_participants(LOSSES, Lineage(id="", config=plan().config.model)),
            losses=LOSSES,
            carried_by=lambda lineage: ("ada",),
            memory=FedTransMemory(losses=(2.0,)),
        )
        evolve = replace(METHOD, cells="random").roles().networks.evolve
        assert evolve is not None
        drawn.add(evolve(context).observation.wide)
    assert len(drawn) > 2
    assert {len(cells) for cells in drawn} == {2}


def test_a_cell_becomes_wider_and_deeper_in_turn() -> None:
    network, wide = plan().network, tuple[str, ...]()
    changes = []
    for _ in range(4):
        change = transform_cells(network, ["section1.block1"], wide, factor=2.0, inserted=2)
        assert change is not None
        changes.append(change.words)
        network, wide = network_of(change.config), change.wide
    assert changes == ["section1.block1 wider", "section1.block1 deeper"] * 2
    assert [len(names) for names in network.sections] == [2, 7]
    width = plan().network.axes["section1.block1.inner"].size
    assert network.axes["section1.block1.inner"].size == 4 * width


@pytest.mark.parametrize(
    ("changes", "memory", "carried"),
    [
        ({"beta": -1.0}, {}, True),
        ({"gamma": 2}, {}, True),  # too few rounds yet
        ({}, {}, False),  # no client could train it
        ({}, {"losses": ()}, True),
    ],
)
def test_nothing_grows_that_should_not(changes: dict[str, Any], memory: dict[str, Any], carried: bool) -> None:
    answer, _ = evolve_once(replace(METHOD, **changes), {"section0.block1": 0.1}, carried=carried, **memory)
    assert not answer.born
    assert answer.observation.born == ""


def test_the_loss_is_that_of_the_newest_networks_clients_alone() -> None:
    """A loss of 2 before and 2 now is no fall; the losses of other clients do not count."""
    assert evolve_once(replace(METHOD, beta=0.0, smoothing=1.0), {"section0.block1": 0.1})[0].born
    assert not evolve_once(replace(METHOD, beta=0.0, smoothing=1.0), {"section0.block1": 0.1}, losses=(2.1,))[0].born
    grown = evolve_once(replace(METHOD, beta=0.11, smoothing=1.0), {"section0.block1": 0.1}, losses=(2.1,))[0]
    assert grown.born
    half = replace(METHOD, beta=0.051, smoothing=0.5)
    assert evolve_once(half, {"section0.block1": 0.1}, losses=(2.1,))[0].born, "the moving loss falls by half of that"


def test_a_claim_that_cannot_be_a_loss_counts_as_no_fall() -> None:
    method = replace(METHOD, beta=1.0, smoothing=1.0)
    liar = {"ada": 2.0, "bob": 2.0, "eve": -1e30}
    assert evolve_once(method, {"section0.block1": 0.1}, client_losses=liar)[0].born, (
        "2 before, and at least 4 thirds now"
    )


def test_without_warm_up_weights_are_drawn() -> None:
    (born,) = evolve_once(replace(METHOD, warm_up=False), {"section0.block1": 0.1})[0].born
    assert born.map == Drawn()
    (noisy,) = evolve_once(replace(METHOD, noise=0.3), {"section0.block1": 0.1})[0].born
    assert isinstance(noisy.map, Replicated)
    assert noisy.map.noise == 0.3


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 1.1},
        {"decay": -0.1},
        {"stop_gain": 2.0},
        {"gamma": 0},
        {"delta": 0},
        {"inserted": 0},
        {"stop_rounds": -1},
        {"smoothing": 0.0},
        {"factor": 1.0},
        {"noise": math.inf},
        {"mu": -1.0},
        {"beta": math.inf},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        FedTrans(**wrong)


# --- as the paper is printed ------------------------------------------------------------------------------------------


def test_as_printed_a_networks_first_losses_decide_permanently() -> None:
    """Equation 1 as printed: a loss that fell only at first keeps a network from growing, a later fall does not."""
    moves = {"section0.block1": 0.2}
    rested, falling = (9.0, 6.0, 3.0, 1.0, 1.0, 1.0), (3.0, 3.0, 3.0, 3.0, 2.0, 1.0)
    grew = {}
    for slopes in ("latest", "first"):
        method = replace(METHOD, gamma=2, delta=1, beta=0.2, smoothing=1.0, slopes=slopes)
        for name, losses in (("rested", rested), ("falling", falling)):
            answer, _ = evolve_once(method, moves, client_losses=dict.fromkeys(LOSSES, losses[-1]), losses=losses[:-1])
            grew[slopes, name] = bool(answer.born)
    assert grew == {
        ("latest", "rested"): True,
        ("latest", "falling"): False,
        ("first", "rested"): False,
        ("first", "falling"): True,
    }


def test_as_printed_a_widened_cells_own_columns_are_divided() -> None:
    """The networks and the copied units are the same, but the weights that compute the copies are divided, not those
    that read them."""
    weights = draw_state(plan().network).shared
    answer, _ = evolve_once(replace(METHOD, divided="compute", shares="equal"), {"section0.block1": 0.2})
    (born,) = answer.born
    assert isinstance(born.map, Replicated)
    assert born.map.divided == "compute"
    network, sources = network_of(born.config), dict(born.map.sources)
    inherited = {
        divided: inherit(replication, network, plan().network, weights, seed=1)
        for divided, replication in (("read", replace(born.map, divided="read")), ("compute", born.map))
    }
    (axis,) = sources
    counts = torch.bincount(torch.tensor(sources[axis]))[torch.tensor(sources[axis])]
    assert counts.max() > 1
    touched = 0
    for name, decl in network.tensors.items():
        read, computed = inherited["read"][name], inherited["compute"][name]
        if decl.role not in ("weight", "residual") or axis not in decl.axes:
            assert torch.equal(read, computed), name
            continue
        computes = decl.axes[0] == axis
        copies = (counts[:, None] if computes else counts[None, :]).float()
        torch.testing.assert_close(computed, read / copies if computes else read * copies)
        touched += 1
    assert touched > 1
