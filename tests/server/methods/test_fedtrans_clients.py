"""FedTrans: which network a client draws, evaluates and begins with, and when a run ends."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS, context_of, measuring, perform_searches, prepared, telemetry
from server.methods.test_fedtrans import LOSSES, METHOD, close_round, evolve_once, find_whole, plan, relaxed
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

# --- which network a client draws -------------------------------------------------------------------------------------


@cache
def lineages() -> tuple[Lineage, ...]:
    (born,) = evolve_once(METHOD, {"section0.block1": 0.1})[0].born
    return (Lineage(id="", config=plan().config.model), born)


def make_question(name: str, number: int, *, written: tuple[str, ...]) -> AssignmentContext:
    declared = [plan().get_declared(lineage) for lineage in lineages()]
    context = make_assignee(plan(), name, round_number=number)
    sizes = {entry.network.id: entry.space[-1] for entry in declared}
    return replace(
        context,
        networks={entry.network.id: entry.network for entry in declared},
        candidates=tuple(candidate for entry in declared for candidate in entry.candidates),
        written={
            sizes[name].architecture_id: WrittenSize(size=sizes[name], facts=ProgramFacts(planned_peak_bytes=0))
            for name in written
        },
    )


def test_networks_are_drawn_by_their_utilities_among_those_that_are_written() -> None:
    memory = FedTransMemory(utilities={"ada": {"": 1.0, "m1": 1.0 + math.log(3)}})
    counts = dict.fromkeys(("", "m1"), 0)
    for number in range(800):
        context = make_question("ada", number, written=("", "m1"))
        network_id, requested = assign(replace(context, draw=replace(context.draw, memory=memory)))
        assert requested is None
        counts[network_id] += 1
    assert counts["m1"] / 800 == pytest.approx(0.75, abs=0.05)
    for number in range(20):
        context = make_question("ada", number, written=("",))
        expected = RequestedProgram(program=SizedProgram(size=find_size(context, "m1"), target="onnx"), lost=1.0)
        assert assign(context) == ("", expected), "no round waits for a program"
    assert assign(make_question("ada", 1, written=()))[0] == ""


def assign(context: AssignmentContext) -> tuple[str, RequestedProgram | None]:
    assignment = METHOD.roles().assigner.assign(context)
    assert assignment.candidate is not None
    return assignment.candidate.architecture.network, assignment.requested


def find_size(context: AssignmentContext, network_id: str) -> Architecture:
    (architecture,) = (
        candidate.architecture for candidate in context.candidates if candidate.architecture.network == network_id
    )
    return architecture


@relaxed
@given(memory_bytes=st.integers(0, 3 * 10**6), macs=st.none() | st.integers(0, 4000), number=st.integers(1, 99))
def test_nobody_is_given_what_it_cannot_carry(memory_bytes: int, macs: int | None, number: int) -> None:
    """T3 with measured costs; with "macs", compute alone."""
    context = make_question("ada", number, written=("", "m1"))
    budget = replace(context.budget, memory_bytes=memory_bytes, forward_macs=macs)
    context = replace(context, budget=budget)
    candidate = METHOD.roles().assigner.assign(context).candidate
    allowed = [option for option in context.candidates if context.allows(option)]
    assert candidate in allowed if allowed else candidate is None
    by_macs = replace(METHOD, compatible="macs").roles().assigner.assign(context).candidate
    within = [option for option in context.candidates if macs is None or option.forward_macs <= macs]
    assert by_macs in within if within else by_macs is None


def test_evaluation_takes_the_highest_utility_of_those_that_are_ready() -> None:
    standing = METHOD.roles().networks.standing
    assert standing is not None
    networks = {lineage.id: plan().get_declared(lineage).network for lineage in lineages()}
    client = Participant(client_id="ada", architecture=find_whole(), size=find_whole())
    for utilities, ready, expected in (
        ({"": 1.0, "m1": 2.0}, ("", "m1"), "m1"),
        ({"": 1.0, "m1": 2.0}, ("",), ""),
        ({"": 3.0, "m1": 2.0}, ("", "m1"), ""),
        ({}, ("", "m1"), "m1"),
    ):
        memory = FedTransMemory(utilities={"ada": utilities})
        sizes = [networks[name].full_architecture() for name in ready]
        context = StandingContext(seed=0, client=client, networks=networks, ready=sizes.__contains__, memory=memory)
        assert standing(context) == networks[expected].full_architecture()


# --- beginning and end ------------------------------------------------------------------------------------------------


def shapes(lineage: Lineage) -> dict[str, tuple[int, ...]]:
    return {name: decl.shape for name, decl in network_of(lineage.config).tensors.items()}


def test_a_run_begins_with_what_its_weakest_client_carries() -> None:
    begin = FedTrans().roles().networks.begin
    assert begin is not None

    def begin_with(limit: int) -> tuple[Lineage, ...]:
        def carried_by(lineage: Lineage) -> tuple[str, ...]:
            network = network_of(lineage.config)
            size = sum(math.prod(decl.shape) for decl in network.tensors.values())
            return ("ada", "bob") if size <= limit else ("ada",)

        return begin(
            BeginContext(network=plan().network, rates=(0.25, 0.5, 1.0), clients=("ada", "bob"), carried_by=carried_by)
        )

    assert begin_with(10**9) == (), "the whole of it"
    (half,) = begin_with(700)
    assert shapes(half) == plan().network.shapes(list_widths(plan().network, (0.5,))[0])
    (quarter,) = begin_with(1)
    assert shapes(quarter) == plan().network.shapes(list_widths(plan().network, (0.25,))[0])


def test_a_failed_attempt_leaves_nothing_of_the_configured_network() -> None:
    """No client could carry it, and in the next attempt one client is weaker than before."""
    context = context_of(method=FedTrans(first="weakest"))
    state = measuring(context)
    for attempt, budgets in enumerate(((10**9, 10**9, 10**9), (10, 10**9, 10**9))):
        for name, memory_bytes in zip(CLIENTS, budgets, strict=True):
            message = telemetry(context, name, memory_bytes=memory_bytes, attempt=attempt)
            state, actions = step(context, state, message, 2.0)
            state, _ = perform_searches(context, state, actions, 2.0)
        assert state.phase == "train"
        if not attempt:
            for name in CLIENTS:
                state, _ = step(context, state, prepared(context, state, name, planned_peak_bytes=10**10), 2.0)
            assert [program.program.size.network for program in state.written.values()] == [""], (
                "it is known to be too large"
            )
            assert (state.phase, state.failed_attempts.count) == ("measure", 1)
    assert [(program.id, program.living) for program in state.lineages] == [("", False), ("m0", True)]
    assert not state.written
    assert {client.size.network for client in state.clients.values() if client.size is not None} == {"m0"}


def test_a_run_ends_where_accuracy_gains_too_little() -> None:
    roles = replace(METHOD, stop_rounds=3, stop_gain=0.01).roles()
    assert roles.memory.remember is not None
    memory, ended = FedTransMemory(), []
    for accuracy in (0.1, 0.5, 0.6, 0.605, 0.6, 0.608, 0.6):
        memory = roles.memory.remember(
            memory, close_round(Growth(parameters={"": 1}, newest=""), LOSSES, accuracy=accuracy)
        )
        ended.append(roles.memory.stop(memory))
    assert [bool(reason) for reason in ended] == [False, False, False, False, False, True, True]
    assert ended[5] == "its accuracy has gained 0.0080 in 3 rounds, which is less than 0.01"
    never = replace(METHOD, stop_rounds=0).roles()
    assert never.memory.stop(memory) == ""


@pytest.mark.slow
def test_a_run_of_growing_networks_ends_with_the_same_bits_however_often_it_is_killed(tmp_path: Path) -> None:
    """Fake devices record which network they trained."""
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
        result = world.server.result()
        trained = [sorted(row.architecture.split()[0] for row in record.clients) for record in result.rounds]
        results.append((world.model_bytes(), world.server.state.memory, result.networks, trained))
    assert results[0] == results[1]
    _, _, lines, trained = results[0]
    assert len(lines) >= 3
    assert len({name for names in trained for name in names}) > 1, "later networks are trained, too"


@pytest.mark.parametrize(("count", "without", "alone"), [(20, 1, False), (20, 2, False), (20, 3, True), (5, 1, True)])
def test_one_of_many_that_claims_to_have_nothing_does_not_keep_the_first_model_small(
    count: int, without: int, alone: bool
) -> None:
    """One in ten clients may be left behind; with fewer clients, each can carry the first model, as in the paper."""
    names = tuple(f"c{index:02d}" for index in range(count))
    network, tried = plan().network, list[Lineage]()

    def carried_by(lineage: Lineage) -> tuple[str, ...]:
        tried.append(lineage)
        return names[without:] if len(tried) < 3 else names

    def count_tried(method: FedTrans) -> int:
        tried.clear()
        begin = method.roles().networks.begin
        assert begin is not None
        begin(BeginContext(network=network, rates=(0.25, 0.5, 1.0), clients=names, carried_by=carried_by))
        return len(tried)

    assert count_tried(FedTrans()) == (3 if alone else 1)
    assert count_tried(FedTrans(left_behind=0.0)) == 3
