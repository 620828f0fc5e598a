"""FedTrans: which network a client draws, evaluates and begins with, and when a run is over."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS, context_of, measuring, perform_searches, prepared, telemetry
from server.methods.test_fedtrans import CONTEXT, LOSSES, METHOD, WHOLE, closed, outcome, relaxed
from server.server_rig import World, config, fleet

from subfleet.elastic.building import network_of
from subfleet.elastic.lineage import Lineage
from subfleet.methods.aggregator import Participant
from subfleet.methods.assigner import AssignmentContext, WrittenSize
from subfleet.methods.fedtrans import FedTrans, FedTransMemory, Growth
from subfleet.methods.run_networks import BeginContext, StandingContext
from subfleet.methods.sizes import list_widths
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.coordinator import step
from subfleet.search.queue import ProgramFacts, RequestedProgram, SizedProgram
from subfleet.testing.rounds import make_assignee

# --- who draws what ---------------------------------------------------------------------------------------------------


@cache
def lineages() -> tuple[Lineage, ...]:
    (born,) = outcome(METHOD, {"section0.block1": 0.1})[0].born
    return (Lineage(id="", config=CONTEXT.config.model), born)


def question(name: str, number: int, *, written: tuple[str, ...]) -> AssignmentContext:
    declared = [CONTEXT.get_declared(one) for one in lineages()]
    asked = make_assignee(CONTEXT, name, round_number=number)
    sizes = {one.network.id: one.space[-1] for one in declared}
    return replace(
        asked,
        networks={one.network.id: one.network for one in declared},
        candidates=tuple(candidate for one in declared for candidate in one.candidates),
        written={
            sizes[name].architecture_id: WrittenSize(size=sizes[name], facts=ProgramFacts(planned_peak_bytes=0))
            for name in written
        },
    )


def test_networks_are_drawn_by_their_utilities_among_those_that_are_written() -> None:
    memory = FedTransMemory(utilities={"ada": {"": 1.0, "m1": 1.0 + math.log(3)}})
    counts = dict.fromkeys(("", "m1"), 0)
    for number in range(800):
        asked = question("ada", number, written=("", "m1"))
        network_id, wanted = assigned(replace(asked, draw=replace(asked.draw, memory=memory)))
        assert wanted is None
        counts[network_id] += 1
    assert counts["m1"] / 800 == pytest.approx(0.75, abs=0.05)
    for number in range(20):
        asked = question("ada", number, written=("",))
        expected = RequestedProgram(program=SizedProgram(size=question_size(asked, "m1"), target="onnx"), lost=1.0)
        assert assigned(asked) == ("", expected), "no round waits for a program"
    assert assigned(question("ada", 1, written=()))[0] == ""


def assigned(asked: AssignmentContext) -> tuple[str, RequestedProgram | None]:
    found = METHOD.roles().assigner.assign(asked)
    assert found.candidate is not None
    return found.candidate.architecture.network, found.requested


def question_size(asked: AssignmentContext, network_id: str) -> Architecture:
    (found,) = (one.architecture for one in asked.candidates if one.architecture.network == network_id)
    return found


@relaxed
@given(memory_bytes=st.integers(0, 3 * 10**6), macs=st.none() | st.integers(0, 4000), number=st.integers(1, 99))
def test_nobody_is_given_what_it_cannot_carry(memory_bytes: int, macs: int | None, number: int) -> None:
    """T3, by what is measured; with "macs" by compute alone."""
    asked = question("ada", number, written=("", "m1"))
    budget = replace(asked.budget, memory_bytes=memory_bytes, forward_macs=macs)
    asked = replace(asked, budget=budget)
    found = METHOD.roles().assigner.assign(asked).candidate
    allowed = [one for one in asked.candidates if asked.allows(one)]
    assert found in allowed if allowed else found is None
    by_macs = replace(METHOD, compatible="macs").roles().assigner.assign(asked).candidate
    within = [one for one in asked.candidates if macs is None or one.forward_macs <= macs]
    assert by_macs in within if within else by_macs is None


def test_evaluation_takes_the_highest_utility_of_those_that_are_ready() -> None:
    standing = METHOD.roles().networks.standing
    assert standing is not None
    networks = {one.id: CONTEXT.get_declared(one).network for one in lineages()}
    client = Participant(client_id="ada", architecture=WHOLE, size=WHOLE)
    for utilities, ready, expected in (
        ({"": 1.0, "m1": 2.0}, ("", "m1"), "m1"),
        ({"": 1.0, "m1": 2.0}, ("",), ""),
        ({"": 3.0, "m1": 2.0}, ("", "m1"), ""),
        ({}, ("", "m1"), "m1"),
    ):
        memory = FedTransMemory(utilities={"ada": utilities})
        sizes = [networks[name].full_architecture() for name in ready]
        asked = StandingContext(seed=0, client=client, networks=networks, ready=sizes.__contains__, memory=memory)
        assert standing(asked) == networks[expected].full_architecture()


# --- beginning and end ------------------------------------------------------------------------------------------------


def shapes(lineage: Lineage) -> dict[str, tuple[int, ...]]:
    return {name: decl.shape for name, decl in network_of(lineage.config).tensors.items()}


def test_a_run_begins_with_what_its_weakest_client_carries() -> None:
    begin = FedTrans().roles().networks.begin
    assert begin is not None

    def carried(most: int) -> tuple[Lineage, ...]:
        def by(lineage: Lineage) -> tuple[str, ...]:
            network = network_of(lineage.config)
            size = sum(math.prod(decl.shape) for decl in network.tensors.values())
            return ("ada", "bob") if size <= most else ("ada",)

        return begin(
            BeginContext(network=CONTEXT.network, rates=(0.25, 0.5, 1.0), clients=("ada", "bob"), carried_by=by)
        )

    assert carried(10**9) == (), "the whole of it"
    (half,) = carried(700)
    assert shapes(half) == CONTEXT.network.shapes(list_widths(CONTEXT.network, (0.5,))[0])
    (none,) = carried(1)
    assert shapes(none) == CONTEXT.network.shapes(list_widths(CONTEXT.network, (0.25,))[0])


def test_a_turn_that_came_to_nothing_leaves_nothing_of_the_configured_network() -> None:
    """Nobody could be given that, and a client that is weaker than all before is there when it is tried again."""
    context = context_of(method=FedTrans(first="weakest"))
    state = measuring(context)
    for turn, budgets in enumerate(((10**9, 10**9, 10**9), (10, 10**9, 10**9))):
        for name, memory_bytes in zip(CLIENTS, budgets, strict=True):
            message = telemetry(context, name, memory_bytes=memory_bytes, attempt=turn)
            state, actions = step(context, state, message, 2.0)
            state, _ = perform_searches(context, state, actions, 2.0)
        assert state.phase == "train"
        if not turn:
            for name in CLIENTS:
                state, _ = step(context, state, prepared(context, state, name, planned_peak_bytes=10**10), 2.0)
            assert [one.program.size.network for one in state.written.values()] == [""], "it is known to be too large"
            assert (state.phase, state.failed_attempts.count) == ("measure", 1)
    assert [(one.id, one.living) for one in state.lineages] == [("", False), ("m0", True)]
    assert not state.written
    assert {client.size.network for client in state.clients.values() if client.size is not None} == {"m0"}


def test_a_run_ends_where_accuracy_gains_too_little() -> None:
    roles = replace(METHOD, stop_rounds=3, stop_gain=0.01).roles()
    assert roles.memory.remember is not None
    memory, ended = FedTransMemory(), []
    for accuracy in (0.1, 0.5, 0.6, 0.605, 0.6, 0.608, 0.6):
        memory = roles.memory.remember(memory, closed(Growth(parameters={"": 1}, newest=""), LOSSES, accuracy=accuracy))
        ended.append(roles.memory.stop(memory))
    assert [bool(one) for one in ended] == [False, False, False, False, False, True, True]
    assert ended[5] == "its accuracy has gained 0.0080 in 3 rounds, which is less than 0.01"
    never = replace(METHOD, stop_rounds=0).roles()
    assert never.memory.stop(memory) == ""


@pytest.mark.slow
def test_a_run_of_growing_networks_ends_with_the_same_bits_however_often_it_is_killed(tmp_path: Path) -> None:
    """Fake devices, whose tasks tell which network they trained."""
    method = replace(METHOD, first="weakest", stop_rounds=0, noise=0.1)
    results = []
    for kills in (0, 5):
        world = World(tmp_path / str(kills), config(rounds=7, method=method), fleet())
        for turn in range(1, 6000):
            if world.server.finished:
                break
            world.turn()
            if kills and turn % kills == 0:
                world.kill_server()
        assert world.server.finished
        found = world.server.result()
        trained = [sorted(row.architecture.split()[0] for row in record.clients) for record in found.rounds]
        results.append((world.model_bytes(), world.server.state.memory, found.networks, trained))
    assert results[0] == results[1]
    _, _, lines, trained = results[0]
    assert len(lines) >= 3
    assert len({name for names in trained for name in names}) > 1, "later networks are trained, too"


@pytest.mark.parametrize(("count", "without", "alone"), [(20, 1, False), (20, 2, False), (20, 3, True), (5, 1, True)])
def test_one_of_many_that_claims_to_have_nothing_does_not_keep_the_first_model_small(
    count: int, without: int, alone: bool
) -> None:
    """Of ten clients one is left behind; of fewer, the first model is one that each can carry, as is the paper's."""
    names = tuple(f"c{place:02d}" for place in range(count))
    network, asked = CONTEXT.network, list[Lineage]()

    def carried_by(lineage: Lineage) -> tuple[str, ...]:
        asked.append(lineage)
        return names[without:] if len(asked) < 3 else names

    def found(method: FedTrans) -> int:
        asked.clear()
        begin = method.roles().networks.begin
        assert begin is not None
        begin(BeginContext(network=network, rates=(0.25, 0.5, 1.0), clients=names, carried_by=carried_by))
        return len(asked)

    assert found(FedTrans()) == (3 if alone else 1)
    assert found(FedTrans(left_behind=0.0)) == 3
