"""Devices evaluate the model after a round: which clients are asked, which answers count, and what is reported."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.coordinator_cases import CLIENTS, blob, context_of, prepared, profile, select_requests, telemetry, update
from server.random_cases import answers, build_evaluation
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.rows import build_evaluation_record
from subfleet.link.traffic import Traffic
from subfleet.protocol.messages import Presence, Refusal, Task
from subfleet.protocol.metric_sums import MetricSums
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.task import Evaluate
from subfleet.reporting.results import build_summary
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.evaluating import AT_ONCE
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import (
    Action,
    AggregationRequest,
    CloseEvaluation,
    Event,
    RequestDone,
    RequestFailed,
    SendTask,
    Tick,
    Withdraw,
)
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest, EvaluationRequest, PreparedTask, TaskRequest
from subfleet.search.queue import ProgramFacts
from subfleet.settings.sections import Deadlines, Evaluations

HELD_OUT = 10
EACH = Evaluations(every=1)
CONTEXT = context_of(evaluation=EACH, rounds=3)
Outcome = tuple[RunState, tuple[Action, ...]]


def aggregate_rounds(context: RunContext, held_out: Mapping[str, int], *, number: int = 1) -> Outcome:
    """The state after rounds in which all clients took part, the last aggregated at second 5."""
    state, actions = RunState(), tuple[Action, ...]()
    for name in CLIENTS:
        state, _ = step(context, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(context, state, replace(profile(name), held_out_count=held_out.get(name, 0)), 1.0)
    for _ in range(number):
        for name in CLIENTS:
            state, _ = step(context, state, telemetry(context, name, state.round), 2.0)
        for name in CLIENTS:
            state, _ = step(context, state, prepared(context, state, name), 2.0)
        for name in CLIENTS:
            state, _ = step(
                context,
                state,
                RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
                3.0,
            )
        event = RequestDone(
            request=AggregationRequest(round=state.round, clients=()),
            result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
        )
        state, actions = step(context, state, event, 5.0)
    return state, actions


def start_evaluation(context: RunContext = CONTEXT, **held_out: int) -> Outcome:
    return aggregate_rounds(context, held_out or dict.fromkeys(CLIENTS, HELD_OUT))


def complete_request(request: EvaluationRequest, planned_bytes: int = 1000) -> Event:
    program = ProgramRef(program_id="evaluates", target="onnx", blob=blob("evaluates"))
    facts = ProgramFacts(planned_peak_bytes=planned_bytes)
    return RequestDone(request=request, result=PreparedTask(program=program, weights=blob("weights"), facts=facts))


def send_tasks(context: RunContext = CONTEXT, **held_out: int) -> RunState:
    """Every client that is asked has its task since second 6."""
    state, actions = start_evaluation(context, **held_out)
    for request in select_requests(EvaluationRequest, actions):
        state, _ = step(context, state, complete_request(request), 6.0)
    return state


def task(state: RunState, name: str) -> Task:
    evaluation = state.clients[name].task
    assert evaluation is not None
    return evaluation


def answer(context: RunContext, state: RunState, name: str, now_s: float = 7.0, **changes: Any) -> Outcome:
    return step(context, state, replace(build_evaluation(task(state, name), HELD_OUT), **changes), now_s)


def find_close(actions: tuple[Action, ...]) -> CloseEvaluation:
    return next(action for action in actions if isinstance(action, CloseEvaluation))


def list_statuses(actions: tuple[Action, ...]) -> dict[str, str]:
    record = build_evaluation_record(CONTEXT, find_close(actions), Traffic())
    return {row.client_id: row.status for row in record.clients}


ERRORS = MetricSums(
    absolute_errors=(1.0,) * 3, squared_errors=(1.0,) * 3, targets=(1.0,) * 3, squared_targets=(1.0,) * 3
)


# --- when it is due, and for which clients ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "due"),
    [
        (Evaluations(), (3,)),
        (Evaluations(last=False), ()),
        (Evaluations(every=2), (2, 3)),
        (Evaluations(every=2, last=False), (2,)),
        (Evaluations(every=1), (1, 2, 3)),
    ],
)
def test_an_evaluation_is_due_at_its_interval_and_after_the_last_round(
    evaluation: Evaluations, due: tuple[int, ...]
) -> None:
    assert tuple(number for number in (1, 2, 3) if evaluation.is_due(number, 3)) == due
    context = context_of(evaluation=evaluation, rounds=3)
    state, _ = aggregate_rounds(context, dict.fromkeys(CLIENTS, HELD_OUT))
    assert (state.phase == "evaluate") == (1 in due)


def test_only_online_clients_with_held_out_data_are_asked() -> None:
    state, actions = start_evaluation(ada=HELD_OUT, cyd=HELD_OUT)
    assert state.phase == "evaluate"
    assert [request.participant.client_id for request in select_requests(EvaluationRequest, actions)] == ["ada", "cyd"]
    nobody, actions = aggregate_rounds(CONTEXT, {})
    assert (nobody.phase, select_requests(EvaluationRequest, actions)) == ("measure", [])


def test_a_task_has_the_submodel_that_the_client_would_be_deployed() -> None:
    state = send_tasks()
    for name, client in state.clients.items():
        evaluation = task(state, name)
        last = state.last[name]
        assert evaluation.architecture == last.architecture
        assert isinstance(evaluation.work, Evaluate)
        assert (evaluation.work.settings.batch_size, evaluation.work.settings.per_class) == (
            CONTEXT.training(1).program_batch_size,
            False,
        )
        assert evaluation.task_id == f"run/r1/{name}/evaluate"
        assert client.stage == "out"
    info = build_round_info(CONTEXT, state, 7.0)
    assert info is not None
    assert info.phase == "train"


def test_a_few_are_asked_in_each_step_and_each_once() -> None:
    names = tuple(f"c{number:03}" for number in range(2 * AT_ONCE + 1))
    context = replace(CONTEXT, config=replace(CONTEXT.config, min_clients=1))
    state, _ = start_evaluation(context)
    client, member = state.last["ada"], state.live.members["ada"]
    profiles = state.profiles.with_items({name: replace(state.profiles["ada"], client_id=name) for name in names})
    live = replace(state.live, members=state.live.members.with_items(dict.fromkeys(names, member)))
    last = {name: replace(client, client_id=name) for name in names}
    state = replace(state, profiles=profiles, live=live, last=last, clients={})
    requested = []
    for _ in range(6):
        state, actions = step(context, state, Tick(), 6.0)
        batch = [request.participant.client_id for request in select_requests(EvaluationRequest, actions)]
        assert len(batch) <= AT_ONCE
        requested += batch
    assert requested == [*names]


# --- answers ------------------------------------------------------------------------------------------------------


def test_the_phase_ends_when_all_have_answered_and_each_counts_once() -> None:
    state = send_tasks()
    for name in CLIENTS[:-1]:
        state, actions = answer(CONTEXT, state, name)
        assert answers(actions, f"evaluated.{task(state, name).task_id}.{HELD_OUT}") == ["accepted"]
        assert any(isinstance(action, Withdraw) for action in actions)
        again, actions = answer(CONTEXT, state, name, loss=9.0)
        assert answers(actions, f"evaluated.{task(state, name).task_id}.{HELD_OUT}") == ["duplicate"]
        assert again.clients == state.clients
    last = build_evaluation(task(state, CLIENTS[-1]), HELD_OUT)
    state, actions = step(CONTEXT, state, last, 8.0)
    assert list_statuses(actions) == dict.fromkeys(CLIENTS, "evaluated")
    assert state.phase == "measure"
    assert {name: (evaluation.round, evaluation.loss) for name, evaluation in state.evaluated.items()} == dict.fromkeys(
        CLIENTS, (1, 1.0)
    )
    late, actions = step(CONTEXT, state, last, 9.0)
    assert answers(actions, last.message_id) == ["duplicate"]
    assert late.evaluated == state.evaluated


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sample_count": HELD_OUT + 1}, "11 samples were evaluated, but the client's profile has 10"),
        ({"class_counts": (10, 0, 0), "class_correct": (5, 0, 0)}, "3 classes were counted"),
        ({"label_count": 11, "accuracy": 0.0}, "11 labels were counted, but 10 samples have at most 10"),
        ({"sums": ERRORS}, "errors are reported, but a task of classification has none"),
        (
            {"sums": MetricSums(class_predicted=(5,) * 4)},
            "class_predicted has numbers for 4 outputs, but the model has 3",
        ),
        ({"run_id": "another"}, "is not the current run"),
        ({"round": 7}, "is closed; the run is in round 1"),
        ({"task_id": "run/r1/ada/7"}, "is not the last task of ada"),
    ],
)
def test_impossible_answers_are_refused(changes: dict[str, Any], reason: str) -> None:
    state = send_tasks()
    after, actions = answer(CONTEXT, state, "ada", **changes)
    acks = [action.ack for action in actions if hasattr(action, "ack")]
    assert [(ack.status, reason in ack.reason) for ack in acks] == [("refused", True)]
    assert after.clients == state.clients


def test_classes_are_counted_on_request() -> None:
    context = context_of(evaluation=Evaluations(every=1, per_class=True), rounds=3)
    state = send_tasks(context)
    work = task(state, "ada").work
    assert isinstance(work, Evaluate)
    assert work.settings.per_class
    after = state
    for counts, status in (((9, 1), "refused"), ((5, 4, 1), "accepted")):
        right = (1,) * len(counts)
        after, actions = answer(
            context, state, "ada", class_counts=counts, class_correct=right, accuracy=len(right) / HELD_OUT
        )
        (action,) = (action for action in actions if hasattr(action, "ack"))
        assert action.ack.status == status
    client = next(client for client in after.clients.values() if client.client_id == "ada")
    assert client.evaluated is not None
    assert client.evaluated.class_correct == (1, 1, 1)


def test_an_update_is_no_answer_to_an_evaluation() -> None:
    state = send_tasks()
    _, actions = step(CONTEXT, state, update(CONTEXT, state, "ada"), 7.0)
    assert [action.ack.status for action in actions if hasattr(action, "ack")] == ["refused"]


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_refusal_ends_the_client_and_leaves_its_training_program_fit() -> None:
    state = send_tasks()
    refusal = Refusal(
        task_id=task(state, "ada").task_id,
        run_id="run",
        round=1,
        client_id="ada",
        reason="runtime",
        detail="it lacks an operator",
    )
    state, _ = step(CONTEXT, state, refusal, 7.0)
    assert (state.clients["ada"].stage, state.clients["ada"].reason) == ("refused", "runtime: it lacks an operator")
    assert state.unfit == {}


def test_a_client_is_skipped_if_its_program_cannot_be_made_or_does_not_fit() -> None:
    state, actions = start_evaluation()
    ada, bob, cyd = select_requests(EvaluationRequest, actions)
    state, _ = step(CONTEXT, state, RequestFailed(request=ada, reason="export failed: no"), 6.0)
    state, _ = step(CONTEXT, state, complete_request(bob, 10**12), 6.0)
    state, _ = step(CONTEXT, state, complete_request(cyd), 6.0)
    state, actions = answer(CONTEXT, state, "cyd")
    assert list_statuses(actions) == {
        "ada": "skipped: export failed: no",
        "bob": "skipped: the evaluation needs 1000000000000 bytes of memory and the budget is 1000000000",
        "cyd": "evaluated",
    }


def test_a_late_failure_of_the_round_before_changes_no_client() -> None:
    """A training program fails when its client already has to evaluate."""
    state, _ = start_evaluation()
    client = state.clients["ada"].participant
    assert client is not None
    late = TaskRequest(participant=client, round=1, attempt=0, target="onnx")
    assert step(CONTEXT, state, RequestFailed(request=late, reason="no"), 6.0)[0].clients == state.clients


def test_the_deadline_ends_the_wait_and_a_quorum_where_timing_may_decide() -> None:
    state = send_tasks()
    state, _ = answer(CONTEXT, state, "ada")
    late_s = 5.0 + CONTEXT.config.deadlines.evaluate_s
    assert step(CONTEXT, state, Tick(), late_s - 0.1)[0].phase == "evaluate"
    after, actions = step(CONTEXT, state, Tick(), late_s)
    missing = "missing: no answer came in time: no heartbeat for 303 s"
    assert list_statuses(actions) == {"ada": "evaluated", "bob": missing, "cyd": missing}
    assert {action.task_id for action in actions if isinstance(action, Withdraw)} == {
        f"run/r1/{name}/evaluate" for name in ("bob", "cyd")
    }
    assert after.phase != "evaluate"
    quick = context_of(evaluation=EACH, rounds=3, quorum=0.6)
    state = send_tasks()
    state, _ = answer(quick, state, "ada")
    state, actions = answer(quick, state, "bob")
    assert list_statuses(actions)["cyd"] == "missing: the evaluation closed at its quorum"


def test_a_restarted_client_is_sent_its_task_again() -> None:
    state = send_tasks()
    anew = Presence(client_id="ada", session_id="ada-2", online=True)
    _, actions = step(CONTEXT, state, anew, 7.0)
    assert [action.task for action in actions if isinstance(action, SendTask)] == [task(state, "ada")]


# --- the journal --------------------------------------------------------------------------------------------------


def test_the_journal_keeps_open_and_finished_evaluations(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    run_id = begin_run(engine, name="test", settings="{}", round_count=3)
    journal = Journal(engine, run_id)
    state, actions = start_evaluation()
    requests = select_requests(EvaluationRequest, actions)
    early, _ = step(CONTEXT, state, complete_request(requests[0]), 6.0)
    done, _ = answer(CONTEXT, early, "ada")
    part, _ = step(CONTEXT, done, complete_request(requests[1]), 6.0)
    journal.save(RunState(), part)
    loaded = journal.load(9.0)
    assert (loaded.phase, loaded.clients, loaded.evaluated) == ("evaluate", part.clients, {})
    again = list_resume_actions(CONTEXT, loaded)
    assert [action.task for action in again if isinstance(action, SendTask)] == [task(part, "bob")]
    assert select_requests(EvaluationRequest, again) == [requests[2]]
    late, actions = step(CONTEXT, part, Tick(), 5.0 + CONTEXT.config.deadlines.evaluate_s)
    close = find_close(actions)
    journal.save(part, late, close=close, record=build_evaluation_record(CONTEXT, close, Traffic()))
    loaded = journal.load(9.0)
    assert (loaded.evaluated, loaded.settled) == (late.evaluated, late.settled)
    assert "run/r1/ada/evaluate" in loaded.settled
    (record,) = journal.evaluations()
    assert [(row.client_id, row.status.split(":")[0]) for row in record.clients] == [
        ("ada", "evaluated"),
        ("bob", "missing"),
        ("cyd", "missing"),
    ]
    engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(3, marks=pytest.mark.long)])
def test_a_server_that_is_killed_anywhere_has_the_same_results(kills: int, tmp_path: Path) -> None:
    def evaluate(weights: Mapping[str, Any], evaluation_task: Task) -> tuple[float, float]:
        return float(sum(np.abs(array).sum() for array in weights.values())), 0.5

    behaviours = {
        name: replace(behaviour, held_out_count=HELD_OUT, evaluate=evaluate) for name, behaviour in fleet().items()
    }
    outcomes: list[tuple[Any, ...]] = []
    for every in (0, kills):
        settings = config(rounds=3, evaluation=EACH, deadlines=Deadlines(linger_s=0.0))
        world = World(tmp_path / str(every), settings, behaviours)
        for turn in range(1, 4000):
            if world.server.finished:
                break
            world.turn()
            if every and turn % every == 0:
                world.kill_server()
        result = world.server.result()
        rows = [
            [(row.client_id, row.loss, row.status) for row in evaluation.clients] for evaluation in result.evaluations
        ]
        outcomes.append((rows, world.model_bytes()))
        assert [evaluation.round for evaluation in result.evaluations] == [1, 2, 3]
        plain = json.loads(json.dumps(build_summary("test", result)))
        assert plain["evaluation"]["loss"]["mean"] == pytest.approx(statistics.fmean(row[1] or 0.0 for row in rows[-1]))
    assert outcomes[0] == outcomes[1]
    assert len({row[1] for row in outcomes[0][0][-1]}) > 1 or len({row[0] for row in outcomes[0][0][-1]}) == 3
