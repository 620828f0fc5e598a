"""Programs that are written before the rounds that need them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    perform_searches,
    prepared,
    program_result,
    refusal,
    request_program,
    select_requests,
    telemetry,
    update,
)
from server.methods.method_cases import QUICK
from server.server_rig import search_of

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.rows import build_round_record
from subfleet.link.traffic import Traffic
from subfleet.methods.assigner import Assignment, AssignmentContext, Draw, WrittenSize
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, Close, RequestDone, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest, ProgramRequest
from subfleet.search.queue import ProgramFacts, RequestedProgram, SizedProgram
from subfleet.settings.sections import Deadlines
from subfleet.testing.rounds import with_steps

SEARCH = DynamicSelection(distillation=None, estimates="estimated")


class RequestedPrograms:
    """An assigner that requests a size of the space per client, by index, and gives the smallest until it is written.

    Smaller sizes lose a little more. If not `content`, it requests a size even after that is written.
    """

    def __init__(self, *, content: bool = True, **indices: int) -> None:
        self.content = content
        self.indices = indices
        self.seen: list[AssignmentContext] = []

    def __call__(self, inputs: AssignmentContext) -> Assignment:
        self.seen.append(inputs)
        index = self.indices.get(inputs.draw.client_id, 0)
        choice = inputs.candidates[index]
        ready = choice == inputs.candidates[0] or (
            self.content and choice.architecture.architecture_id in inputs.written
        )
        if ready and inputs.allows(choice):
            return Assignment(candidate=choice)
        requested_program = RequestedProgram(
            program=SizedProgram(size=choice.architecture, target=inputs.target), lost=(30 - index) / 100
        )
        return Assignment(candidate=inputs.candidates[0], requested=None if ready else requested_program)


def context_requesting(requested_programs: RequestedPrograms, **changes: Any) -> RunContext:
    context = context_of(**changes)
    return replace(context, roles=with_steps(context.roles, assign=requested_programs))


def assign_all(context: RunContext, state: RunState, now_s: float = 2.0) -> tuple[RunState, list[SizedProgram]]:
    """Every client sends telemetry and is assigned a size; returns the programs that are to be written."""
    all_actions: tuple[Action, ...] = ()
    for name in CLIENTS:
        state, actions = step(context, state, telemetry(context, name, state.round), now_s)
        all_actions += actions
    assert state.phase == "train"
    state, all_actions = perform_searches(context, state, all_actions, now_s)
    return state, [request.program for request in select_requests(ProgramRequest, all_actions)]


def _estimate_bytes(context: RunContext, size: Architecture | None) -> int:
    return 0 if size is None else context.first.estimate(size).training_memory_bytes["onnx"]


def train_all(context: RunContext, state: RunState, now_s: float = 3.0) -> tuple[RunState, tuple[Action, ...]]:
    """Every program's plan equals its cost estimate, and every update is stored."""
    all_actions: tuple[Action, ...] = ()
    for name in CLIENTS:
        event = prepared(context, state, name, planned_peak_bytes=_estimate_bytes(context, state.clients[name].size))
        state, _ = step(context, state, event, now_s)
        state, actions = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            now_s,
        )
        all_actions += actions
    return state, all_actions


def aggregate(context: RunContext, state: RunState, now_s: float = 4.0) -> tuple[RunState, Close]:
    """The round is closed, and the next one is announced."""
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    state, actions = step(context, state, event, now_s)
    close = actions[0]
    assert isinstance(close, Close)
    return state, close


def write_queue(context: RunContext, state: RunState, *, trainable: bool = True) -> RunState:
    """Write all of the queue, with plans equal to the cost estimates, or with none if the target cannot train it."""
    for queued in state.queue:
        peak_bytes = _estimate_bytes(context, queued.size) if trainable else None
        state, _ = step(context, state, program_result(state, queued, peak_bytes), 3.0)
    return state


def indices_of(context: RunContext, queue: list[SizedProgram] | tuple[SizedProgram, ...]) -> list[int]:
    sizes = [size.architecture_id for size in context.space]
    return [sizes.index(queued.size.architecture_id) for queued in queue]


@pytest.mark.parametrize(("limit", "expected"), [(1, [3]), (2, [3, 1]), (4, [3, 1])])
def test_a_round_begins_a_limited_number_of_programs_the_most_requested_first(limit: int, expected: list[int]) -> None:
    context = context_requesting(RequestedPrograms(ada=1, bob=3, cyd=3), exports_per_round=limit)
    state, exports = assign_all(context, measuring(context))
    assert indices_of(context, exports) == indices_of(context, state.queue) == expected
    assert {client.size.architecture_id for client in state.clients.values() if client.size} == {
        context.space[0].architecture_id
    }


def test_a_size_is_requested_and_written_for_each_runtime() -> None:
    requested_programs = RequestedPrograms(ada=2, bob=2, cyd=2)
    context = context_requesting(requested_programs, exports_per_round=1)
    state = measuring(context)
    other = replace(state.profiles["cyd"], runtimes=("executorch",))
    state = replace(state, profiles=state.profiles.with_items({"cyd": other}))
    state, first = assign_all(context, state)
    state, _ = aggregate(context, write_queue(context, train_all(context, state)[0]))
    state, second = assign_all(context, state)
    assert [(program.size, program.target) for program in (*first, *second)] == [
        (context.space[2], "onnx"),
        (context.space[2], "executorch"),
    ]
    smallest, preferred = context.space[0].architecture_id, context.space[2].architecture_id
    assert [set(inputs.written) for inputs in requested_programs.seen[3:]] == [
        {smallest, preferred},
        {smallest, preferred},
        {smallest},
    ]


def test_nothing_is_begun_twice_whatever_is_under_way_or_written() -> None:
    requested_programs = RequestedPrograms(ada=1, bob=2, cyd=3)
    context = context_requesting(
        requested_programs, exports_per_round=1, rounds=4, quorum=0.9
    )  # not strict: a round does not wait for the queue
    state, begun = assign_all(context, measuring(context))
    state, _ = aggregate(context, train_all(context, state)[0])
    state, more = assign_all(context, state)
    assert indices_of(context, state.queue) == [1, 2], "the first is still under way"
    assert indices_of(context, [*begun, *more]) == [1, 2]
    state, _ = step(context, state, program_result(state, begun[0], 1000), 3.0)
    state, _ = aggregate(context, train_all(context, state)[0])
    state, last = assign_all(context, state)
    assert indices_of(context, last) == [3]
    assert indices_of(context, state.queue) == [2, 3]
    assert state.clients["ada"].size == context.space[1]
    assert request_program(state.clients["ada"]) is None


def test_a_written_program_is_not_written_again_even_on_request() -> None:
    context = context_requesting(RequestedPrograms(content=False, ada=2))
    state, begun = assign_all(context, measuring(context))
    state, _ = aggregate(context, write_queue(context, train_all(context, state)[0]))
    state, again = assign_all(context, state)
    assert (len(begun), again, state.queue) == (1, [], ())
    assert request_program(state.clients["ada"]) == RequestedProgram(
        program=SizedProgram(size=context.space[2], target="onnx"), lost=0.28
    )


def test_a_program_counts_from_the_next_round_on() -> None:
    requested_programs = RequestedPrograms(ada=2, bob=2, cyd=2)
    context = context_requesting(requested_programs)
    state, (queued,) = assign_all(context, measuring(context))
    state, _ = step(context, state, program_result(state, queued, 777), 3.0)
    assert (state.queue, state.written[queued.key].facts.planned_peak_bytes, state.written[queued.key].run_attempt) == (
        (),
        777,
        1,
    )
    state, _ = step(context, state, prepared(context, state, "ada"), 3.0)
    step(context, state, refusal(context, state, "ada", available_bytes=10**6), 3.0)
    assert requested_programs.seen[-1].below is not None, "it asked again within the round"
    assert all(not inputs.written for inputs in requested_programs.seen), "programs of its own tasks count later too"
    state = replace(
        state, clients=MappingProxyType({**state.clients, "ada": replace(state.clients["ada"], stage="done")})
    )
    for name in CLIENTS[1:]:
        state, _ = step(context, state, prepared(context, state, name), 3.0)
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            3.0,
        )
    state, close = aggregate(context, state)
    assert close.exported == 2
    assign_all(context, state)
    assert requested_programs.seen[-1].written == {
        context.space[index].architecture_id: WrittenSize(
            size=context.space[index], facts=ProgramFacts(planned_peak_bytes=peak)
        )
        for index, peak in ((0, 1000), (2, 777))
    }


def test_a_program_that_was_never_queued_does_not_count_as_written() -> None:
    context = context_requesting(RequestedPrograms(ada=2))
    state, (queued,) = assign_all(context, measuring(context))
    stray = replace(queued, target="executorch")
    assert step(context, state, program_result(state, stray, 1), 3.0) == (state, ())
    once, _ = step(context, state, program_result(state, queued, 1), 3.0)
    assert step(context, once, program_result(state, queued, 2), 3.0) == (once, ())


def is_aggregating(actions: tuple[Action, ...]) -> bool:
    return any(isinstance(action, AggregationRequest) for action in actions)


def test_a_strict_round_waits_for_the_queue_and_ends_with_its_last_program() -> None:
    context = context_requesting(RequestedPrograms(ada=1, bob=2))
    state, exports = assign_all(context, measuring(context))
    state, actions = train_all(context, state)
    assert (state.phase, is_aggregating(actions)) == ("train", False)
    state, actions = step(context, state, program_result(state, exports[0], 1), 5.0)
    assert (state.phase, is_aggregating(actions)) == ("train", False)
    state, actions = step(context, state, program_result(state, exports[1], 1), 6.0)
    assert (state.phase, is_aggregating(actions)) == ("aggregate", True)


def test_the_deadline_ends_the_wait_for_the_queue() -> None:
    context = context_requesting(RequestedPrograms(ada=1), deadlines=Deadlines(round_s=60.0))
    state, _ = train_all(context, assign_all(context, measuring(context))[0])
    assert step(context, state, Tick(), 61.9)[0].phase == "train"
    state, actions = step(context, state, Tick(), 62.0)
    assert (state.phase, is_aggregating(actions), len(state.queue)) == ("aggregate", True, 1)
    assert {client.stage for client in state.clients.values()} == {"done"}


def test_a_round_that_does_not_wait_for_the_slowest_does_not_wait_for_the_queue() -> None:
    context = context_requesting(RequestedPrograms(ada=1), quorum=0.9)
    state, actions = train_all(context, assign_all(context, measuring(context))[0])
    assert (state.phase, is_aggregating(actions), len(state.queue)) == ("aggregate", True, 1)


@pytest.mark.parametrize("name", QUICK)
def test_no_method_gives_a_size_that_its_target_cannot_train(name: str) -> None:
    context = context_of(method=QUICK[name])
    broken = {
        size.architecture_id: WrittenSize(size=size, facts=ProgramFacts(planned_peak_bytes=None))
        for size in context.space[1:]
    }
    base = AssignmentContext(
        networks={"": context.network},
        candidates=context.first.candidates,
        estimate=context.first.estimate,
        draw=Draw(seed=0, round=2, client_id="ada", memory=context.roles.memory.initial),
        target="onnx",
        budget=Budget(memory_bytes=2**61),
        previous=None,
        written=broken,
        search=search_of(context),
    )
    assignment = context.roles.assigner.assign(base)
    assert assignment.candidate is not None
    assert assignment.candidate.architecture.architecture_id not in broken
    assert assignment.requested is None or assignment.requested.program.size.architecture_id not in broken
    last = assignment.candidate.architecture
    everything = {**broken, last.architecture_id: WrittenSize(size=last, facts=ProgramFacts(planned_peak_bytes=None))}
    again = context.roles.assigner.assign(replace(base, written=everything, previous=last))
    assert again.candidate is None or again.candidate.architecture.architecture_id not in everything


def _assign(context: RunContext, state: RunState, budgets: Mapping[str, int]) -> tuple[RunState, list[SizedProgram]]:
    all_actions: tuple[Action, ...] = ()
    for name in CLIENTS:
        event = telemetry(context, name, state.round, memory_bytes=budgets[name])
        state, actions = step(context, state, event, 2.0)
        all_actions += actions
    state, all_actions = perform_searches(context, state, all_actions, 2.0)
    return state, [request.program for request in select_requests(ProgramRequest, all_actions)]


BUDGETS = {"ada": 13_000, "bob": 9_000, "cyd": 16_000}
"""Budgets between the sizes of the uniform space, and one above the largest."""


def _run_first_round(context: RunContext) -> RunState:
    """The first round of a search, until all updates are stored."""
    state, exports = _assign(context, measuring(context), BUDGETS)
    assert exports, "the best size that fits has no program yet"
    return train_all(context, state)[0]


@pytest.mark.slow
def test_a_size_that_cannot_be_written_is_neither_given_nor_queued_again() -> None:
    context = context_of(method=SEARCH)
    state = _run_first_round(context)
    queued = state.queue
    state, _ = aggregate(context, write_queue(context, state, trainable=False))
    state, again = _assign(context, state, BUDGETS)
    unwritable = {program.key for program in queued}
    assert not unwritable & {program.key for program in again}
    for client in state.clients.values():
        assert client.size is not None
        assert f"onnx/{client.size.architecture_id}" not in unwritable


def test_a_search_gets_its_requested_programs_one_round_later_as_recorded() -> None:
    context = context_of(method=SEARCH)
    state = _run_first_round(context)
    requested = {
        name: None if (requested_program := request_program(client)) is None else requested_program.program.size
        for name, client in state.clients.items()
    }
    state, close = aggregate(context, write_queue(context, state))
    record = build_round_record(context, close, Traffic())
    # The first programs, which clients may share, and those for the next round.
    assert record.programs_written == len({row.architecture_id for row in record.clients}) + len(
        set(requested.values()) - {None}
    )
    for row in record.clients:
        better = requested[row.client_id]
        if better is None:
            assert (row.requested, row.parameters_lost) == ("", 0.0)
            continue
        assert row.requested == better.name
        assert row.parameters_lost == pytest.approx(1 - row.parameters / context.first.estimate(better).parameters)
        assert row.parameters_lost > 0
    assert {row.requested for row in record.clients} != {""}
    state, exports = _assign(context, state, BUDGETS)
    assigned = {client.size for client in state.clients.values()}
    assert {f"onnx/{size.architecture_id}" for size in assigned if size} <= {
        known.program.key for known in state.written.values()
    }
    assert assigned & {size for size in requested.values() if size}
    state = train_all(context, state)[0]
    record = build_round_record(context, aggregate(context, write_queue(context, state))[1], Traffic())
    assert record.programs_written == len(exports)


@pytest.mark.parametrize("phase", ["train", "aggregate"])
def test_a_restarted_server_continues_the_queue(phase: str) -> None:
    context = context_requesting(RequestedPrograms(ada=1, bob=2), quorum=1.0 if phase == "train" else 0.9)
    state, exports = assign_all(context, measuring(context))
    state, _ = train_all(context, state)
    assert state.phase == phase
    resumed = [request.program for request in select_requests(ProgramRequest, list_resume_actions(context, state))]
    assert resumed == exports
    state, _ = step(context, state, program_result(state, exports[0], 1), 5.0)
    resumed = [request.program for request in select_requests(ProgramRequest, list_resume_actions(context, state))]
    assert resumed == exports[1:]


@pytest.mark.slow
def test_the_journal_restores_pool_plans_and_queue_and_the_search_continues_alike(tmp_path: Path) -> None:
    context = context_of(method=SEARCH, exports_per_round=2, quorum=0.9)
    engine = open_database(tmp_path)
    run_id = begin_run(engine, name="test", settings="{}", round_count=2)
    journal = Journal(engine, run_id)
    state = _run_first_round(context)
    state, _ = step(context, state, program_result(state, state.queue[0], 5000), 3.0)
    assert state.pool
    assert state.queue
    journal.save(RunState(), state)
    loaded = Journal(open_database(tmp_path), run_id).load(9.0)
    assert (loaded.pool, loaded.queue, dict(loaded.written)) == (state.pool, state.queue, dict(state.written))
    uninterrupted, resumed = (
        _assign(fresh, aggregate(fresh, replace(run, live=replace(run.live, members=state.live.members)))[0], BUDGETS)
        for fresh, run in ((context, state), (context_of(method=SEARCH, exports_per_round=2, quorum=0.9), loaded))
    )
    assert [(client.size, request_program(client)) for client in uninterrupted[0].clients.values()] == [
        (client.size, request_program(client)) for client in resumed[0].clients.values()
    ]
    assert (uninterrupted[1], uninterrupted[0].pool) == (resumed[1], resumed[0].pool)
