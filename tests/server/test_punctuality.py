"""Clients that beat and never answer: a deadline once, a short wait once, and then nobody waits for them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from server.coordinator_cases import (
    CLIENTS,
    joined,
    measuring,
    prepared,
    refusal,
    telemetry,
    terms_of,
    update,
    wanted_of,
)
from server.searching_cases import SCORING, made_now, scored, sent, supernet_round, terms_with
from server.test_calibration import calibrating
from server.test_evaluations import asked, made, said
from server.test_scoring import candidates

from subfleet.methods.fedfa import FedFA
from subfleet.methods.oort import Oort
from subfleet.methods.selecting import Selected, Selecting
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.messages import Presence, Scores
from subfleet.rounds.actions import Action, CloseEvaluation, Reply, Withdraw
from subfleet.rounds.awaiting import nobody_waits, punctuality_of
from subfleet.rounds.coordinator import step
from subfleet.rounds.events import Folded, Ready, Tick, UpdateStored
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.punctuality import PUNCTUAL, Duty, Punctuality
from subfleet.rounds.requests import EvaluationWanted
from subfleet.rounds.state import Member, RunState
from subfleet.rounds.terms import Terms
from subfleet.serving.narrating import told
from subfleet.settings.evaluations import Evaluations
from subfleet.settings.timing import Deadlines

OTHERS = ("ada", "bob")
DEADLINES = Deadlines(measure_s=30.0, round_s=600.0, evaluate_s=300.0, deploy_s=300.0, lease_s=1e5)
TERMS = terms_of(min_clients=2, rounds=40, deadlines=DEADLINES, deploy_targets=())
LOOSE = terms_of(min_clients=2, rounds=40, deadlines=DEADLINES, deploy_targets=(), quorum=0.5)


# --- what is remembered -------------------------------------------------------------------------------------------


def after_misses(count: int, *took_s: float) -> Punctuality:
    known = PUNCTUAL
    for one in took_s:
        known = known.after_answer(one)
    for _ in range(count):
        known = known.after_miss()
    return known


def test_after_the_second_miss_nobody_waits_but_for_a_short_time_after_8_and_16_and_so_on() -> None:
    records = [after_misses(count) for count in range(70)]
    assert [count for count, one in enumerate(records) if one.awaited] == [0, 1, 8, 16, 32, 64]
    assert [count for count, one in enumerate(records) if not one.extra] == [0, 1]


@pytest.mark.parametrize(
    ("known", "patience_s"),
    [
        (after_misses(0), 160.0),
        (after_misses(0, 1.0), 160.0),
        (after_misses(1), 40.0),
        (after_misses(8), 40.0),
        (after_misses(1, 30.0), 60.0),
        (after_misses(1, 30.0, 20.0), 60.0),
        (after_misses(1, 30.0, 20.0, 20.0, 20.0), 40.0),
        (after_misses(1, 1.0), 10.0),
        (after_misses(1, 90.0), 160.0),
    ],
)
def test_how_long_an_answer_is_waited_for_follows_from_how_long_the_last_ones_took(
    known: Punctuality, patience_s: float
) -> None:
    assert known.patience_s(160.0) == patience_s


def test_an_answer_makes_up_for_all_misses() -> None:
    assert after_misses(5, 3.0).after_answer(4.0) == Punctuality(missed=0, took_s=(3.0, 4.0))
    assert PUNCTUAL.after_answer(-1.0).took_s == (0.0,)


# --- training -----------------------------------------------------------------------------------------------------


def with_record(state: RunState, name: str, duty: Duty, known: Punctuality) -> RunState:
    member = replace(state.members[name], punctuality=MappingProxyType({duty: known}))
    return replace(state, members=state.members.updated({name: member}))


def missed(state: RunState, name: str, duty: Duty = "training") -> int:
    return punctuality_of(state, name, duty).missed


def given_tasks(terms: Terms, state: RunState, now_s: float, *names: str) -> RunState:
    """These tell what they can give, and whoever is chosen is sent a task."""
    for name in names or CLIENTS:
        state, _ = step(terms, state, telemetry(terms, name, state.round, retry=state.retry), now_s)
    assert state.phase == "train"
    for name, seat in sorted(state.seats.items()):
        if seat.stage == "preparing":
            state, _ = step(terms, state, prepared(terms, state, name), now_s)
    return state


def trained(terms: Terms, state: RunState, now_s: float, *names: str) -> RunState:
    for name in names:
        state, _ = step(terms, state, UpdateStored(update=update(terms, state, name)), now_s)
    return state


def folded(terms: Terms, state: RunState, now_s: float) -> RunState:
    assert state.phase == "fold"
    event = Folded(round=state.round, accuracy=0.5, loss=1.0, sha256="0" * 64, refused={})
    return step(terms, state, event, now_s)[0]


def ticked(terms: Terms, state: RunState, now_s: float) -> RunState:
    return step(terms, state, Tick(), now_s)[0]


def closes_after(terms: Terms, state: RunState, seconds: float) -> RunState:
    """The state after the phase has closed, neither before this time nor after it."""
    phase, entered_s = state.phase, state.entered_s
    if seconds:
        state = ticked(terms, state, entered_s + seconds - 0.5)
        assert state.phase == phase
        state = ticked(terms, state, entered_s + seconds)
    assert state.phase != phase
    return state


def rounds_without_cyd(terms: Terms, count: int) -> RunState:
    """Round 1 is open and others have answered in as many rounds before; cyd in none."""
    state, now_s = measuring(terms), 2.0
    for _ in range(count):
        state = trained(terms, given_tasks(terms, state, now_s), now_s, *OTHERS)
        now_s += terms.config.deadlines.round_s
        state = ticked(terms, state, now_s) if state.phase == "train" else state
        state = folded(terms, state, now_s)
    return state


@pytest.mark.parametrize("terms", [TERMS, replace(TERMS, config=replace(TERMS.config, clients_per_round=3))])
def test_a_round_waits_until_its_deadline_once_and_a_quarter_once_and_then_no_longer(terms: Terms) -> None:
    state, now_s = measuring(terms), 2.0
    reasons = (
        (600.0, "no answer came in time"),
        (150.0, "no answer came in 150 s; it has not answered its last task, and is not waited for any longer"),
        (0.0, "it has not answered its last 2 tasks, and nobody waits for it"),
        (0.0, "it has not answered its last 3 tasks, and nobody waits for it"),
    )
    for count, (seconds, reason) in enumerate(reasons, 1):
        state = trained(terms, given_tasks(terms, state, now_s), now_s, *OTHERS)
        state = closes_after(terms, state, seconds) if seconds else state
        assert (state.phase, state.seats["cyd"].stage, state.seats["cyd"].reason) == ("fold", "missing", reason)
        assert (missed(state, "cyd"), missed(state, "ada")) == (count, 0)
        now_s += seconds + 1
        state = folded(terms, state, now_s)
        assert state.phase == "measure"


def test_an_extra_is_waited_for_after_its_eighth_miss() -> None:
    state = with_record(measuring(TERMS), "cyd", "training", after_misses(7))
    state = trained(TERMS, given_tasks(TERMS, state, 2.0), 3.0, *OTHERS)
    state = folded(TERMS, state, 4.0)
    state = trained(TERMS, given_tasks(TERMS, state, 5.0), 6.0, *OTHERS)
    state = folded(TERMS, closes_after(TERMS, state, 150.0), 160.0)
    assert trained(TERMS, given_tasks(TERMS, state, 161.0), 162.0, *OTHERS).phase == "fold"


def test_the_time_is_counted_from_the_sending_of_the_task_and_by_what_answers_took() -> None:
    state = given_tasks(TERMS, measuring(TERMS), 2.0)
    state = trained(TERMS, state, 52.0, *CLIENTS)
    assert punctuality_of(state, "cyd", "training") == Punctuality(took_s=(50.0,))
    state = folded(TERMS, state, 60.0)
    state = trained(TERMS, given_tasks(TERMS, state, 61.0), 62.0, *OTHERS)
    state = folded(TERMS, closes_after(TERMS, state, 600.0), 700.0)
    for name in CLIENTS:
        state, _ = step(TERMS, state, telemetry(TERMS, name, state.round), 701.0)
    for name in CLIENTS:
        state, _ = step(TERMS, state, prepared(TERMS, state, name), 711.0)
    state = trained(TERMS, state, 712.0, *OTHERS)
    state = closes_after(TERMS, state, 10.0 + 100.0)
    assert state.seats["cyd"].reason.startswith("no answer came in 100 s;")


def test_a_task_that_is_still_being_made_is_waited_for_and_none_that_was_never_sent_is_missed() -> None:
    state = with_record(measuring(TERMS), "cyd", "training", after_misses(1))
    for name in CLIENTS:
        state, _ = step(TERMS, state, telemetry(TERMS, name, state.round), 2.0)
    for name in OTHERS:
        state, _ = step(TERMS, state, prepared(TERMS, state, name), 2.0)
    state = closes_after(TERMS, trained(TERMS, state, 3.0, *OTHERS), 600.0)
    assert (state.phase, missed(state, "cyd")) == ("fold", 1)


def test_the_answer_of_an_extra_counts_in_time_and_makes_it_a_client_like_any_other() -> None:
    state = given_tasks(TERMS, rounds_without_cyd(TERMS, 2), 1203.0)
    assert nobody_waits(state, "cyd")
    state = trained(TERMS, state, 1204.0, "ada", "cyd")
    assert (state.phase, state.seats["cyd"].stage, missed(state, "cyd")) == ("train", "done", 0)
    state = trained(TERMS, state, 1205.0, "bob")
    assert state.phase == "fold"
    state = folded(TERMS, state, 1206.0)
    state = trained(TERMS, given_tasks(TERMS, state, 1207.0), 1208.0, *OTHERS)
    closes_after(TERMS, state, 600.0)


def test_the_task_of_an_extra_is_withdrawn_when_the_round_closes() -> None:
    state = given_tasks(TERMS, rounds_without_cyd(TERMS, 2), 1203.0)
    task = state.seats["cyd"].task
    assert task is not None
    state = trained(TERMS, state, 1204.0, "ada")
    _, actions = step(TERMS, state, UpdateStored(update=update(TERMS, state, "bob")), 1205.0)
    assert Withdraw(task_id=task.task_id) in actions


def test_a_refusal_does_not_make_up_for_a_miss() -> None:
    """Else a client that refuses one task and is silent about the next would cost a deadline in every round."""
    state = given_tasks(TERMS, rounds_without_cyd(TERMS, 2), 1203.0)
    state, _ = step(TERMS, state, refusal(TERMS, state, "cyd"), 1204.0)
    assert state.seats["cyd"].stage == "preparing"
    state, _ = step(TERMS, state, prepared(TERMS, state, "cyd"), 1204.0)
    state = trained(TERMS, state, 1205.0, *OTHERS)
    assert (state.phase, missed(state, "cyd")) == ("fold", 3)


def test_where_only_extras_are_there_one_of_them_is_waited_for_until_the_deadline() -> None:
    state = measuring(TERMS)
    for name in CLIENTS:
        state = with_record(state, name, "training", after_misses(3))
    state = given_tasks(TERMS, state, 2.0)
    assert {seat.stage for seat in state.seats.values()} == {"out"}
    assert trained(TERMS, state, 500.0, "bob").phase == "fold"
    late = closes_after(TERMS, state, 600.0)
    assert (late.phase, late.retry, missed(late, "bob")) == ("waiting", 1, 3)


def test_where_nobody_answered_nobody_has_missed_a_training() -> None:
    """It may be the server that was not heard: the whole fleet would be extras after it."""
    late = closes_after(TERMS, given_tasks(TERMS, measuring(TERMS), 2.0), 600.0)
    assert (late.phase, late.retry) == ("waiting", 1)
    assert [missed(late, name) for name in CLIENTS] == [0, 0, 0]


def test_where_all_others_refuse_an_extra_is_waited_for() -> None:
    state = given_tasks(TERMS, rounds_without_cyd(TERMS, 2), 1203.0)
    for name in OTHERS:
        gone = replace(state.seats[name], stage="refused", reason="no data")
        state = replace(state, seats=MappingProxyType({**state.seats, name: gone}))
    assert ticked(TERMS, state, 1700.0).phase == "train"


def test_a_round_that_closes_at_its_quorum_has_not_waited_for_the_others() -> None:
    state = given_tasks(LOOSE, measuring(LOOSE), 2.0)
    state = trained(LOOSE, state, 3.0, *OTHERS)
    assert (state.phase, missed(state, "cyd")) == ("fold", 0)
    assert state.seats["cyd"].reason == "the round closed at its quorum"


def test_a_quorum_is_a_share_of_those_that_are_waited_for() -> None:
    state = given_tasks(LOOSE, with_record(measuring(LOOSE), "cyd", "training", after_misses(2)), 2.0)
    state = trained(LOOSE, state, 3.0, "ada")
    assert (state.phase, missed(state, "bob"), missed(state, "cyd")) == ("fold", 0, 3)


@pytest.mark.parametrize("farewell", ["it was stopped", ""])
def test_who_goes_away_with_a_task_has_missed_it_and_why_it_is_away_is_told(farewell: str) -> None:
    """Else a client that says goodbye shortly before each deadline would cost a round its whole time."""
    state = trained(TERMS, given_tasks(TERMS, measuring(TERMS), 2.0), 3.0, *OTHERS)
    gone = Presence(client_id="cyd", session_id="cyd-1", online=False, reason=farewell)
    state, _ = step(TERMS, state, gone, 590.0)
    state = ticked(TERMS, state, 602.0)
    words = f"it said goodbye ({farewell})" if farewell else "its connection broke, says the broker (its will)"
    assert (state.phase, missed(state, "cyd")) == ("fold", 1)
    assert state.seats["cyd"].reason == f"no answer came in time: {words}"


def test_who_said_goodbye_and_is_given_up_has_missed_its_task() -> None:
    state = trained(LOOSE, given_tasks(LOOSE, measuring(LOOSE), 2.0), 3.0)
    state, _ = step(LOOSE, state, Presence(client_id="cyd", session_id="cyd-1", online=False, reason="off"), 4.0)
    assert state.seats["cyd"].stage == "missing"
    assert missed(trained(LOOSE, state, 5.0, *OTHERS), "cyd") == 1


def test_a_client_that_starts_anew_is_waited_for_no_longer_than_before() -> None:
    state = rounds_without_cyd(TERMS, 2)
    state, _ = step(TERMS, state, Presence(client_id="cyd", session_id="cyd-2", online=True), 1204.0)
    assert missed(state, "cyd") == 2


# --- who is chosen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [None, Oort()])
@pytest.mark.parametrize("wanted", [1, 2])
def test_extras_are_asked_beside_those_that_are_wanted(method: Oort | None, wanted: int) -> None:
    settings = {} if method is None else {"method": method}
    terms = terms_of(min_clients=2, rounds=40, deadlines=DEADLINES, clients_per_round=wanted, **settings)
    state = measuring(terms)
    for name in ("dan", "eve", "fay"):
        state = joined(terms, state, name, 1.0)
    everyone, extras = (*CLIENTS, "dan", "eve", "fay"), ("cyd", "dan", "eve")
    for name, count in zip(extras, (2, 8, 9), strict=True):
        state = with_record(state, name, "training", after_misses(count))
    plain = replace(state, members=PersistentMap({name: state.members[name] for name in ("ada", "bob", "fay")}))
    state = given_tasks(terms, state, 2.0, *everyone)
    chosen = {name for name, seat in state.seats.items() if seat.stage == "out"}
    assert len(chosen & set(extras)) == wanted
    without = given_tasks(terms, plain, 2.0, "ada", "bob", "fay")
    assert chosen - set(extras) == {name for name, seat in without.seats.items() if seat.stage == "out"}
    assert len(chosen) == 2 * wanted


def test_where_only_extras_are_there_the_method_chooses_among_them() -> None:
    found = list[tuple[str, ...]]()

    def last_two(selecting: Selecting) -> Selected:
        found.append(tuple(one.client_id for one in selecting.clients))
        return Selected(clients=("bob", "cyd"), memory=selecting.memory)

    terms = replace(TERMS, policies=replace(TERMS.policies, select=last_two))
    state = measuring(terms)
    for name in CLIENTS:
        state = with_record(state, name, "training", after_misses(2))
    state = given_tasks(terms, state, 2.0)
    assert found == [CLIENTS]
    assert {name for name, seat in state.seats.items() if seat.stage == "out"} == {"bob", "cyd"}


def test_all_take_part_in_a_round_that_measures_norms() -> None:
    terms = terms_of(
        **calibrating(min_clients=2, rounds=4, calibrate_every=1, deadlines=DEADLINES, clients_per_round=1)
    )
    state = given_tasks(terms, measuring(terms), 2.0)
    (drawn,) = (name for name, seat in state.seats.items() if seat.stage == "out")
    state = folded(terms, trained(terms, state, 3.0, drawn), 4.0)
    assert terms.config.calibrates(state.round)
    for name in ("bob", "cyd"):
        state = with_record(state, name, "training", after_misses(2))
    state = given_tasks(terms, state, 5.0)
    assert {seat.stage for seat in state.seats.values()} == {"out"}
    state = trained(terms, state, 6.0, "ada")
    assert (state.phase, missed(state, "cyd")) == ("fold", 3)


# --- telemetry ----------------------------------------------------------------------------------------------------


def untold(terms: Terms, state: RunState, now_s: float) -> RunState:
    """All but cyd tell what they can give; cyd beats."""
    for name in OTHERS:
        state, _ = step(terms, state, telemetry(terms, name, state.round), now_s)
    beat = Presence(client_id="cyd", session_id="cyd-1", online=True)
    return step(terms, state, beat, now_s + 0.1)[0]


LATE = (30.0, "no telemetry came in time")
AFTER_ONE = "no answer came in 7.5 s; it has not answered the last announcement, and is not waited for any longer"


@pytest.mark.parametrize(
    ("min_clients", "second"), [(2, (7.5, AFTER_ONE)), (3, LATE)], ids=["enough are there", "a round wants all"]
)
def test_an_announcement_waits_for_telemetry_until_its_deadline_once_and_a_quarter_once(
    min_clients: int, second: tuple[float, str]
) -> None:
    terms = replace(TERMS, config=replace(TERMS.config, min_clients=min_clients))
    state = measuring(terms)
    third = (0.0, "it has not answered the last 2 announcements, and nobody waits for it")
    for count, (seconds, reason) in enumerate((LATE, second, third), 1):
        assert state.phase == "measure"
        state = untold(terms, state, state.entered_s)
        state = closes_after(terms, state, seconds) if seconds else state
        assert (state.phase, state.seats["cyd"].reason, missed(state, "cyd", "telemetry")) == ("train", reason, count)
        for name in OTHERS:
            state, _ = step(terms, state, prepared(terms, state, name), state.entered_s)
        state = folded(terms, trained(terms, state, state.entered_s, *OTHERS), state.entered_s + 1)
        state, _ = step(terms, state, Presence(client_id="cyd", session_id="cyd-1", online=True), state.entered_s)


def test_telemetry_makes_up_for_what_was_missed() -> None:
    state = with_record(measuring(TERMS), "cyd", "telemetry", after_misses(2))
    state, _ = step(TERMS, state, telemetry(TERMS, "cyd"), 3.0)
    assert punctuality_of(state, "cyd", "telemetry") == Punctuality(took_s=(2.0,))
    state, _ = step(TERMS, state, telemetry(TERMS, "ada"), 3.0)
    assert state.phase == "measure"


def test_an_announcement_that_nobody_answers_is_missed_by_nobody() -> None:
    state = ticked(TERMS, measuring(TERMS), 31.0)
    assert not state.seats
    assert [missed(state, name, "telemetry") for name in CLIENTS] == [0, 0, 0]


def test_where_only_extras_are_there_an_announcement_waits_until_its_deadline() -> None:
    state = measuring(TERMS)
    for name in CLIENTS:
        state = with_record(state, name, "telemetry", after_misses(2))
    state = ticked(TERMS, state, 30.5)
    assert state.phase == "measure"
    state, _ = step(TERMS, state, telemetry(TERMS, "cyd"), 30.5)
    assert state.phase == "train"


# --- evaluations --------------------------------------------------------------------------------------------------


def evaluations(
    terms: Terms, misses: int, *, of: tuple[str, ...] = ("cyd",)
) -> tuple[RunState, Mapping[str, EvaluationWanted]]:
    """All are asked to evaluate after a round, at second 5."""
    state, actions = asked(terms)
    for name in of:
        state = with_record(state, name, "evaluation", after_misses(misses))
    return state, {one.participant.client_id: one for one in wanted_of(EvaluationWanted, actions)}


def evaluating(terms: Terms, misses: int, *, of: tuple[str, ...] = ("cyd",)) -> RunState:
    """Everybody has its task since second 6."""
    state, wanted = evaluations(terms, misses, of=of)
    for name in sorted(wanted):
        state, _ = step(terms, state, made(wanted[name]), 6.0)
    return state


EVALUATED = terms_of(evaluation=Evaluations(every=1), rounds=3, deadlines=DEADLINES)


def seats_closed(terms: Terms, state: RunState, name: str, now_s: float) -> Mapping[str, str]:
    """Why seats were closed, after this client has said what it found; empty where the evaluation goes on."""
    _, actions = said(terms, state, name, now_s)
    return {seat.client_id: seat.reason for one in actions if isinstance(one, CloseEvaluation) for seat in one.seats}


@pytest.mark.parametrize(
    ("misses", "seconds", "reason"),
    [
        (0, 300.0, "no answer came in time"),
        (
            1,
            76.0,
            "no answer came in 75 s; it has not answered its last evaluation task, and is not waited for any longer",
        ),
        (2, 0.0, "it has not answered its last 2 evaluation tasks, and nobody waits for it"),
    ],
)
def test_an_evaluation_waits_until_its_deadline_once_and_a_quarter_once(
    misses: int, seconds: float, reason: str
) -> None:
    state = evaluating(EVALUATED, misses)
    state, _ = said(EVALUATED, state, "ada", 7.0)
    if seconds:
        state, _ = said(EVALUATED, state, "bob", 7.0)
        assert ticked(EVALUATED, state, 5.0 + seconds - 0.5).phase == "evaluate"
        state, actions = step(EVALUATED, state, Tick(), 5.0 + seconds)
        (close,) = (one for one in actions if isinstance(one, CloseEvaluation))
        reasons = {seat.client_id: seat.reason for seat in close.seats}
    else:
        reasons = dict(seats_closed(EVALUATED, state, "bob", 7.0))
        state, _ = said(EVALUATED, state, "bob", 7.0)
    assert state.phase == "measure"
    assert reasons["cyd"] == reason
    assert [missed(state, name, "evaluation") for name in CLIENTS] == [0, 0, misses + 1]
    assert missed(state, "cyd", "training") == 0


def test_what_an_extra_finds_in_time_counts() -> None:
    state, _ = said(EVALUATED, evaluating(EVALUATED, 2), "cyd", 8.0)
    assert state.seats["cyd"].stage == "done"
    assert punctuality_of(state, "cyd", "evaluation") == Punctuality(took_s=(2.0,))
    state, _ = said(EVALUATED, state, "ada", 8.0)
    assert state.phase == "evaluate", "others are waited for"


def test_where_only_extras_evaluate_they_are_waited_for_as_after_one_miss_and_have_missed_no_more() -> None:
    state = evaluating(EVALUATED, 2, of=CLIENTS)
    state = closes_after(EVALUATED, state, 76.0)
    assert [missed(state, name, "evaluation") for name in CLIENTS] == [2, 2, 2]


def test_where_nobody_evaluated_nobody_has_missed_more_than_one() -> None:
    state = closes_after(EVALUATED, evaluating(EVALUATED, 0), 300.0)
    assert [missed(state, name, "evaluation") for name in CLIENTS] == [1, 1, 1]


def test_an_evaluation_that_closes_at_its_quorum_has_not_waited_for_the_others() -> None:
    terms = replace(EVALUATED, config=replace(EVALUATED.config, quorum=0.5))
    state, _ = said(terms, evaluating(EVALUATED, 0), "ada", 7.0)
    state, _ = said(terms, state, "bob", 7.0)
    assert (state.phase, missed(state, "cyd", "evaluation")) == ("measure", 0)


# --- scores of candidates -----------------------------------------------------------------------------------------

SCORED = terms_of(
    min_clients=2, rounds=9, deadlines=DEADLINES, method=FedFA(choice="score"), rates=(0.25, 0.5, 0.75, 1.0)
)


def scoring(misses: int, *, of: tuple[str, ...] = ("cyd",), also: tuple[str, ...] = CLIENTS) -> RunState:
    """Candidates were proposed to everybody at second 2; these have the task to score them."""
    state = measuring(SCORED)
    for name in of:
        state = with_record(state, name, "scores", after_misses(misses))
    for name in CLIENTS:
        state, _ = step(SCORED, state, telemetry(SCORED, name), 2.0)
    for name in also:
        state, _ = step(SCORED, state, Ready(made=candidates(state, name)), 2.0)
    return state


def scores_told(state: RunState, now_s: float, *names: str) -> tuple[RunState, list[Action]]:
    actions = list[Action]()
    for name in names:
        task = state.seats[name].task
        assert task is not None
        found = tuple(CandidateScore(score=1.0, reason="") for _ in task.programs)
        answer = Scores(task_id=task.task_id, run_id=SCORED.run_id, round=1, client_id=name, scores=found, seconds=0.1)
        state, more = step(SCORED, state, answer, now_s)
        actions += more
    return state, actions


@pytest.mark.parametrize(("misses", "seconds"), [(0, 300.0), (1, 75.0), (8, 75.0)])
def test_scores_are_waited_for_half_of_the_rounds_time_once_and_a_quarter_of_that_once(
    misses: int, seconds: float
) -> None:
    state, _ = scores_told(scoring(misses), 3.0, *OTHERS)
    state = ticked(SCORED, state, 2.0 + seconds - 0.5)
    assert state.seats["cyd"].stage == "scoring"
    state = ticked(SCORED, state, 2.0 + seconds)
    assert state.seats["cyd"].stage == "preparing"
    assert [missed(state, name, "scores") for name in CLIENTS] == [0, 0, misses + 1]
    assert missed(state, "cyd", "training") == 0


def test_an_extra_may_tell_scores_as_long_as_others_may() -> None:
    state, _ = scores_told(scoring(2), 3.0, "ada")
    assert state.seats["cyd"].stage == "scoring"
    told_in_time, actions = scores_told(state, 4.0, "cyd")
    assert "accepted" in [one.receipt.status for one in actions if isinstance(one, Reply)]
    assert punctuality_of(told_in_time, "cyd", "scores") == Punctuality(took_s=(2.0,))
    task = state.seats["cyd"].task
    assert task is not None
    state, actions = scores_told(state, 4.0, "bob")
    assert (state.seats["cyd"].stage, missed(state, "cyd", "scores")) == ("preparing", 3)
    assert Withdraw(task_id=task.task_id) in actions


def test_where_only_extras_score_they_are_waited_for_as_after_one_miss() -> None:
    state = scoring(3, of=CLIENTS)
    state = ticked(SCORED, state, 76.5)
    assert {seat.stage for seat in state.seats.values()} == {"scoring"}
    state = ticked(SCORED, state, 77.0)
    assert {seat.stage for seat in state.seats.values()} == {"preparing"}
    assert [missed(state, name, "scores") for name in CLIENTS] == [3, 3, 3]


def test_where_nobody_scored_nobody_has_missed_more_than_one() -> None:
    state = ticked(SCORED, scoring(0), 302.0)
    assert [missed(state, name, "scores") for name in CLIENTS] == [1, 1, 1]


def test_a_score_task_that_was_never_sent_is_not_missed() -> None:
    state, _ = scores_told(scoring(2, also=OTHERS), 3.0, *OTHERS)
    assert (state.seats["cyd"].stage, missed(state, "cyd", "scores")) == ("preparing", 2)


# --- scores of paths ----------------------------------------------------------------------------------------------

PATHS = terms_with(replace(SCORING, scoring_rounds=6), deadlines=DEADLINES)


def paths(misses: Mapping[str, int]) -> tuple[RunState, tuple[Action, ...]]:
    """Devices are asked to score the paths of a generation, at second 6."""
    state, actions = supernet_round(PATHS)
    for name, count in misses.items():
        state = with_record(state, name, "paths", after_misses(count))
    generation = replace(made_now(PATHS, state, actions), ticket="ab", scores=())
    state, actions = step(PATHS, state, Ready(made=generation), 6.0)
    return sent(state, actions, PATHS, 6.0), actions


def closed_rounds(state: RunState) -> int:
    assert state.scores is not None
    return state.scores.closed


@pytest.mark.parametrize(("misses", "seconds"), [(0, 300.0), (1, 75.0), (2, 0.0)])
def test_paths_are_waited_for_until_the_deadline_once_and_a_quarter_once(misses: int, seconds: float) -> None:
    state, _ = paths({})
    first, second = sorted(state.seats)
    state = with_record(state, second, "paths", after_misses(misses))
    state, _ = step(PATHS, state, scored(state, PATHS, first, (0.1, 0.2, 0.3)), 7.0)
    if seconds:
        state = ticked(PATHS, state, 6.0 + seconds - 0.5)
        assert closed_rounds(state) == 0
        state = ticked(PATHS, state, 6.0 + seconds)
    assert closed_rounds(state) == 1
    assert (missed(state, first, "paths"), missed(state, second, "paths")) == (0, misses + 1)
    assert punctuality_of(state, first, "paths").took_s == (1.0,)


def test_extras_score_paths_beside_those_that_are_wanted() -> None:
    plain, _ = paths({})
    assert len(plain.seats) == 2
    state, actions = paths({"cyd": 2})
    assert set(state.seats) == set(CLIENTS)
    assert len(wanted_of(EvaluationWanted, actions)) == 3
    state, _ = paths({"cyd": 2, "bob": 8, "ada": 3})
    assert len(state.seats) == 2


def test_where_only_extras_score_paths_a_round_of_scoring_waits_as_after_one_miss() -> None:
    state, _ = paths(dict.fromkeys(CLIENTS, 2))
    state = ticked(PATHS, state, 80.5)
    assert closed_rounds(state) == 0
    asked_now = set(state.seats)
    state = ticked(PATHS, state, 81.0)
    assert closed_rounds(state) == 1
    assert {missed(state, name, "paths") for name in asked_now} == {2}


# --- models, and what people are told -----------------------------------------------------------------------------


@pytest.mark.parametrize(("misses", "seconds"), [(0, 300.0), (1, 75.0), (3, 75.0)])
def test_models_are_waited_for_shortly_where_trainings_were_missed(misses: int, seconds: float) -> None:
    terms = terms_of(min_clients=2, rounds=1, deadlines=DEADLINES, deploy_targets=("onnx",))
    state = trained(terms, given_tasks(terms, measuring(terms), 2.0), 3.0, *CLIENTS)
    state = folded(terms, state, 4.0)
    assert state.phase == "deploy"
    for name in CLIENTS:
        known = after_misses(misses, 1.0) if name == "cyd" else after_misses(9)
        state = with_record(state, name, "training", known)
    for name in OTHERS:
        gone = replace(state.seats[name], stage="done")
        state = replace(state, seats=MappingProxyType({**state.seats, name: gone}))
    assert closes_after(terms, state, seconds).phase == "finished"


def sentences(before: RunState, after: RunState) -> Iterator[str]:
    return told(TERMS, before, after)


def test_people_are_told_once_when_nobody_waits_for_a_client_and_when_somebody_does_again() -> None:
    state = given_tasks(TERMS, measuring(TERMS), 2.0)
    said_of_cyd, before = list[str](), state
    for count in range(12):
        state = with_record(state, "cyd", "training", after_misses(count))
        said_of_cyd += sentences(before, state)
        before = state
    assert said_of_cyd == [
        "client cyd has not answered its last 2 tasks; nobody waits for its answers until it gives one"
    ]
    state = with_record(state, "cyd", "training", after_misses(0, 1.0))
    assert list(sentences(before, state)) == [
        "client cyd has answered its last task, and is waited for like the others again"
    ]


def test_a_screen_does_not_say_that_a_round_waits_for_an_extra() -> None:
    state = given_tasks(TERMS, with_record(measuring(TERMS), "cyd", "training", after_misses(2)), 2.0)
    assert [nobody_waits(state, name) for name in CLIENTS] == [False, False, True]
    assert not nobody_waits(ticked(TERMS, rounds_without_cyd(TERMS, 2), 1204.0), "cyd"), "it may be told its telemetry"


def test_a_member_that_was_forgotten_is_like_a_new_one() -> None:
    assert Member().punctuality == {}
    assert punctuality_of(RunState(), "nobody", "training") == PUNCTUAL
