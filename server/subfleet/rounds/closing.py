"""The end of a round, which aggregates its updates or is attempted again, and the end of a run. Pure.

    train     --> aggregate  outliers count less (or not, and their clients are excluded for some rounds)
    aggregate --> aggregate  the model diverged: again without the most suspect update, then without twice as many
    aggregate --> waiting    it did not diverge: the suspects are excluded for some rounds
    both      --> waiting    no update is left: another attempt (failed: too many diverged attempts)

Every step is in the journal before the next aggregation begins, and each aggregation starts from the last checkpoint.
So a killed run continues with bit-identical results.

A round that aggregated nothing is attempted again, with growing pauses and a deadline.

The run fails earlier if another attempt is certain to aggregate nothing: an attempt is deterministic, so a device with
unusable data or diverging training fails again. If every present device, and at least as many as a round needs, has
failed so in two attempts, the run fails with the reasons of the first. A device that may succeed in another attempt, or
that joins the run, keeps it going.

Devices need time, so each pause is twice as long as the one before. Replayed logs need none: each attempt reads them a
step later, at once if they alone kept all devices from the round, and the deadline counts their seconds. So the same
logs give the same choices, and a run fails if they never have what it needs.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds import outliers, progress
from subfleet.rounds.context import RunContext
from subfleet.rounds.evaluating import list_evaluators
from subfleet.rounds.live import AttemptTimes
from subfleet.rounds.members import SILENT_SINCE, list_expected
from subfleet.rounds.networks import find_own_size, list_new_networks, replace_lineages
from subfleet.rounds.ongoing import begin_clients, end_ongoing, list_ongoing
from subfleet.rounds.selection import NOT_DRAWN, remember_round
from subfleet.rounds.signals import AggregationRequest, Close, Outcome
from subfleet.rounds.state import ClientState, Exclusion, OutlierDetection, RunState, get_memory
from subfleet.rounds.weights import count_samples
from subfleet.rounds.work import AggregatedRound

_MOST_REASONS = 4
_MOST_NAMES = 3
_MOST_CHARACTERS = 160  # of one reason
_MOST_DOUBLINGS = 60
_MOST_ATTEMPTS = 2
"""Attempts in which a device fails for a lasting reason before it is given up."""


def begin_aggregation(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Aggregate the updates, with outliers scaled down, excluded or reported as the run is configured."""
    settings, sizes = context.config.outliers, _measure_changes(state, "done")
    far = {} if settings.outliers == "off" else outliers.find_outliers(sizes, state.outliers.changes, settings)
    aggregation = state.enter(progress.Aggregating(), now_s)
    if settings.outliers == "exclude":
        why = {name: outlier.why for name, outlier in far.items()}
        if why.keys() == sizes.keys():
            return _fail_round(context, _suspect(state, why), now_s)
        state = _leave_out(context, aggregation, why)
    else:
        judged = [
            replace(_scale(state.clients[name], outlier.scale if settings.alters else 1.0), outlier=outlier.why)
            for name, outlier in far.items()
        ]
        state = aggregation.with_clients(*judged)
    return state, (request_aggregation(context, state),)


def request_aggregation(context: RunContext, state: RunState) -> AggregationRequest:
    """Request the aggregation of the updates that are not suspect."""
    return AggregationRequest(
        round=state.round,
        clients=_list_stage(state, "done"),
        memory=get_memory(context, state),
        lineages=state.lineages,
        brought=list_new_networks(context, state),
    )


def finish_aggregation(context: RunContext, state: RunState, result: AggregatedRound, now_s: float) -> Outcome:
    """Close the round; or aggregate again, if the model has diverged."""
    damaged = {name: why for name, why in result.refused.items() if name in state.clients}
    state = _refuse(state, damaged)
    if not _list_stage(state, "done"):
        return fail_attempt(context, state, now_s), ()
    guess = math.log(context.config.model.class_count) if result.guess_loss is None else result.guess_loss
    why = outliers.explain_divergence(result.loss, state.outliers.loss, guess, context.config.outliers)
    return _exclude_suspects(context, state, why, now_s) if why else _close_round(context, state, result, now_s)


def retry_aggregation(context: RunContext, state: RunState, reason: str, now_s: float) -> Outcome:
    """Aggregate again: without the networks that clients bring, else without the most suspect update."""
    if not list_new_networks(context, state):
        return _exclude_suspects(context, state, reason, now_s)
    why = f"its network cannot be added ({reason})"
    new = [
        replace(client, offer=replace(client.offer, brought=None), reason=why)
        for client in state.clients.values()
        if client.offer.brought is not None and find_own_size(context, state.lineages, client) is None
    ]
    state = state.with_clients(*new)
    return state, (request_aggregation(context, state),)


def _exclude_suspects(context: RunContext, state: RunState, why: str, now_s: float) -> Outcome:
    sizes = _measure_changes(state, "done", "suspect")
    count = max(1, 2 * len(_list_stage(state, "suspect"))) if context.config.outliers.alters else len(sizes)
    if count >= len(sizes):
        reasons = dict.fromkeys(sizes, f"{why}, whichever updates were left out")
        return _fail_round(context, _suspect(state, reasons), now_s)
    state = _suspect(state, dict.fromkeys(outliers.rank_outliers(sizes)[:count], why))
    return state, (request_aggregation(context, state),)


def _close_round(context: RunContext, state: RunState, result: AggregatedRound, now_s: float) -> Outcome:
    suspects = _list_stage(state, "suspect")
    without = "this update" if len(suspects) == 1 else f"{len(suspects)} suspect updates"
    reasons = {client.client_id: f"{client.reason}; the round succeeded without {without}" for client in suspects}
    state = _leave_out(context, state, reasons)
    close = Close(
        round=state.round,
        result=result,
        seconds=now_s - state.live.opened_s,
        clients=tuple(client for _, client in sorted(state.clients.items()) if not client.open),
        idle={f"skipped: {reason}": len(names) for reason, names in state.idle.items()},
        exported=sum(known.run_attempt >= state.run_attempt - state.attempt for known in state.written.values()),
        run_attempt=state.run_attempt,
        failed_attempts=state.attempt,
        lineages=state.lineages,
    )
    done = {client.client_id: client for client in _list_stage(state, "done")}
    state = replace(
        state.without_clients(),
        aggregated_round=state.round,
        clients=list_ongoing(state),
        last=MappingProxyType({**state.last, **done}),
        settled=frozenset(client.task.task_id for client in done.values() if client.task is not None),
        failed_attempts=replace(state.failed_attempts, waits_for=""),
        outliers=_update_detection(context, state, result.loss),
    )
    state = replace_lineages(context, remember_round(context, state, result, done), result.lineages)
    state, withdrawn = end_ongoing(state) if is_over(context, state) else (state, ())
    return _begin_evaluation(context, state.enter(progress.Waiting(), now_s), now_s), (close, *withdrawn)


def _begin_evaluation(context: RunContext, state: RunState, now_s: float) -> RunState:
    """Begin an evaluation after a closed round, if it is due and a client can evaluate."""
    last_round = state.aggregated_round if is_over(context, state) else context.config.total_rounds
    due = context.config.evaluation.is_due(state.aggregated_round, last_round)
    if not due or next(list_evaluators(context, state, now_s), None) is None:
        return state
    return state.enter(progress.Evaluating(), now_s)


def _update_detection(context: RunContext, state: RunState, loss: float | None) -> OutlierDetection:
    """The outlier detection after a round."""
    usual = outliers.compute_usual_change(_measure_changes(state, "done").values())
    excluded = {name: entry for name, entry in state.outliers.excluded.items() if entry.until_round > state.round}
    return OutlierDetection(
        loss=loss,
        changes=(*state.outliers.changes, usual)[-context.config.outliers.remembered_rounds :],
        excluded=MappingProxyType(excluded),
    )


def _fail_round(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Attempt the round again, as no update is more suspect than the others; fail the run after too many attempts."""
    state = _refuse(state, {client.client_id: client.reason for client in _list_stage(state, "suspect")})
    count = state.outliers.spoiled + 1
    if count < context.config.outliers.spoiled_attempts:
        state = replace(state, outliers=replace(state.outliers, spoiled=count))
        return fail_attempt(context, state, now_s), ()
    failure = (
        f"round {state.round} could not be aggregated in {count} attempts ({describe_missing(state)}); lower "
        "the learning rate and begin a new run, or repair the devices and start the server again"
    )
    return replace(state, outliers=replace(state.outliers, spoiled=0)).fail(failure, now_s), ()


def _leave_out(context: RunContext, state: RunState, why: Mapping[str, str]) -> RunState:
    """Leave out the updates of some clients, and exclude the clients for some rounds."""
    state, until = _refuse(state, why), state.round + context.config.outliers.exclusion_rounds
    if not why or until == state.round:
        return state
    reasons = {name: f"left out until round {until}: in round {state.round} {reason}" for name, reason in why.items()}
    new = {name: Exclusion(until_round=until, reason=reason) for name, reason in reasons.items()}
    excluded = MappingProxyType({**state.outliers.excluded, **new})
    return replace(state, outliers=replace(state.outliers, excluded=excluded))


def _refuse(state: RunState, why: Mapping[str, str]) -> RunState:
    refused = [
        replace(_scale(state.clients[name], 1.0), stage="refused", reason=why[name], outlier=why[name]) for name in why
    ]
    return state.with_clients(*refused)


def _scale(client: ClientState, scale: float) -> ClientState:
    return client if client.trained is None else replace(client, trained=replace(client.trained, scale=scale))


def _suspect(state: RunState, why: Mapping[str, str]) -> RunState:
    return state.with_clients(*[replace(state.clients[name], stage="suspect", reason=why[name]) for name in why])


def _list_stage(state: RunState, stage: str) -> tuple[ClientState, ...]:
    return tuple(client for _, client in sorted(state.clients.items()) if client.stage == stage)


def _measure_changes(state: RunState, *stages: str) -> dict[str, outliers.ChangeSize]:
    return {name: _measure_change(client) for name, client in sorted(state.clients.items()) if client.stage in stages}


def _measure_change(client: ClientState) -> outliers.ChangeSize:
    """The change of an update, and how far its training could have moved the model."""
    change = outliers.ChangeSize() if client.trained is None else client.trained.change
    if client.task is None or not isinstance(client.task.work, Train | Calibrate):
        return change
    samples = count_samples(client)
    return replace(change, travel=outliers.travel(client.task.work.settings, samples), samples=float(samples))


def open_round(context: RunContext, state: RunState, now_s: float) -> RunState:
    """Announce a round: the next one, or again one without an update or an answer.

    An asynchronous round has no phase of its own for measurements, and goes on with the clients that have tasks.
    """
    asynchronous = context.config.asynchronous is not None
    again = state.round > state.aggregated_round
    unanswered = again and not (state.clients or state.idle)
    live = replace(
        state.live,
        survey=None,
        # An attempt without an answer is announced again, but it began with its first announcement.
        opened_s=state.live.opened_s if unanswered else now_s,
        attempt_times=state.live.attempt_times if again else AttemptTimes(),
    )
    failed_attempts = state.failed_attempts if again else progress.FailedAttempts(lost=state.failed_attempts.lost)
    state = replace(
        state.without_clients(),
        round=state.aggregated_round + 1,
        clients=list_ongoing(state) if asynchronous else MappingProxyType({}),
        failed_attempts=failed_attempts,
        live=live,
    )
    return state.enter(progress.Training() if asynchronous else progress.Measuring(), now_s)


def fail_attempt(context: RunContext, state: RunState, now_s: float) -> RunState:
    """The state after an attempt without an update: the run waits for the next attempt, or fails."""
    before, times = state.failed_attempts, state.live.attempt_times
    if times.since_s is None:
        times = AttemptTimes(since_s=now_s, since_attempt=state.run_attempt)
    failing, reasons = _update_failing(before.failing, state), _list_reasons(state)
    # The first reason explains more than the reasons that follow from it.
    first = {name: failure.first for name, failure in failing.items() if name in reasons}
    waits_for = _group_reasons({**reasons, **first})
    failed_attempts = progress.FailedAttempts(
        count=before.count + 1, lost=before.lost + 1, waits_for=waits_for, failing=failing
    )
    live = replace(state.live, attempt_times=replace(times, pause_s=_choose_pause_s(context, state)))
    state = replace(state, failed_attempts=failed_attempts, live=live).enter(progress.Waiting(), now_s)
    if _is_certain(context, state, now_s):
        failure = (
            f"round {state.round} left nothing to aggregate in {failed_attempts.count} attempts, and further attempts "
            f"would fail for the same reasons: {waits_for}; repair these devices, and start the run again"
        )
        return state.fail(failure, now_s)
    attempts, limit_s = state.run_attempt - times.since_attempt, context.config.deadlines.attempts_s
    if max(now_s - (times.since_s or 0.0), _get_log_s(context, attempts)) < limit_s:
        return state
    failure = (
        f"round {state.round} left nothing to aggregate for {limit_s:g} s, in {attempts} attempts "
        f"({waits_for}); repair the devices and start the server again, or raise deadlines.attempts_s"
    )
    return state.fail(failure, now_s)


def _update_failing(before: Mapping[str, progress.Failing], state: RunState) -> Mapping[str, progress.Failing]:
    """The clients that have failed in every attempt, after one more; one that was not drawn was not tried."""
    updated: dict[str, progress.Failing | None] = {name: before.get(name) for name in state.idle.get(NOT_DRAWN, ())}
    updated |= {name: _update_failure(before.get(name), client) for name, client in state.clients.items()}
    failing = {name: failure for name, failure in sorted(updated.items()) if failure is not None}
    return MappingProxyType(failing) if failing or before else before


def _update_failure(before: progress.Failing | None, client: ClientState) -> progress.Failing | None:
    if client.lasts == "passing" or client.stage not in ("refused", "skipped"):
        return None
    reason = f"{client.stage}: {client.reason}"
    if before is None or (client.lasts == "unclear" and before.last != reason):
        return progress.Failing(times=1, first=reason, last=reason)
    return replace(before, times=before.times + 1, last=reason)


def _is_certain(context: RunContext, state: RunState, now_s: float) -> bool:
    """Whether every present device has failed for a lasting reason."""
    assigned = (name for name, client in state.clients.items() if client.stage != "missing")
    there = {*list_expected(context, state, now_s), *assigned}.union(*state.idle.values())
    failing = state.failed_attempts.failing
    is_over = all(name in failing and failing[name].times >= _MOST_ATTEMPTS for name in there)
    return is_over and len(there) >= context.config.min_clients


def describe_missing(state: RunState) -> str:
    """The clients that did not take part and why, in a short text, the most frequent reasons first."""
    return _group_reasons(_list_reasons(state))


def _list_reasons(state: RunState) -> dict[str, str]:
    """Why clients did not take part."""
    idle = {name: f"skipped: {reason}" for reason, names in state.idle.items() for name in names}
    clients = state.clients.items()
    return idle | {name: f"{client.stage}: {client.reason}" for name, client in clients if client.stage != "done"}


def _group_reasons(why: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for name, text in sorted(why.items()):
        groups.setdefault(text[:_MOST_CHARACTERS], []).append(name)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group))
    parts = [f"{_join_names(names)} {text}" for text, names in ordered[:_MOST_REASONS]]
    more = sum(len(names) for _, names in ordered[_MOST_REASONS:])
    return "; ".join([*parts, *([f"{more} more for other reasons"] if more else [])])


def _join_names(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _choose_pause_s(context: RunContext, state: RunState) -> float:
    deadlines = context.config.deadlines
    waited_for = (client for client in state.clients.values() if not client.reason.startswith(SILENT_SINCE))
    if _get_log_s(context, 1) > 0 and all(client.stage == "skipped" for client in waited_for):
        return 0.0
    return float(
        min(deadlines.pause_s * 2 ** min(state.failed_attempts.count, _MOST_DOUBLINGS), deadlines.longest_pause_s)
    )


def _get_log_s(context: RunContext, attempts: int) -> float:
    return 0.0 if context.config.clock is None else attempts * context.config.clock.step_s


def is_over(context: RunContext, state: RunState) -> bool:
    """Whether the run has no further round."""
    return state.aggregated_round >= context.config.total_rounds or bool(explain_early_end(context, state))


def resume_state(context: RunContext, state: RunState) -> RunState:
    """The stored state of a run that is started again.

    A failed run is attempted again, a run with more rounds goes on, and a generation is scored by devices again.
    """
    if context.config.asynchronous is not None:
        state = begin_clients(state, list_ongoing(state), state.live.entered_s)
    if isinstance(state.at, progress.Failed):
        failed_attempts = replace(state.failed_attempts, failing=MappingProxyType({}))
        return replace(state, at=progress.Waiting(), failed_attempts=failed_attempts)
    if isinstance(state.at, progress.Searching):
        return state.without_clients()
    if state.phase in ("deploy", "finished") and not is_over(context, state):
        return replace(state.without_clients(), at=progress.Waiting())
    return state


def explain_early_end(context: RunContext, state: RunState) -> str:
    """Why a run ends before its last round; empty if it does not.

    A run that calibrates norms in its last round goes on to its end.
    """
    config = context.config
    if not 0 < state.aggregated_round < config.total_rounds or config.calibrates(config.total_rounds):
        return ""
    return context.roles.memory.stop(get_memory(context, state))
