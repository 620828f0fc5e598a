"""Candidates that a device scores on its own data before one of them is chosen for it: a seat's stage "scoring". Pure.

FedFA (Park and Joe-Wong 2024, algorithm 1, lines 1 and 2): the server proposes architectures, each device has one that
suits its own data, found by ZiCo (section 5.1).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

from subfleet.methods.assigner import Assignment
from subfleet.protocol.memory import planned_for
from subfleet.protocol.messages import Scores
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.task import Score
from subfleet.rounds.actions import Action, SendTask, Withdraw
from subfleet.rounds.awaiting import any_scores, awaited_scores, limit_s, with_missing
from subfleet.rounds.refusals import unscorable_sizes
from subfleet.rounds.seating import ask_of, assigned_seat, given_seat
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.tasks import score_task
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import Scorable, ScoringRequest

__all__ = [
    "proposed_seat",
    "scored_seat",
    "scoring_seat",
    "scoring_wanted",
    "unscored_seat",
    "without_late_scores",
]

_LEAST = 2
"""Candidates; one alone needs no score."""


def proposed_seat(terms: Terms, state: RunState, seat: Seat) -> tuple[Seat, tuple[Action, ...]]:
    """Propose candidates to a client that has answered, where the method has some; else choose a size at once."""
    propose = terms.roles.assigner.propose
    if propose is None or seat.offer.budget is None or terms.config.calibrates(state.round):
        return assigned_seat(terms, state, seat)
    unscorable = unscorable_sizes(state, seat.client_id, seat.offer.runtime)
    proposals = [one for one in propose(ask_of(terms, state, seat)) if one.spec.spec_id not in unscorable]
    if len(proposals) < _LEAST:
        return assigned_seat(terms, state, seat)
    waiting = replace(seat, stage="scoring", proposals=tuple(one.spec for one in proposals))
    return waiting, (scoring_wanted(state, waiting),)


def scoring_wanted(state: RunState, seat: Seat) -> ScoringRequest:
    """What a seat's score task is made of."""
    return ScoringRequest(client_id=seat.client_id, round=state.round, target=seat.offer.runtime, sizes=seat.proposals)


def scoring_seat(
    terms: Terms, state: RunState, seat: Seat, candidates: Sequence[Scorable], now_s: float
) -> tuple[Seat, tuple[Action, ...]]:
    """Send the candidates whose programs' own plans fit the budget; with too few of them no score is needed."""
    budget, width = seat.offer.budget, seat.offer.packing_width
    planned = {one: planned_for(one.planned_peak_bytes, one.packings, width) for one in candidates}
    fitting = [one for one, size_bytes in planned.items() if budget is not None and size_bytes <= budget.memory_bytes]
    fitting = _with_disk(budget, fitting)
    if budget is None or len(fitting) < _LEAST:
        return unscored_seat(terms, state, seat)
    task = score_task(terms, state, seat, {one: planned[one] for one in fitting}, now_s)
    return replace(seat, task=task), (SendTask(task=task),)


def _with_disk(budget: Budget | None, candidates: list[Scorable]) -> list[Scorable]:
    """The smallest of some candidates, as many as may lie on a device's disk beside each other."""
    left_bytes = None if budget is None else budget.disk_bytes
    if left_bytes is None:
        return candidates
    taken = accumulate(one.program.blob.size_bytes + one.weights.size_bytes for one in candidates)
    return candidates[: sum(taken_bytes <= left_bytes for taken_bytes in taken)]


def scored_seat(terms: Terms, state: RunState, seat: Seat, scores: Scores) -> tuple[Seat, tuple[Action, ...]]:
    """Give the client its best-scored candidate, of equals the largest; without any score as without scores."""
    best = _best(seat, scores)
    if best is None:
        return unscored_seat(terms, state, seat)
    ask = ask_of(terms, state, seat)
    return given_seat(terms, state, seat, ask, Assignment(candidate=ask.price(best)))


def _best(seat: Seat, scores: Scores) -> SubnetSpec | None:
    if seat.task is None or not isinstance(seat.task.work, Score):
        return None
    # Candidates are ordered from smallest to largest.
    known = [(one.score, place) for place, one in enumerate(scores.scores) if one.score is not None]
    return seat.task.work.candidates[max(known)[1]].spec if known else None


def unscored_seat(terms: Terms, state: RunState, seat: Seat) -> tuple[Seat, tuple[Action, ...]]:
    """Give the client what the method gives without scores.

    What a search finds now is not remembered: it would depend on who was answered first.
    """
    given, actions = assigned_seat(terms, state, replace(seat, task=None))
    return given, actions


def without_late_scores(terms: Terms, state: RunState, now_s: float) -> tuple[RunState, tuple[Action, ...]]:
    """Wait no longer for scores when half of the round's time is over; nor for those for which nobody waits so long."""
    waiting = [seat for _, seat in sorted(state.seats.items()) if seat.stage == "scoring"]
    if not waiting:
        return state, ()
    over = now_s - state.live.entered_s >= limit_s(terms, "scores")
    awaited = frozenset[str]() if over else awaited_scores(terms, state, now_s)
    late = [seat for seat in waiting if seat.client_id not in awaited]
    if not late:
        return state, ()
    asked = [seat.client_id for seat in late if seat.task is not None]
    state = with_missing(state, asked, "scores", most=None if any_scores(state) else 1)
    seats, actions = dict(state.seats), list[Action]()
    for seat in late:
        seats[seat.client_id], more = unscored_seat(terms, state, replace(seat, proposals=()))
        actions += more if seat.task is None else (Withdraw(task_id=seat.task.task_id), *more)
    return replace(state, seats=MappingProxyType(seats)), tuple(actions)
