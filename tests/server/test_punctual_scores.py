"""Evaluations and scores that never come: the server waits until the deadline once, briefly once, and then no more."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    select_requests,
    telemetry,
)
from server.punctuality_cases import (
    DEADLINES,
    OTHERS,
    after_misses,
    close_after,
    count_misses,
    tick,
    with_record,
)
from server.searching_cases import (
    SCORING,
    complete_generation,
    context_with,
    report_scores,
    send_scoring_tasks,
    supernet_round,
)
from server.test_evaluations import answer, complete_request, start_evaluation
from server.test_scoring import candidates

from subfleet.methods.fedfa import FedFA
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.messages import Scores
from subfleet.rounds.awaiting import get_punctuality
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import Punctuality
from subfleet.rounds.signals import Action, CloseEvaluation, Reply, Tick, Withdraw
from subfleet.rounds.state import RunState
from subfleet.rounds.work import EvaluationRequest
from subfleet.settings.sections import Evaluations

# --- evaluations --------------------------------------------------------------------------------------------------


def request_evaluations(
    context: RunContext, misses: int, *, of: tuple[str, ...] = ("cyd",)
) -> tuple[RunState, Mapping[str, EvaluationRequest]]:
    """All clients are asked to evaluate after a round, at second 5."""
    state, actions = start_evaluation(context)
    for name in of:
        state = with_record(state, name, "evaluation", after_misses(misses))
    return state, {request.participant.client_id: request for request in select_requests(EvaluationRequest, actions)}


def send_evaluations(context: RunContext, misses: int, *, of: tuple[str, ...] = ("cyd",)) -> RunState:
    """All clients have their tasks since second 6."""
    state, requests = request_evaluations(context, misses, of=of)
    for name in sorted(requests):
        state, _ = step(context, state, complete_request(requests[name]), 6.0)
    return state


EVALUATED = context_of(evaluation=Evaluations(every=1), rounds=3, deadlines=DEADLINES)


def list_closed_reasons(context: RunContext, state: RunState, name: str, now_s: float) -> Mapping[str, str]:
    """Why client states were closed by this client's answer; empty where the evaluation goes on."""
    _, actions = answer(context, state, name, now_s)
    return {
        client.client_id: client.reason
        for action in actions
        if isinstance(action, CloseEvaluation)
        for client in action.clients
    }


@pytest.mark.parametrize(
    ("misses", "seconds", "reason"),
    [
        (0, 300.0, "no answer came in time"),
        (
            1,
            76.0,
            "no answer came in 75 s; it has not answered its last evaluation task, and the round waits no longer",
        ),
        (2, 0.0, "it has not answered its last 2 evaluation tasks, and the round does not wait for it"),
    ],
)
def test_an_evaluation_waits_until_its_deadline_once_and_a_quarter_once(
    misses: int, seconds: float, reason: str
) -> None:
    state = send_evaluations(EVALUATED, misses)
    state, _ = answer(EVALUATED, state, "ada", 7.0)
    if seconds:
        state, _ = answer(EVALUATED, state, "bob", 7.0)
        assert tick(EVALUATED, state, 5.0 + seconds - 0.5).phase == "evaluate"
        state, actions = step(EVALUATED, state, Tick(), 5.0 + seconds)
        (close,) = (action for action in actions if isinstance(action, CloseEvaluation))
        reasons = {client.client_id: client.reason for client in close.clients}
    else:
        reasons = dict(list_closed_reasons(EVALUATED, state, "bob", 7.0))
        state, _ = answer(EVALUATED, state, "bob", 7.0)
    assert state.phase == "measure"
    assert reasons["cyd"] == reason
    assert [count_misses(state, name, "evaluation") for name in CLIENTS] == [0, 0, misses + 1]
    assert count_misses(state, "cyd", "training") == 0


def test_a_timely_evaluation_of_an_extra_counts() -> None:
    state, _ = answer(EVALUATED, send_evaluations(EVALUATED, 2), "cyd", 8.0)
    assert state.clients["cyd"].stage == "done"
    assert get_punctuality(state, "cyd", "evaluation") == Punctuality(took_s=(2.0,))
    state, _ = answer(EVALUATED, state, "ada", 8.0)
    assert state.phase == "evaluate", "others are waited for"


def test_an_evaluation_by_extras_alone_waits_as_after_one_miss_and_counts_none() -> None:
    state = send_evaluations(EVALUATED, 2, of=CLIENTS)
    state = close_after(EVALUATED, state, 76.0)
    assert [count_misses(state, name, "evaluation") for name in CLIENTS] == [2, 2, 2]


def test_an_evaluation_that_nobody_answers_counts_as_one_miss() -> None:
    state = close_after(EVALUATED, send_evaluations(EVALUATED, 0), 300.0)
    assert [count_misses(state, name, "evaluation") for name in CLIENTS] == [1, 1, 1]


def test_an_evaluation_that_closes_at_its_quorum_has_not_waited_for_the_others() -> None:
    context = replace(EVALUATED, config=replace(EVALUATED.config, quorum=0.5))
    state, _ = answer(context, send_evaluations(EVALUATED, 0), "ada", 7.0)
    state, _ = answer(context, state, "bob", 7.0)
    assert (state.phase, count_misses(state, "cyd", "evaluation")) == ("measure", 0)


# --- scores of candidates -----------------------------------------------------------------------------------------

SCORED = context_of(
    min_clients=2, rounds=9, deadlines=DEADLINES, method=FedFA(choice="score"), rates=(0.25, 0.5, 0.75, 1.0)
)


def start_scoring(misses: int, *, of: tuple[str, ...] = ("cyd",), sent_to: tuple[str, ...] = CLIENTS) -> RunState:
    """Candidates are proposed to all clients at second 2; some of them have the task to score these."""
    state = measuring(SCORED)
    for name in of:
        state = with_record(state, name, "scores", after_misses(misses))
    for name in CLIENTS:
        state, _ = step(SCORED, state, telemetry(SCORED, name), 2.0)
    for name in sent_to:
        state, _ = step(SCORED, state, candidates(state, name), 2.0)
    return state


def send_scores(state: RunState, now_s: float, *names: str) -> tuple[RunState, list[Action]]:
    actions = list[Action]()
    for name in names:
        task = state.clients[name].task
        assert task is not None
        scores = tuple(CandidateScore(score=1.0, reason="") for _ in task.programs)
        message = Scores(
            task_id=task.task_id, run_id=SCORED.run_id, round=1, client_id=name, scores=scores, seconds=0.1
        )
        state, more = step(SCORED, state, message, now_s)
        actions += more
    return state, actions


@pytest.mark.parametrize(("misses", "seconds"), [(0, 300.0), (1, 75.0), (8, 75.0)])
def test_scores_are_awaited_for_half_of_the_round_once_and_a_quarter_of_that_once(misses: int, seconds: float) -> None:
    state, _ = send_scores(start_scoring(misses), 3.0, *OTHERS)
    state = tick(SCORED, state, 2.0 + seconds - 0.5)
    assert state.clients["cyd"].stage == "scoring"
    state = tick(SCORED, state, 2.0 + seconds)
    assert state.clients["cyd"].stage == "preparing"
    assert [count_misses(state, name, "scores") for name in CLIENTS] == [0, 0, misses + 1]
    assert count_misses(state, "cyd", "training") == 0


def test_an_extra_may_send_scores_while_others_are_awaited() -> None:
    state, _ = send_scores(start_scoring(2), 3.0, "ada")
    assert state.clients["cyd"].stage == "scoring"
    in_time, actions = send_scores(state, 4.0, "cyd")
    assert "accepted" in [action.ack.status for action in actions if isinstance(action, Reply)]
    assert get_punctuality(in_time, "cyd", "scores") == Punctuality(took_s=(2.0,))
    task = state.clients["cyd"].task
    assert task is not None
    state, actions = send_scores(state, 4.0, "bob")
    assert (state.clients["cyd"].stage, count_misses(state, "cyd", "scores")) == ("preparing", 3)
    assert Withdraw(task_id=task.task_id) in actions


def test_a_scoring_by_extras_alone_waits_as_after_one_miss() -> None:
    state = start_scoring(3, of=CLIENTS)
    state = tick(SCORED, state, 76.5)
    assert {client.stage for client in state.clients.values()} == {"scoring"}
    state = tick(SCORED, state, 77.0)
    assert {client.stage for client in state.clients.values()} == {"preparing"}
    assert [count_misses(state, name, "scores") for name in CLIENTS] == [3, 3, 3]


def test_a_scoring_that_nobody_answers_counts_as_one_miss() -> None:
    state = tick(SCORED, start_scoring(0), 302.0)
    assert [count_misses(state, name, "scores") for name in CLIENTS] == [1, 1, 1]


def test_a_score_task_that_was_never_sent_is_not_missed() -> None:
    state, _ = send_scores(start_scoring(2, sent_to=OTHERS), 3.0, *OTHERS)
    assert (state.clients["cyd"].stage, count_misses(state, "cyd", "scores")) == ("preparing", 2)


# --- scores of paths ----------------------------------------------------------------------------------------------

PATHS = context_with(replace(SCORING, scoring_rounds=6), deadlines=DEADLINES)


def start_path_scoring(misses: Mapping[str, int]) -> tuple[RunState, tuple[Action, ...]]:
    """Devices are asked to score the paths of a generation, at second 6."""
    state, actions = supernet_round(PATHS)
    for name, count in misses.items():
        state = with_record(state, name, "paths", after_misses(count))
    event = complete_generation(PATHS, state, actions)
    generation = replace(event, result=replace(event.result, ticket="ab", scores=()))
    state, actions = step(PATHS, state, generation, 6.0)
    return send_scoring_tasks(state, actions, PATHS, 6.0), actions


def closed_rounds(state: RunState) -> int:
    assert state.live.scores is not None
    return state.live.scores.closed


@pytest.mark.parametrize(("misses", "seconds"), [(0, 300.0), (1, 75.0), (2, 0.0)])
def test_path_scores_are_awaited_until_the_deadline_once_and_a_quarter_once(misses: int, seconds: float) -> None:
    state, _ = start_path_scoring({})
    first, second = sorted(state.clients)
    state = with_record(state, second, "paths", after_misses(misses))
    state, _ = step(PATHS, state, report_scores(state, PATHS, first, (0.1, 0.2, 0.3)), 7.0)
    if seconds:
        state = tick(PATHS, state, 6.0 + seconds - 0.5)
        assert closed_rounds(state) == 0
        state = tick(PATHS, state, 6.0 + seconds)
    assert closed_rounds(state) == 1
    assert (count_misses(state, first, "paths"), count_misses(state, second, "paths")) == (0, misses + 1)
    assert get_punctuality(state, first, "paths").took_s == (1.0,)


def test_extras_score_paths_beside_the_selected_clients() -> None:
    plain, _ = start_path_scoring({})
    assert len(plain.clients) == 2
    state, actions = start_path_scoring({"cyd": 2})
    assert set(state.clients) == set(CLIENTS)
    assert len(select_requests(EvaluationRequest, actions)) == 3
    state, _ = start_path_scoring({"cyd": 2, "bob": 8, "ada": 3})
    assert len(state.clients) == 2


def test_a_path_scoring_by_extras_alone_waits_as_after_one_miss() -> None:
    state, _ = start_path_scoring(dict.fromkeys(CLIENTS, 2))
    state = tick(PATHS, state, 80.5)
    assert closed_rounds(state) == 0
    scorers = set(state.clients)
    state = tick(PATHS, state, 81.0)
    assert closed_rounds(state) == 1
    assert {count_misses(state, name, "paths") for name in scorers} == {2}
