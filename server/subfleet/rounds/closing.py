"""The end of a round: which updates are aggregated, and what follows if the model diverges. Pure.

    train     --> aggregate  outliers count less (or not, and their clients are excluded for some rounds)
    aggregate --> aggregate  the model diverged: again without the most suspect update, then without twice as many
    aggregate --> waiting    it did not diverge: the suspects are excluded for some rounds
    both      --> waiting    no update is left: another attempt (failed: too many diverged attempts)

Every step is in the journal before the next aggregation begins, and each aggregation starts from the last checkpoint.
So a run that was killed continues with the same bits.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds.context import RunContext
from subfleet.rounds.continuing import describe_missing, fail_attempt
from subfleet.rounds.evaluating import begin_evaluation
from subfleet.rounds.networks import find_own_size, list_new_networks, replace_lineages
from subfleet.rounds.outliers import (
    ChangeSize,
    compute_usual_change,
    explain_divergence,
    find_outliers,
    rank_outliers,
    travel,
)
from subfleet.rounds.progress import Aggregating, Waiting
from subfleet.rounds.selection import remember_round
from subfleet.rounds.signals import AggregationRequest, Close, Outcome
from subfleet.rounds.state import ClientState, Exclusion, OutlierDetection, RunState, get_memory
from subfleet.rounds.weights import count_samples
from subfleet.rounds.work import AggregatedRound


def apply_exclusion(state: RunState, client: ClientState) -> ClientState:
    """A client's state; skipped if an earlier update has excluded the client from this round."""
    excluded = state.outliers.excluded.get(client.client_id)
    if excluded is None or state.round > excluded.until_round:
        return client
    return replace(client, stage="skipped", reason=excluded.reason, outlier=excluded.reason)


def begin_aggregation(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Aggregate the updates, with outliers scaled down, excluded or reported as the run is configured."""
    settings, sizes = context.config.outliers, _measure_changes(state, "done")
    far = {} if settings.outliers == "off" else find_outliers(sizes, state.outliers.changes, settings)
    aggregation = state.enter(Aggregating(), now_s)
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
    why = explain_divergence(result.loss, state.outliers.loss, guess, context.config.outliers)
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
    state = _suspect(state, dict.fromkeys(rank_outliers(sizes)[:count], why))
    return state, (request_aggregation(context, state),)


def _close_round(context: RunContext, state: RunState, result: AggregatedRound, now_s: float) -> Outcome:
    suspects = _list_stage(state, "suspect")
    without = "it" if len(suspects) == 1 else f"{len(suspects)} suspects"
    state = _leave_out(context, state, {one.client_id: f"{one.reason}, but not without {without}" for one in suspects})
    close = Close(
        round=state.round,
        result=result,
        seconds=now_s - state.live.opened_s,
        clients=tuple(client for _, client in sorted(state.clients.items())),
        exported=sum(known.run_attempt >= state.run_attempt - state.attempt for known in state.written.values()),
        run_attempt=state.run_attempt,
        failed_attempts=state.attempt,
        lineages=state.lineages,
    )
    done = {client.client_id: client for client in _list_stage(state, "done")}
    state = replace(
        state,
        aggregated_round=state.round,
        clients=MappingProxyType({}),
        last=MappingProxyType({**state.last, **done}),
        settled=frozenset(client.task.task_id for client in done.values() if client.task is not None),
        failed_attempts=replace(state.failed_attempts, waits_for=""),
        outliers=_update_detection(context, state, result.loss),
    )
    state = replace_lineages(context, remember_round(context, state, result, done), result.lineages)
    return begin_evaluation(context, state.enter(Waiting(), now_s), now_s), (close,)


def _update_detection(context: RunContext, state: RunState, loss: float) -> OutlierDetection:
    """The outlier detection after a round."""
    usual = compute_usual_change(_measure_changes(state, "done").values())
    excluded = {name: one for name, one in state.outliers.excluded.items() if one.until_round > state.round}
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
        f"round {state.round} could not be aggregated in {count} attempts ({describe_missing(state.clients)}); lower "
        "the learning rate and begin a new run, or repair the devices and start the server again"
    )
    reset = replace(state.outliers, spoiled=0)
    return replace(state, outliers=reset).fail(failure, now_s), ()


def _leave_out(context: RunContext, state: RunState, why: Mapping[str, str]) -> RunState:
    """Leave out the updates of some clients, and exclude the clients for some rounds."""
    state, until = _refuse(state, why), state.round + context.config.outliers.exclusion_rounds
    if not why or until == state.round:
        return state
    said = {name: f"left out until round {until}: in round {state.round} {reason}" for name, reason in why.items()}
    new = {name: Exclusion(until_round=until, reason=reason) for name, reason in said.items()}
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


def _measure_changes(state: RunState, *stages: str) -> dict[str, ChangeSize]:
    return {name: _measure_change(client) for name, client in sorted(state.clients.items()) if client.stage in stages}


def _measure_change(client: ClientState) -> ChangeSize:
    """The change of an update, and how far its training could have moved the model."""
    change = ChangeSize() if client.trained is None else client.trained.change
    if client.task is None or not isinstance(client.task.work, Train | Calibrate):
        return change
    samples = count_samples(client)
    return replace(change, travel=travel(client.task.work.settings, samples), samples=float(samples))
