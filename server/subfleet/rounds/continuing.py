"""Whether a run goes on: after an attempt that left nothing to fold, after its last round, or as its method says. Pure.

A round in which nothing was folded is no round: it is tried again, later and later, and not for ever. Pure.

Nor is it tried again where that is certain to come to nothing: an attempt is deterministic, so that a device whose data
cannot be used, or whose training diverges, fails again. Where every device that is there, and as many as a round begins
with, has failed so in two attempts, the run ends with the reasons of the first. A device for which another attempt may
be another, or that comes to the run before that, keeps it going.

Devices need time, so each pause is twice as long as the one before. Logs that are replayed need none: each try reads
them a step later, at once where they alone decided that nobody takes part, and the deadline counts their seconds. So
the same logs give the same choices, and a run ends where they never have what it needs.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.rounds.live import RetryTimes
from subfleet.rounds.members import SILENT_SINCE, expected
from subfleet.rounds.progress import Failed, Failing, Measuring, Searching, Tries, Waiting
from subfleet.rounds.selection import NOT_DRAWN
from subfleet.rounds.state import RunState, Seat, remembered
from subfleet.rounds.terms import Terms

__all__ = ["fruitless", "opened", "over", "taken_up", "what_is_lacking", "why_early"]

_MOST_REASONS = 4
_MOST_NAMES = 3
_MOST_CHARACTERS = 160  # of one reason
_MOST_DOUBLINGS = 60
_MOST_ATTEMPTS = 2
"""In which a device fails for what another attempt does not change, before nothing more is expected of it."""


def opened(state: RunState, now_s: float) -> RunState:
    """The state with a round announced: the next one, or the one that left nothing to fold or that nobody answered."""
    again = state.round > state.folded_round
    unanswered = again and not state.seats
    live = replace(
        state.live,
        # An attempt that nobody answered is announced again, but it began when it was announced first.
        opened_s=state.live.opened_s if unanswered else now_s,
        retries=state.live.retries if again else RetryTimes(),
    )
    tries = state.tries if again else Tries(lost=state.tries.lost)
    state = replace(state, round=state.folded_round + 1, seats=MappingProxyType({}), tries=tries, live=live)
    return state.entered(Measuring(), now_s)


def fruitless(terms: Terms, state: RunState, now_s: float) -> RunState:
    """The state after a try of the open round that left nothing to fold: it waits for the next one, or has failed."""
    before, times = state.tries, state.live.retries
    if times.since_s is None:
        times = RetryTimes(since_s=now_s, since_turn=state.turn)
    failing = _failing(before.failing, state.seats)
    # What follows from the reason that was true first says less.
    first = {name: one.first for name, one in failing.items() if name in state.seats}
    waits_for = _grouped({**_why(state.seats), **first})
    tries = Tries(retry=before.retry + 1, lost=before.lost + 1, waits_for=waits_for, failing=failing)
    live = replace(state.live, retries=replace(times, pause_s=_pause_s(terms, state)))
    state = replace(state, tries=tries, live=live).entered(Waiting(), now_s)
    if _is_certain(terms, state, now_s):
        failure = (
            f"round {state.round} left nothing to fold in {tries.retry} attempts, and another would come to the same: "
            f"{waits_for}; mend what that names, and start the run again"
        )
        return state.failed(failure, now_s)
    tried, limit_s = state.turn - times.since_turn, terms.config.deadlines.retry_s
    if max(now_s - (times.since_s or 0.0), _log_s(terms, tried)) < limit_s:
        return state
    failure = (
        f"round {state.round} left nothing to fold for {limit_s:g} s, in {tried} tries "
        f"({waits_for}); give the devices what they lack and start the server again, or raise deadlines.retry_s"
    )
    return state.failed(failure, now_s)


def _failing(before: Mapping[str, Failing], seats: Mapping[str, Seat]) -> Mapping[str, Failing]:
    """The clients that fail in every attempt, after one more."""
    found = {name: one for name, seat in seats.items() if (one := _failing_still(before.get(name), seat)) is not None}
    return MappingProxyType(dict(sorted(found.items()))) if found or before else before


def _failing_still(before: Failing | None, seat: Seat) -> Failing | None:
    if seat.reason == NOT_DRAWN:  # nothing was learned of it
        return before
    if seat.lasts == "passing" or seat.stage not in ("refused", "skipped"):
        return None
    reason = f"{seat.stage}: {seat.reason}"
    if before is None or (seat.lasts == "unclear" and before.last != reason):
        return Failing(times=1, first=reason, last=reason)
    return replace(before, times=before.times + 1, last=reason)


def _is_certain(terms: Terms, state: RunState, now_s: float) -> bool:
    """Whether nothing is to be expected of any device that is there."""
    seated = (name for name, seat in state.seats.items() if seat.stage != "missing")
    there, failing = {*expected(terms, state, now_s), *seated}, state.tries.failing
    over = all(name in failing and failing[name].times >= _MOST_ATTEMPTS for name in there)
    return over and len(there) >= terms.config.min_clients


def what_is_lacking(seats: Mapping[str, Seat]) -> str:
    """Who did not take part and why, in words: most of them first, and never long."""
    return _grouped(_why(seats))


def _why(seats: Mapping[str, Seat]) -> dict[str, str]:
    return {name: f"{seat.stage}: {seat.reason}" for name, seat in seats.items() if seat.stage != "done"}


def _grouped(why: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for name, text in sorted(why.items()):
        groups.setdefault(text[:_MOST_CHARACTERS], []).append(name)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group))
    told = [f"{_names(names)} {text}" for text, names in ordered[:_MOST_REASONS]]
    more = sum(len(names) for _, names in ordered[_MOST_REASONS:])
    return "; ".join([*told, *([f"{more} more for other reasons"] if more else [])])


def _names(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _pause_s(terms: Terms, state: RunState) -> float:
    deadlines = terms.config.deadlines
    waited_for = (seat for seat in state.seats.values() if not seat.reason.startswith(SILENT_SINCE))
    if _log_s(terms, 1) > 0 and all(seat.stage == "skipped" for seat in waited_for):
        return 0.0
    return float(min(deadlines.pause_s * 2 ** min(state.tries.retry, _MOST_DOUBLINGS), deadlines.longest_pause_s))


def _log_s(terms: Terms, turns: int) -> float:
    return 0.0 if terms.config.clock is None else turns * terms.config.clock.step_s


def over(terms: Terms, state: RunState) -> bool:
    """Whether no further round begins."""
    return state.folded_round >= terms.config.total_rounds or bool(why_early(terms, state))


def taken_up(terms: Terms, state: RunState) -> RunState:
    """The stored state of a run that somebody starts again.

    What failed is tried, what has more rounds goes on, and a generation that devices were scoring is scored anew.
    """
    if isinstance(state.at, Failed):
        tries = replace(state.tries, failing=MappingProxyType({}))
        return replace(state, at=Waiting(), tries=tries)
    if isinstance(state.at, Searching):
        return replace(state, seats=MappingProxyType({}))
    if state.phase in ("deploy", "finished") and not over(terms, state):
        return replace(state, at=Waiting(), seats=MappingProxyType({}))
    return state


def why_early(terms: Terms, state: RunState) -> str:
    """Why a run is over before its last round; empty where it is not.

    A run whose norms are measured in its last round is not left without them, and goes on to its end.
    """
    config = terms.config
    if not 0 < state.folded_round < config.total_rounds or config.calibrates(config.total_rounds):
        return ""
    return terms.roles.memory.stop(remembered(terms, state))
