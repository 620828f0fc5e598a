"""Whether a run goes on: after an attempt without an update, after its last round, or by its method. Pure.

A round that aggregated nothing is attempted again, with growing pauses and a deadline.

The run fails earlier if another attempt is certain to aggregate nothing: an attempt is deterministic, so a device with
unusable data or diverging training fails again. If every present device, and at least as many as a round needs, has
failed so in two attempts, the run fails with the reasons of the first. A device that may succeed in another attempt, or
that joins the run, keeps it going.

Devices need time, so each pause is twice as long as the one before. Replayed logs need none: each attempt reads them a
step later, at once if they alone kept all devices from the round, and the deadline counts their seconds. So the same
logs give the same choices, and a run fails if they never have what it needs.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.rounds.context import RunContext
from subfleet.rounds.live import AttemptTimes
from subfleet.rounds.members import SILENT_SINCE, list_expected
from subfleet.rounds.progress import Failed, FailedAttempts, Failing, Measuring, Searching, Waiting
from subfleet.rounds.selection import NOT_DRAWN
from subfleet.rounds.state import ClientState, RunState, get_memory

_MOST_REASONS = 4
_MOST_NAMES = 3
_MOST_CHARACTERS = 160  # of one reason
_MOST_DOUBLINGS = 60
_MOST_ATTEMPTS = 2
"""Attempts in which a device fails for a lasting reason before it is given up."""


def open_round(state: RunState, now_s: float) -> RunState:
    """Announce a round: the next one, or again one without an update or an answer."""
    again = state.round > state.aggregated_round
    unanswered = again and not state.clients
    live = replace(
        state.live,
        # An attempt without an answer is announced again, but it began with its first announcement.
        opened_s=state.live.opened_s if unanswered else now_s,
        attempt_times=state.live.attempt_times if again else AttemptTimes(),
    )
    failed_attempts = state.failed_attempts if again else FailedAttempts(lost=state.failed_attempts.lost)
    state = replace(
        state,
        round=state.aggregated_round + 1,
        clients=MappingProxyType({}),
        failed_attempts=failed_attempts,
        live=live,
    )
    return state.enter(Measuring(), now_s)


def fail_attempt(context: RunContext, state: RunState, now_s: float) -> RunState:
    """The state after an attempt without an update: the run waits for the next attempt, or fails."""
    before, times = state.failed_attempts, state.live.attempt_times
    if times.since_s is None:
        times = AttemptTimes(since_s=now_s, since_attempt=state.run_attempt)
    failing = _update_failing(before.failing, state.clients)
    # The first reason says more than those that follow from it.
    first = {name: one.first for name, one in failing.items() if name in state.clients}
    waits_for = _group_reasons({**_list_reasons(state.clients), **first})
    failed_attempts = FailedAttempts(count=before.count + 1, lost=before.lost + 1, waits_for=waits_for, failing=failing)
    live = replace(state.live, attempt_times=replace(times, pause_s=_choose_pause_s(context, state)))
    state = replace(state, failed_attempts=failed_attempts, live=live).enter(Waiting(), now_s)
    if _is_certain(context, state, now_s):
        failure = (
            f"round {state.round} left nothing to aggregate in {failed_attempts.count} attempts, and another would "
            f"have the same outcome: {waits_for}; repair these devices, and start the run again"
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


def _update_failing(before: Mapping[str, Failing], clients: Mapping[str, ClientState]) -> Mapping[str, Failing]:
    """The clients that have failed in every attempt, after one more."""
    found = {
        name: one for name, client in clients.items() if (one := _update_failure(before.get(name), client)) is not None
    }
    return MappingProxyType(dict(sorted(found.items()))) if found or before else before


def _update_failure(before: Failing | None, client: ClientState) -> Failing | None:
    if client.reason == NOT_DRAWN:  # it was not tried
        return before
    if client.lasts == "passing" or client.stage not in ("refused", "skipped"):
        return None
    reason = f"{client.stage}: {client.reason}"
    if before is None or (client.lasts == "unclear" and before.last != reason):
        return Failing(times=1, first=reason, last=reason)
    return replace(before, times=before.times + 1, last=reason)


def _is_certain(context: RunContext, state: RunState, now_s: float) -> bool:
    """Whether every present device has failed for a lasting reason."""
    assigned = (name for name, client in state.clients.items() if client.stage != "missing")
    there, failing = {*list_expected(context, state, now_s), *assigned}, state.failed_attempts.failing
    is_over = all(name in failing and failing[name].times >= _MOST_ATTEMPTS for name in there)
    return is_over and len(there) >= context.config.min_clients


def describe_missing(clients: Mapping[str, ClientState]) -> str:
    """The clients that did not take part and why, in a short text, the most frequent reasons first."""
    return _group_reasons(_list_reasons(clients))


def _list_reasons(clients: Mapping[str, ClientState]) -> dict[str, str]:
    return {name: f"{client.stage}: {client.reason}" for name, client in clients.items() if client.stage != "done"}


def _group_reasons(why: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for name, text in sorted(why.items()):
        groups.setdefault(text[:_MOST_CHARACTERS], []).append(name)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group))
    told = [f"{_join_names(names)} {text}" for text, names in ordered[:_MOST_REASONS]]
    more = sum(len(names) for _, names in ordered[_MOST_REASONS:])
    return "; ".join([*told, *([f"{more} more for other reasons"] if more else [])])


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
    if isinstance(state.at, Failed):
        failed_attempts = replace(state.failed_attempts, failing=MappingProxyType({}))
        return replace(state, at=Waiting(), failed_attempts=failed_attempts)
    if isinstance(state.at, Searching):
        return replace(state, clients=MappingProxyType({}))
    if state.phase in ("deploy", "finished") and not is_over(context, state):
        return replace(state, at=Waiting(), clients=MappingProxyType({}))
    return state


def explain_early_end(context: RunContext, state: RunState) -> str:
    """Why a run ends before its last round; empty if it does not.

    A run that calibrates norms in its last round goes on to its end.
    """
    config = context.config
    if not 0 < state.aggregated_round < config.total_rounds or config.calibrates(config.total_rounds):
        return ""
    return context.roles.memory.stop(get_memory(context, state))
