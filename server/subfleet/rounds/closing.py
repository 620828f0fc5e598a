"""The end of a round: which updates are folded, and what becomes of a fold that went wrong. Pure.

    train --> fold       updates far outside what is usual count less (or not, and their clients wait for some rounds)
    fold  --> fold       the model diverged: once more without the most suspect, one, then twice as many each time
    fold  --> waiting    it did not: the suspects are left out for some rounds
    both  --> waiting    nobody is left to fold, so that nobody is to blame: it is tried again (failed: too often)

Every step is in the journal before the next fold begins, and each fold starts from the last checkpoint. So a run that
was killed in between goes on with the same bits.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds.actions import Action, AggregationRequest, Close
from subfleet.rounds.continuing import fruitless, what_is_lacking
from subfleet.rounds.evaluating import begun
from subfleet.rounds.networks import brought_anew, own_size, with_lineages
from subfleet.rounds.progress import Aggregating, Waiting
from subfleet.rounds.selection import with_memory
from subfleet.rounds.state import Exclusion, RunState, Seat, Suspicion, remembered
from subfleet.rounds.suspicion import ChangeSize, divergence, most_suspect, outliers_of, travel, usual_change
from subfleet.rounds.terms import Terms
from subfleet.rounds.weights import counted_samples
from subfleet.rounds.work import AggregatedRound

__all__ = ["begin_fold", "fold_action", "folded", "not_folded", "with_exclusion"]

Outcome = tuple[RunState, tuple[Action, ...]]


def with_exclusion(state: RunState, seat: Seat) -> Seat:
    """A client's seat; skipped where an earlier update has cost it this round."""
    excluded = state.suspicion.excluded.get(seat.client_id)
    if excluded is None or state.round > excluded.until_round:
        return seat
    return replace(seat, stage="skipped", reason=excluded.reason, outlier=excluded.reason)


def begin_fold(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Fold what has come, one update or more, with those far outside what is usual as the run treats them."""
    settings, sizes = terms.config.suspicion, _sizes(state, "done")
    far = {} if settings.outliers == "off" else outliers_of(sizes, state.suspicion.changes, settings)
    folding = state.entered(Aggregating(), now_s)
    if settings.outliers == "exclude":
        why = {name: outlier.why for name, outlier in far.items()}
        if why.keys() == sizes.keys():
            return _spoiled(terms, _suspected(state, why), now_s)
        state = _left_out(terms, folding, why)
    else:
        judged = [
            replace(_scaled(state.seats[name], outlier.scale if settings.alters else 1.0), outlier=outlier.why)
            for name, outlier in far.items()
        ]
        state = folding.with_seats(*judged)
    return state, (fold_action(terms, state),)


def fold_action(terms: Terms, state: RunState) -> AggregationRequest:
    """Fold the updates of a round that are not suspect."""
    return AggregationRequest(
        round=state.round,
        seats=_of_stage(state, "done"),
        memory=remembered(terms, state),
        lineages=state.lineages,
        brought=brought_anew(terms, state),
    )


def folded(
    terms: Terms, state: RunState, request: AggregationRequest, result: AggregatedRound, now_s: float
) -> Outcome:
    """Close the round; or fold it once more, where the model has diverged."""
    if state.phase != "fold" or request.round != state.round:
        return state, ()
    damaged = {name: why for name, why in result.refused.items() if name in state.seats}
    state = _refused(state, damaged)
    if not _of_stage(state, "done"):
        return fruitless(terms, state, now_s), ()
    guess = math.log(terms.config.model.class_count) if result.guess_loss is None else result.guess_loss
    why = divergence(result.loss, state.suspicion.loss, guess, terms.config.suspicion)
    return _again(terms, state, why, now_s) if why else _closed(terms, state, result, now_s)


def not_folded(terms: Terms, state: RunState, request: AggregationRequest, reason: str, now_s: float) -> Outcome:
    """Fold once more: without the networks that clients bring, where there are any, else without the most suspect."""
    if state.phase != "fold" or request.round != state.round:
        return state, ()
    if not brought_anew(terms, state):
        return _again(terms, state, reason, now_s)
    new = [
        replace(
            seat,
            offer=replace(seat.offer, brought=None),
            reason=f"the network that it brings cannot be taken in ({reason})",
        )
        for seat in state.seats.values()
        if seat.offer.brought is not None and own_size(terms, state.lineages, seat) is None
    ]
    state = state.with_seats(*new)
    return state, (fold_action(terms, state),)


def _again(terms: Terms, state: RunState, why: str, now_s: float) -> Outcome:
    sizes = _sizes(state, "done", "suspect")
    count = max(1, 2 * len(_of_stage(state, "suspect"))) if terms.config.suspicion.alters else len(sizes)
    if count >= len(sizes):
        return _spoiled(terms, _suspected(state, dict.fromkeys(sizes, f"{why}, whoever was left out")), now_s)
    state = _suspected(state, dict.fromkeys(most_suspect(sizes)[:count], why))
    return state, (fold_action(terms, state),)


def _closed(terms: Terms, state: RunState, result: AggregatedRound, now_s: float) -> Outcome:
    suspects = _of_stage(state, "suspect")
    without = "it" if len(suspects) == 1 else f"{len(suspects)} suspects"
    state = _left_out(terms, state, {one.client_id: f"{one.reason}, but not without {without}" for one in suspects})
    close = Close(
        round=state.round,
        accuracy=result.accuracy,
        loss=result.loss,
        sha256=result.sha256,
        seconds=now_s - state.live.opened_s,
        seats=tuple(seat for _, seat in sorted(state.seats.items())),
        exported=sum(known.turn >= state.turn - state.retry for known in state.written.values()),
        turn=state.turn,
        retries=state.retry,
        lineages=state.lineages,
        model_bytes=result.model_bytes,
        model=result.model,
        metrics=result.metrics,
    )
    done = {seat.client_id: seat for seat in _of_stage(state, "done")}
    state = replace(
        state,
        folded_round=state.round,
        seats=MappingProxyType({}),
        last=MappingProxyType({**state.last, **done}),
        settled=frozenset(seat.task.task_id for seat in done.values() if seat.task is not None),
        tries=replace(state.tries, waits_for=""),
        suspicion=_remembered(terms, state, result.loss),
    )
    state = with_lineages(terms, with_memory(terms, state, result, done), result.lineages)
    return begun(terms, state.entered(Waiting(), now_s), now_s), (close,)


def _remembered(terms: Terms, state: RunState, loss: float) -> Suspicion:
    """What a round tells about the next ones."""
    usual = usual_change(_sizes(state, "done").values())
    excluded = {name: one for name, one in state.suspicion.excluded.items() if one.until_round > state.round}
    return Suspicion(
        loss=loss,
        changes=(*state.suspicion.changes, usual)[-terms.config.suspicion.remembered_rounds :],
        excluded=MappingProxyType(excluded),
    )


def _spoiled(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """No update is more suspect than the others: try the round again, but not for ever."""
    state = _refused(state, {seat.client_id: seat.reason for seat in _of_stage(state, "suspect")})
    count = state.suspicion.spoiled + 1
    if count < terms.config.suspicion.spoiled_tries:
        state = replace(state, suspicion=replace(state.suspicion, spoiled=count))
        return fruitless(terms, state, now_s), ()
    failure = (
        f"round {state.round} could not be folded in {count} tries ({what_is_lacking(state.seats)}); lower the "
        "learning rate and begin a new run, or mend the devices and start the server again"
    )
    forgotten = replace(state.suspicion, spoiled=0)
    return replace(state, suspicion=forgotten).failed(failure, now_s), ()


def _left_out(terms: Terms, state: RunState, why: Mapping[str, str]) -> RunState:
    """The state without the updates of some clients, and without the clients for some rounds."""
    state, until = _refused(state, why), state.round + terms.config.suspicion.exclusion_rounds
    if not why or until == state.round:
        return state
    said = {name: f"left out until round {until}: in round {state.round} {reason}" for name, reason in why.items()}
    new = {name: Exclusion(until_round=until, reason=reason) for name, reason in said.items()}
    excluded = MappingProxyType({**state.suspicion.excluded, **new})
    return replace(state, suspicion=replace(state.suspicion, excluded=excluded))


def _refused(state: RunState, why: Mapping[str, str]) -> RunState:
    refused = [
        replace(_scaled(state.seats[name], 1.0), stage="refused", reason=why[name], outlier=why[name]) for name in why
    ]
    return state.with_seats(*refused)


def _scaled(seat: Seat, scale: float) -> Seat:
    return seat if seat.trained is None else replace(seat, trained=replace(seat.trained, scale=scale))


def _suspected(state: RunState, why: Mapping[str, str]) -> RunState:
    return state.with_seats(*[replace(state.seats[name], stage="suspect", reason=why[name]) for name in why])


def _of_stage(state: RunState, stage: str) -> tuple[Seat, ...]:
    return tuple(seat for _, seat in sorted(state.seats.items()) if seat.stage == stage)


def _sizes(state: RunState, *stages: str) -> dict[str, ChangeSize]:
    return {name: _size(seat) for name, seat in sorted(state.seats.items()) if seat.stage in stages}


def _size(seat: Seat) -> ChangeSize:
    """How far an update moves the model, and how far its training could have moved it."""
    change = ChangeSize() if seat.trained is None else seat.trained.change
    if seat.task is None or not isinstance(seat.task.work, Train | Calibrate):
        return change
    samples = counted_samples(seat)
    return replace(change, travel=travel(seat.task.work.settings, samples), samples=float(samples))
