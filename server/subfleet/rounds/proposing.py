"""Candidates that a device scores on its own data before one of them is chosen for it: a seat's stage "scoring". Pure.

FedFA (Park and Joe-Wong 2024, algorithm 1, lines 1 and 2): the server proposes architectures, each device has one that
suits its own data, found by ZiCo (section 5.1).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

from subfleet.methods.policies import Assigned
from subfleet.protocol.candidate_scores import Scoring
from subfleet.protocol.memory import planned_for
from subfleet.protocol.messages import Scores, Task
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.rounds.actions import Action, SendTask, Withdraw
from subfleet.rounds.answers import score_task_id
from subfleet.rounds.awaiting import any_scores, awaited_scores, limit_s, with_missing
from subfleet.rounds.seating import ask_of, assigned_seat, given_seat
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.rounds.unfit import unscorable_sizes
from subfleet.rounds.weighing import in_task
from subfleet.rounds.work import Scorable, ScoringRequest

__all__ = [
    "BATCHES",
    "proposed_seat",
    "score_training",
    "scored_seat",
    "scoring_seat",
    "scoring_wanted",
    "unscored_seat",
    "without_late_scores",
]

BATCHES = 2
"""Whose gradients are compared (Li et al., ICLR 2023, section 4)."""
_LEAST = 2
"""Candidates; one alone needs no score."""


def proposed_seat(terms: Terms, state: RunState, seat: Seat) -> tuple[Seat, tuple[Action, ...]]:
    """Propose candidates to a client that has answered, where the method has some; else choose a size at once."""
    propose = terms.policies.propose
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


def score_training(training: TrainingSettings) -> TrainingSettings:
    """The batches of a round's local training, with the plain objective and an optimiser without state.

    Nothing is updated. Gradients are summed, which is how a device gets to see them.
    """
    objective = replace(training.objective, label_smoothing=0.0, class_mask=False, proximal=False)
    return TrainingSettings(
        batch_size=training.batch_size,
        micro_batch_size=training.program_batch_size,
        learning_rate=0.0,
        objective=objective,
        optimiser=OptimiserSettings(momentum=0.0),
        recompute=training.recompute,
        seed=training.seed,
    )


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
    name = score_task_id(terms, state, seat.client_id)
    task = Task(
        task_id=name,
        work="score",
        run_id=terms.run_id,
        round=state.round,
        client_id=seat.client_id,
        spec=fitting[-1].size,
        programs=tuple(one.program for one in fitting),
        weights=None,
        training=score_training(terms.training(state.round)),
        planned_peak_bytes=max(planned[one] for one in fitting),
        budget=in_task(budget),
        deadline_s=max(0.0, limit_s(terms, "scores") - (now_s - state.live.entered_s)),
        message_id=name,
        retry=state.retry,
        scoring=Scoring(
            specs=tuple(one.size for one in fitting), weights=tuple(one.weights for one in fitting), batches=BATCHES
        ),
        classes=terms.config.data.classes,
        transform=terms.config.data.transform,
    )
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
    return given_seat(terms, state, seat, ask, Assigned(candidate=ask.price(best)))


def _best(seat: Seat, scores: Scores) -> SubnetSpec | None:
    if seat.task is None or seat.task.scoring is None:
        return None
    # Candidates are ordered from smallest to largest.
    known = [(one.score, place) for place, one in enumerate(scores.scores) if one.score is not None]
    return seat.task.scoring.specs[max(known)[1]] if known else None


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
