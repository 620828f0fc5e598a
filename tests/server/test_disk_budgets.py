"""The disk of a device is part of its budget: planned before a task is sent, and learned from refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
from server.coordinator_cases import (
    CLIENTS,
    blob,
    context_of,
    measuring,
    perform_searches,
    prepared,
    refusal,
    size_of,
    telemetry,
    update,
)
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.methods.assigner import WrittenSize
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedfa import FedFA
from subfleet.protocol.disk import TRAINED_COPIES, needed_bytes
from subfleet.protocol.messages import Task
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Reading
from subfleet.rounds.assigning import build_question
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.obstacles import select_models
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, RequestDone, SendTask
from subfleet.rounds.state import RunState
from subfleet.rounds.tasks import request_task
from subfleet.rounds.work import (
    AggregatedRound,
    CheckRequest,
    ExportedModels,
    ModelFile,
    ModelsRequest,
    PreparedTask,
    Scorable,
)
from subfleet.search.queue import ProgramFacts

PLAN = context_of(rounds=4)
SIZES = [TRAINED_COPIES * candidate.weight_bytes for candidate in PLAN.first.candidates]


def assign_sizes(
    context: RunContext, state: RunState, disk_bytes: int | None, *, downlink_bps: float | None = None
) -> tuple[RunState, tuple[Action, ...]]:
    """Every client reports its telemetry; the first one also its disk budget."""
    all_actions: tuple[Action, ...] = ()
    for name in CLIENTS:
        report = telemetry(context, name, state.round)
        if name == "ada":
            reading = Reading(memory_free_bytes=report.memory_budget_bytes, downlink_bps=downlink_bps)
            report = replace(report, disk_budget_bytes=disk_bytes, reading=reading)
        state, actions = step(context, state, report, 2.0)
        all_actions += actions
    return perform_searches(context, state, all_actions, 2.0)


def prepare_task(
    context: RunContext, state: RunState, name: str, program_bytes: int
) -> tuple[RunState, tuple[Action, ...]]:
    """Complete the preparation of a client's task, with weights of their true size."""
    client = state.clients[name]
    request = request_task(state, client)
    assert request is not None
    assert client.size is not None
    program = ProgramRef(program_id="p", target="onnx", blob=blob(f"program {size_of(client)}", program_bytes))
    weights = blob(f"weights {size_of(client)}", context.first.estimate(client.size).weight_bytes)
    facts = ProgramFacts(planned_peak_bytes=1000, program_bytes=program_bytes)
    return step(
        context,
        state,
        RequestDone(request=request, result=PreparedTask(program=program, weights=weights, facts=facts)),
        2.0,
    )


def list_sent_tasks(actions: tuple[Action, ...]) -> list[Task]:
    return [action.task for action in actions if isinstance(action, SendTask)]


@pytest.mark.parametrize("index", range(len(SIZES)))
@pytest.mark.parametrize("method", ["heterofl", "search"])
def test_the_largest_size_that_the_disk_holds_is_given(index: int, method: str) -> None:
    changes = {"method": DynamicSelection(distillation=None, estimates="estimated")} if method == "search" else {}
    context = context_of(rounds=4, **changes)
    assert len(set(SIZES)) == len(SIZES)
    state, _ = assign_sizes(context, measuring(context), SIZES[index])
    ada, bob = state.clients["ada"], state.clients["bob"]
    if method == "heterofl":
        assert (ada.size, ada.limit) == (context.space[index], "disk" if index < len(SIZES) - 1 else "")
    assert ada.size is not None
    assert context.first.estimate(ada.size).disk_bytes <= SIZES[index]
    assert (bob.size, bob.limit) == (context.space[-1], ""), "it reports no disk budget"


def test_a_full_disk_is_named_as_the_limit() -> None:
    state, _ = assign_sizes(PLAN, measuring(PLAN), SIZES[0] - 1)
    ada = state.clients["ada"]
    assert (ada.stage, ada.limit, ada.lasts) == ("skipped", "disk", "passing")
    assert ada.reason == (
        f"no submodel fits: the smallest takes {SIZES[0]} bytes of disk beside its program and the budget is "
        f"{SIZES[0] - 1}"
    )


def test_a_program_that_leaves_no_room_is_replaced_by_a_smaller_size_in_the_same_round() -> None:
    """A task takes its program, weights, update and a copy of the update, as on the device."""
    program_bytes = SIZES[-1]
    state, _ = assign_sizes(PLAN, measuring(PLAN), program_bytes + SIZES[1])
    assert state.clients["ada"].size == PLAN.space[-1], "the program is not known yet"
    tasks: list[Task] = []
    for _ in (3, 2, 1):
        assert not tasks
        state, actions = prepare_task(PLAN, state, "ada", program_bytes)
        tasks = list_sent_tasks(actions)
    (task,) = tasks
    assert (task.architecture, state.clients["ada"].limit) == (PLAN.space[1], "disk")
    assert needed_bytes(task) == program_bytes + SIZES[1]
    assert state.clients["ada"].attempt == 0, "a size that was not refused uses no attempt"


def test_a_known_program_counts_when_sizes_are_chosen() -> None:
    state, _ = assign_sizes(PLAN, measuring(PLAN), SIZES[2])
    question = build_question(PLAN, state, state.clients["ada"])
    written = WrittenSize(size=PLAN.space[2], facts=ProgramFacts(planned_peak_bytes=1, program_bytes=1))
    question = replace(question, written={PLAN.space[2].architecture_id: written})
    assert (
        question.why_not(PLAN.first.candidates[2]) == f"takes {SIZES[2] + 1} bytes of disk and the budget is {SIZES[2]}"
    )
    assert question.find_exceeded(PLAN.first.candidates[2]) == {"disk"}
    assert question.allows(PLAN.first.candidates[1])


def refuse_for_disk(state: RunState, available_bytes: int) -> RunState:
    """A device without a reported disk budget refuses its task, with the number of free bytes."""
    state, _ = prepare_task(PLAN, state, "ada", 100)
    refused = refusal(PLAN, state, "ada", available_bytes=available_bytes)
    return step(PLAN, state, replace(refused, reason="disk", detail="too large"), 3.0)[0]


def close_round(state: RunState) -> RunState:
    for name in CLIENTS:
        if state.clients[name].stage == "preparing":
            state, _ = prepare_task(PLAN, state, name, 100)
        state, _ = step(
            PLAN, state, RequestDone(request=CheckRequest(update=update(PLAN, state, name)), result=ChangeSize()), 3.0
        )
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    return step(PLAN, state, event, 4.0)[0]


def test_a_refusal_with_a_budget_is_answered_with_what_fits_and_remembered_in_later_rounds(tmp_path: Path) -> None:
    state, _ = assign_sizes(PLAN, measuring(PLAN), None)
    state = refuse_for_disk(state, SIZES[1] + 100)
    ada = state.clients["ada"]
    assert (ada.size, ada.limit, ada.attempt) == (PLAN.space[1], "disk", 1)
    state = close_round(state)
    engine = open_database(tmp_path)
    Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2)).save(RunState(), state)
    engine = open_database(tmp_path)
    loaded = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2)).load(9.0)
    assert loaded.disks == state.disks == {"ada": SIZES[1] + 100}
    later, _ = assign_sizes(PLAN, state, None)
    assert (later.clients["ada"].size, later.clients["ada"].limit) == (PLAN.space[1], "disk")
    reported, _ = assign_sizes(PLAN, state, SIZES[-1] + 100)
    assert reported.clients["ada"].size == PLAN.space[-1], "its own report is newer"
    restarted, _ = step(PLAN, state, replace(state.profiles["ada"], session_id="ada-2"), 5.0)
    assert restarted.disks == {}


def test_a_program_that_cannot_arrive_within_the_round_is_not_sent() -> None:
    """A program of 1 MB at 16 kbit/s takes 500 s, and the weights the rest; unchanged files are not fetched again."""
    context = context_of(communication_s=600.0)
    state, _ = assign_sizes(context, measuring(context), None, downlink_bps=16_000.0)
    state, actions = prepare_task(context, state, "ada", 1_199_999)
    assert list_sent_tasks(actions) == []
    assert state.clients["ada"].limit == "link"
    state, actions = prepare_task(context, state, "ada", 1_190_000)
    assert len(list_sent_tasks(actions)) == 1


def test_scoring_candidates_share_the_disk() -> None:
    context = context_of(rounds=4, method=FedFA(choice="score"))
    state, _ = assign_sizes(context, measuring(context), 7900)
    client = state.clients["ada"]
    assert len(client.proposals) == 4
    candidates = tuple(
        Scorable(
            size=size,
            program=ProgramRef(program_id="s", target="onnx", blob=blob(size.architecture_id)),
            weights=blob(f"first {size.architecture_id}"),
            planned_peak_bytes=1000,
        )
        for size in client.proposals
    )
    request = request_task(state, client)
    assert request is not None
    _, actions = step(context, state, RequestDone(request=request, result=candidates), 2.0)
    (task,) = list_sent_tasks(actions)
    assert [program.blob for program in task.programs] == [candidate.program.blob for candidate in candidates[:3]]
    assert needed_bytes(task) == 6000


@pytest.mark.parametrize(
    ("disk_bytes", "targets"),
    [(None, ["executorch", "onnx"]), (3000, ["executorch", "onnx"]), (2999, ["onnx"]), (1999, ["executorch"]), (1, [])],
)
def test_a_device_is_sent_the_models_for_which_it_has_room_its_own_first(
    disk_bytes: int | None, targets: list[str]
) -> None:
    state, _ = assign_sizes(PLAN, measuring(PLAN), None)
    client = state.clients["ada"]
    assert client.offer.budget is not None
    client = replace(client, offer=replace(client.offer, budget=replace(client.offer.budget, disk_bytes=disk_bytes)))
    models = (
        ProgramRef(program_id="e", target="executorch", blob=blob("e", 500)),
        ProgramRef(program_id="o", target="onnx", blob=blob("o", 1000)),
    )
    assert [model.target for model in select_models(client, models)] == targets


@pytest.mark.parametrize("disk_bytes", [2000, 1999])
def test_a_model_that_does_not_fit_is_skipped_with_the_reason(disk_bytes: int) -> None:
    context = context_of(rounds=1)
    state, _ = assign_sizes(context, measuring(context), 10**6)
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), 2.0)
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            3.0,
        )
    state, _ = step(
        context,
        state,
        RequestDone(
            request=AggregationRequest(round=1, clients=()),
            result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
        ),
        4.0,
    )
    assert state.phase == "deploy"
    client = state.clients["ada"]
    assert client.offer.budget is not None
    assert client.participant is not None
    client = replace(client, offer=replace(client.offer, budget=replace(client.offer.budget, disk_bytes=disk_bytes)))
    state = replace(state, clients={**state.clients, "ada": client})
    program = ProgramRef(program_id="o", target="onnx", blob=blob("o", 1000))
    model = ModelFile(target="onnx", file="model.onnx", max_abs_diff=None)
    request = ModelsRequest(participant=state.clients["ada"].participant, round=1)  # type: ignore[arg-type]  # checked above
    state, actions = step(
        context, state, RequestDone(request=request, result=ExportedModels(programs=(program,), models=(model,))), 5.0
    )
    if disk_bytes == 2000:
        (task,) = list_sent_tasks(actions)
        assert needed_bytes(task) == 2000
        assert state.clients["ada"].models == (model,)
    else:
        assert list_sent_tasks(actions) == []
        assert state.clients["ada"].reason == "its disk of 1999 bytes has no room for two copies of any of its models"


@pytest.mark.slow
def test_a_board_of_an_earlier_release_is_sent_a_task_that_is_too_large_once_in_a_run(tmp_path: Path) -> None:
    """It reports no disk budget before it refuses; headers make a task larger than the sum of its sizes."""
    most_bytes = SIZES[-1]

    def refuse(task: Task) -> tuple[str, int | None] | None:
        return ("disk", most_bytes) if task.client_id == "ada" and needed_bytes(task) > most_bytes else None

    world = World(tmp_path, config(rounds=3, deploy_targets=()), fleet(refuse=refuse))
    world.run()
    rows = [row for record in world.server.result().rounds for row in record.clients if row.client_id == "ada"]
    assert [(row.status, row.limit) for row in rows] == 3 * [("aggregated", "disk")]
    assert [row.refusals.count("disk:") for row in rows] == [1, 0, 0]
    assert [row.disk_budget_bytes for row in rows] == 3 * [most_bytes]
    assert all(0 < row.disk_bytes <= most_bytes for row in rows)
