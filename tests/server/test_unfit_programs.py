"""Programs that a device cannot run: operators that its runtime lacks, and programs that it has refused before."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.coordinator_cases import (
    CLIENTS,
    blob,
    context_of,
    measuring,
    perform_searches,
    prepared,
    program_result,
    refusal,
    request_program,
    select_requests,
    size_of,
    task_failed,
    telemetry,
    update,
)
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedfa import FedFA
from subfleet.protocol.messages import RefusalReason
from subfleet.protocol.programs import ProgramRef
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.obstacles import LASTING_LIMITS, REFUSALS, record_unfit
from subfleet.rounds.offers import build_client
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, Event, RequestDone, SendTask
from subfleet.rounds.sizing import propose_sizes
from subfleet.rounds.state import RunState
from subfleet.rounds.tasks import request_task
from subfleet.rounds.work import AggregatedRound, CheckRequest, ProgramRequest, Scorable, ScoringRequest, TaskRequest
from subfleet.search.candidates import Obstacle
from subfleet.search.queue import ProgramFacts, SizedProgram, WrittenProgram

PLAN = context_of(rounds=4)
CALLED = ("Conv", "Gelu")
EVERY = dict.fromkeys(range(len(PLAN.space)), ("Erf", *CALLED))


def update_profile(state: RunState, name: str, **changes: Any) -> RunState:
    """A client sends its profile again, with changes."""
    return step(PLAN, state, replace(state.profiles[name], **changes), 1.0)[0]


def assign_sizes(context: RunContext, state: RunState) -> tuple[RunState, tuple[Action, ...]]:
    """All clients send telemetry, and their sizes are assigned."""
    all_actions: tuple[Action, ...] = ()
    for name in CLIENTS:
        state, actions = step(context, state, telemetry(context, name, state.round), 2.0)
        all_actions += actions
    assert state.phase == "train"
    return perform_searches(context, state, all_actions, 2.0)


def complete_task(context: RunContext, state: RunState, name: str, operators: tuple[str, ...] = CALLED) -> Event:
    return prepared(context, state, name, operators=operators)


def close_round(context: RunContext, state: RunState) -> RunState:
    """All clients with a submodel train it; the next round is announced."""
    for name in [name for name, client in state.clients.items() if client.open]:
        if state.clients[name].stage == "preparing":
            state, _ = step(context, state, complete_task(context, state, name), 3.0)
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            3.0,
        )
    assert state.phase == "aggregate"
    return step(
        context,
        state,
        RequestDone(
            request=AggregationRequest(round=state.round, clients=()),
            result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
        ),
        4.0,
    )[0]


def refuse_task(state: RunState, reason: RefusalReason) -> RunState:
    """The first client refuses its task of the first round."""
    state, _ = step(PLAN, state, complete_task(PLAN, state, "ada"), 2.0)
    answer = replace(refusal(PLAN, state, "ada", available_bytes=None if reason == "memory" else 10), reason=reason)
    answer = replace(answer, detail="no kernel")
    return step(PLAN, state, answer, 3.0)[0]


@pytest.mark.parametrize("reason", ["runtime", "program"])
def test_a_device_does_not_get_a_size_again_that_it_cannot_run(
    reason: Literal["runtime", "program"],
) -> None:
    state, _ = assign_sizes(PLAN, measuring(PLAN))
    first = size_of(state.clients["ada"])
    state = refuse_task(state, reason)
    client = state.clients["ada"]
    assert (client.stage, client.refusals) == ("preparing", (f"{reason}: no kernel",))
    assert client.size == PLAN.space[-2], "another program may not need the operator that the runtime lacks"
    assert client.limit == reason
    assert state.unfit == {f"ada/onnx/{first}": Obstacle(limit=reason, why=f"{reason}: no kernel")}
    state, _ = assign_sizes(PLAN, close_round(PLAN, state))
    assert state.clients["ada"].refusals == (), "each round has its own refusals"
    assert size_of(state.clients["ada"]) == PLAN.space[-2].architecture_id
    assert state.clients["ada"].limit == reason, "in later rounds as well"
    assert {size_of(state.clients[name]) for name in CLIENTS[1:]} == {first}, "other clients may have it"


@pytest.mark.parametrize(
    "reason", [reason for reason, course in REFUSALS.items() if course.limit not in LASTING_LIMITS]
)
def test_refusals_for_other_reasons_are_not_remembered(reason: RefusalReason) -> None:
    assert refuse_task(assign_sizes(PLAN, measuring(PLAN))[0], reason).unfit == {}


@pytest.mark.parametrize("reason", ["link", "compute"])
def test_a_task_that_takes_too_long_is_followed_by_a_smaller_one(reason: RefusalReason) -> None:
    """As often as a round has attempts; the memory budget stays the same."""
    state, _ = assign_sizes(PLAN, measuring(PLAN))
    budget, tried = state.clients["ada"].offer.budget, []
    while state.clients["ada"].stage == "preparing":
        tried.append(size_of(state.clients["ada"]))
        state = refuse_task(state, reason)
        assert state.clients["ada"].offer.budget == budget
        if state.clients["ada"].stage == "preparing":
            assert state.clients["ada"].limit == reason
    assert tried == [size.architecture_id for size in reversed(PLAN.space[-PLAN.config.max_attempts :])]
    assert (state.clients["ada"].stage, state.clients["ada"].reason) == ("refused", f"{reason}: no kernel")
    assert {client.stage for name, client in state.clients.items() if name != "ada"} == {"preparing"}


def test_a_runtime_that_refuses_every_program_ends_its_round_refused_and_its_run_skipped() -> None:
    """A round tries as many sizes as it has attempts, and a run none twice."""
    state, _ = assign_sizes(PLAN, measuring(PLAN))
    tried = []
    while state.clients["ada"].stage == "preparing":
        tried.append(size_of(state.clients["ada"]))
        state = refuse_task(state, "runtime")
    assert tried == [size.architecture_id for size in reversed(PLAN.space[-PLAN.config.max_attempts :])]
    assert (state.clients["ada"].stage, len(state.clients["ada"].refusals)) == ("refused", PLAN.config.max_attempts)
    state, _ = assign_sizes(PLAN, close_round(PLAN, state))
    assert size_of(state.clients["ada"]) == PLAN.space[0].architecture_id
    state, _ = assign_sizes(PLAN, close_round(PLAN, refuse_task(state, "runtime")))
    assert state.clients["ada"].reason == "no submodel fits: the smallest was refused by the device: runtime: no kernel"


def test_a_size_that_cannot_be_exported_is_not_asked_for_again_by_any_device_of_that_runtime() -> None:
    state, _ = assign_sizes(PLAN, measuring(PLAN))
    largest = PLAN.space[-1].architecture_id
    failed = task_failed(state, "ada", "export failed: no such lowering")
    state, _ = step(PLAN, state, failed, 2.0)
    assert state.clients["ada"].reason == failed.reason
    state, _ = assign_sizes(PLAN, close_round(PLAN, state))
    assert {size_of(client) for client in state.clients.values()} == {PLAN.space[-2].architecture_id}
    assert [key for key, program in state.written.items() if program.facts.planned_peak_bytes is None] == [
        f"onnx/{largest}"
    ]


def prepare_candidates(context: RunContext, state: RunState) -> RunState:
    """The first client has candidates to score."""
    request = request_task(state, state.clients["ada"])
    assert request is not None
    event = RequestDone(
        request=request,
        result=tuple(
            Scorable(
                size=size,
                program=ProgramRef(program_id="s", target="onnx", blob=blob(size.architecture_id)),
                weights=blob(f"first {size.architecture_id}"),
                planned_peak_bytes=1000,
            )
            for size in state.clients["ada"].proposals
        ),
    )
    return step(context, state, event, 2.0)[0]


def test_candidates_that_a_runtime_could_not_score_are_not_proposed_again() -> None:
    """The device is given a size in the same round; it may train what it could not score."""
    context = context_of(rounds=4, method=FedFA(choice="score"))
    state, _ = assign_sizes(context, measuring(context))
    state = prepare_candidates(context, state)
    proposals = state.clients["ada"].proposals
    answer = replace(refusal(context, state, "ada"), reason="runtime", detail="no kernel")
    state, actions = step(context, state, answer, 3.0)
    assert [request.participant.size for request in select_requests(TaskRequest, actions)] == [context.space[-1]]
    unfit = Obstacle(limit="runtime", why="runtime: no kernel")
    assert state.unfit == {f"ada/score/onnx/{size.architecture_id}": unfit for size in proposals}
    assert state.clients["ada"].refusals == ("runtime: no kernel",)
    anew, actions = propose_sizes(context, state, replace(state.clients["ada"], stage="answered"))[:2]
    assert anew.stage == "preparing"
    assert not select_requests(ScoringRequest, actions)
    assert propose_sizes(context, state, replace(state.clients["bob"], stage="answered"))[0].stage == "scoring"


def test_a_restart_forgets_refusals() -> None:
    state = refuse_task(assign_sizes(PLAN, measuring(PLAN))[0], "runtime")
    assert update_profile(state, "ada").unfit == state.unfit, "the same profile comes with every heartbeat"
    assert update_profile(state, "bob", session_id="bob-2").unfit == state.unfit
    assert update_profile(state, "ada", session_id="ada-2").unfit == {}


def test_a_device_that_has_refused_everything_is_skipped_with_its_own_reason() -> None:
    state = measuring(PLAN)
    for size in PLAN.space:
        unfit = Obstacle(limit="runtime", why="runtime: no kernel")
        state = replace(state, unfit={**state.unfit, f"ada/onnx/{size.architecture_id}": unfit})
    state, _ = assign_sizes(PLAN, state)
    client = state.clients["ada"]
    assert (client.stage, client.size) == ("skipped", None)
    assert client.reason == "no submodel fits: the smallest was refused by the device: runtime: no kernel"


def test_the_oldest_refusals_are_forgotten() -> None:
    state, _ = assign_sizes(PLAN, measuring(PLAN))
    older = {f"device{number}/onnx/size": Obstacle(limit="program", why="no kernel") for number in range(9_999)}
    state = replace(state, unfit=MappingProxyType(older))
    for name in CLIENTS:
        state, _ = step(PLAN, state, complete_task(PLAN, state, name), 2.0)
        answer = replace(refusal(PLAN, state, name), reason="program")
        state = record_unfit(state, state.clients[name], answer, "no kernel")
    names = [key.split("/")[0] for key in state.unfit]
    assert (len(names), names[0], names[-3:]) == (10_000, "device2", [*CLIENTS])


def test_the_journal_remembers_operators_and_refusals(tmp_path: Path) -> None:
    state = refuse_task(assign_sizes(PLAN, measuring(PLAN))[0], "runtime")
    engine = open_database(tmp_path)
    Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2)).save(RunState(), state)
    engine = open_database(tmp_path)
    loaded = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2)).load(9.0)
    assert (loaded.unfit, loaded.written) == (state.unfit, state.written)
    assert {program.facts.operators for program in loaded.written.values()} == {CALLED}


def test_a_program_with_an_operator_that_the_device_lacks_leads_to_other_tasks_and_then_to_none() -> None:
    state, _ = assign_sizes(PLAN, update_profile(measuring(PLAN), "ada", operators=("Conv", "Relu")))
    positions: list[int] = []
    actions: tuple[Action, ...] = ()
    for _ in range(PLAN.config.max_attempts):
        assert state.clients["ada"].stage == "preparing"
        positions.append([size.architecture_id for size in PLAN.space].index(size_of(state.clients["ada"])))
        state, actions = step(PLAN, state, complete_task(PLAN, state, "ada"), 2.0)
        assert not [action for action in actions if isinstance(action, SendTask)]
    assert positions == [3, 2, 1]
    client = state.clients["ada"]
    assert (client.stage, client.size) == ("skipped", None)
    assert client.reason == "its runtime 'onnx' lacks Gelu, which the program calls"
    assert select_requests(TaskRequest, actions) == []


@pytest.mark.parametrize("listed", [(), CALLED, ("Relu", *CALLED)])
def test_a_device_that_has_every_operator_or_lists_none_is_given_its_task(listed: tuple[str, ...]) -> None:
    state, _ = assign_sizes(PLAN, update_profile(measuring(PLAN), "ada", operators=listed))
    state, actions = step(PLAN, state, complete_task(PLAN, state, "ada"), 2.0)
    assert [action.task.client_id for action in actions if isinstance(action, SendTask)] == ["ada"]


def known_programs(context: RunContext, operators: Mapping[int, tuple[str, ...]]) -> Mapping[str, WrittenProgram]:
    """Programs of sizes by their index in the space, written before the first round."""
    programs = {index: SizedProgram(size=context.space[index], target="onnx") for index in operators}
    facts = {index: ProgramFacts(planned_peak_bytes=1000, operators=names) for index, names in operators.items()}
    return MappingProxyType(
        {
            program.key: WrittenProgram(program=program, facts=facts[index], run_attempt=0)
            for index, program in programs.items()
        }
    )


def test_a_known_program_with_an_operator_that_the_device_lacks_is_not_given() -> None:
    state = update_profile(measuring(PLAN), "ada", operators=("Conv",))
    state = replace(state, written=known_programs(PLAN, {3: CALLED, 2: CALLED, 1: ("Conv",)}))
    state, _ = assign_sizes(PLAN, state)
    assert [client.size for _, client in sorted(state.clients.items())] == [PLAN.space[1], PLAN.space[3], PLAN.space[3]]


def test_the_reason_names_the_missing_operator_if_no_size_is_left() -> None:
    state = update_profile(measuring(PLAN), "ada", operators=("Conv",))
    state, _ = assign_sizes(PLAN, replace(state, written=known_programs(PLAN, EVERY)))
    assert state.clients["ada"].reason == (
        "no submodel fits: the smallest calls Erf, Gelu, which the device's runtime 'onnx' lacks"
    )


def test_the_reason_is_reported_if_no_size_can_be_written() -> None:
    unwritten = ProgramFacts(planned_peak_bytes=None)
    unwritable = {key: replace(program, facts=unwritten) for key, program in known_programs(PLAN, EVERY).items()}
    state, _ = assign_sizes(
        PLAN, replace(update_profile(measuring(PLAN), "bob", runtimes=("executorch",)), written=unwritable)
    )
    assert state.clients["ada"].reason == "no submodel fits: the smallest cannot be trained on 'onnx'"
    assert state.clients["bob"].size == PLAN.space[-1]


@pytest.mark.slow
def test_a_run_goes_on_without_the_device_whose_runtime_lacks_an_operator(tmp_path: Path) -> None:
    devices = fleet()
    devices["ada"] = replace(devices["ada"], operators=("Conv",))
    devices["bob"] = replace(devices["bob"], operators=("Relu", *CALLED))
    world = World(tmp_path, config(rounds=2, deploy_targets=()), devices)
    world.exports.operators = CALLED
    world.run()
    for record in world.server.result().rounds:
        ada, bob, cyd = record.clients
        assert ada.status.startswith("skipped: ")
        assert "lacks Gelu" in ada.status
        assert (bob.status, cyd.status) == ("aggregated", "aggregated")


def test_a_search_avoids_operators_that_the_device_lacks() -> None:
    context = context_of(rounds=4, method=DynamicSelection(distillation=None, estimates="estimated"))
    state = update_profile(measuring(context), "ada", operators=("Conv",))
    state, exports = assign_sizes(context, replace(state, written=known_programs(context, {3: CALLED, 2: ("Conv",)})))
    assert (state.clients["ada"].size, state.clients["bob"].size) == (context.space[2], context.space[3])
    requested_program = request_program(state.clients["ada"])
    assert requested_program is None or requested_program.program.size != context.space[3]
    assert all(request.program.size != context.space[3] for request in select_requests(ProgramRequest, exports))


def test_a_program_that_is_written_ahead_keeps_its_operators() -> None:
    queued = SizedProgram(size=PLAN.space[1], target="onnx")
    state = replace(measuring(PLAN), queue=(queued,))
    state, _ = step(PLAN, state, program_result(state, queued, 1, CALLED), 3.0)
    assert state.written[queued.key].facts.operators == CALLED


def test_a_budget_by_the_batch_is_the_same_for_few_samples_and_for_many() -> None:
    """As in FedorAS's tiers: what a device computes for a sample does not depend on how many samples it has."""
    context = context_of(batch_s=2.0)
    few, many = (budget_of(context, samples) for samples in (20, 2000))
    assert few == many == int(60_000 * 2.0 / (3 * context.config.training.batch_size))
    both = context_of(batch_s=2.0, training_s=4.0)
    assert (budget_of(both, 1), budget_of(both, 2000)) == (few, int(60_000 * 4.0 / (3 * 2000))), (
        "the smaller budget counts"
    )


def budget_of(context: RunContext, samples: int) -> int | None:
    profile = measuring(context).profiles["ada"]
    declared = replace(profile, macs_per_s=60_000.0, sample_count=samples)
    budget = build_client(context, RunState(), declared, telemetry(context, "ada", 1)).offer.budget
    return budget.forward_macs


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(macs_per_s=st.floats(10, 10_000), training_s=st.sampled_from([0.0, 10.0, 60.0]), epochs=st.integers(1, 5))
def test_training_keeps_within_the_seconds_that_a_device_gives_to_it(
    macs_per_s: float, training_s: float, epochs: int
) -> None:
    context = context_of(training_s=training_s, training=replace(PLAN.config.training, epochs=epochs))
    state, _ = assign_sizes(context, update_profile(measuring(context), "ada", macs_per_s=macs_per_s))
    ada, bob = state.clients["ada"], state.clients["bob"]
    seconds = [
        3 * candidate.forward_macs * 10 * epochs / macs_per_s for candidate in context.first.candidates
    ]  # of 10 samples
    fitting = [index for index, needed in enumerate(seconds) if not training_s or needed <= training_s]
    assert ada.size == (context.space[fitting[-1]] if fitting else None)
    assert bob.size == context.space[-1], "it does not declare its speed"
    if not fitting:
        assert ada.reason.startswith(
            f"no submodel fits: the smallest takes {context.first.candidates[0].forward_macs} multiply"
        )
