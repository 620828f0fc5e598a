"""Describes a run while it goes on: the changes of a step, its progress, and absent clients."""

import time
from collections.abc import Callable, Iterator, Mapping

from subfleet.journal.journal import AbsenceRecord, Journal
from subfleet.journal.records import Progress
from subfleet.rounds.awaiting import describe_waits, is_unawaited
from subfleet.rounds.closing import explain_early_end
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import FleetMember
from subfleet.rounds.members import Absence, list_absences
from subfleet.rounds.networks import describe_networks, describe_readiness
from subfleet.rounds.offers import compare_peers, find_scale_warning
from subfleet.rounds.state import RunState


def describe_step(context: RunContext, before: RunState, after: RunState) -> Iterator[str]:
    """Sentences about the changes of a step."""
    yield from _describe_data(context, before, after)
    if after.failed_attempts.lost != before.failed_attempts.lost:
        failed_attempts, pause_s = after.failed_attempts, after.live.attempt_times.pause_s
        pause = f"in {pause_s:g} s" if pause_s else "at once"
        again = "" if after.phase == "failed" else f"; it is attempted again {pause}"
        yield f"round {before.round} left nothing to aggregate ({failed_attempts.waits_for}){again}"
    for name, excluded in after.outliers.excluded.items():
        if before.outliers.excluded.get(name) != excluded:
            yield f"client {name} is {excluded.reason}"
    yield from _describe_outliers(before, after)
    yield from describe_networks(before.lineages, after.lineages)
    yield from describe_readiness(context, before, after)
    if after.aggregated_round != before.aggregated_round and (why := explain_early_end(context, after)):
        yield f"the run ends after round {after.aggregated_round} of {context.config.total_rounds}: {why}"
    if after.phase == "deploy" != before.phase:
        yield "the last round is done; each device's own model is exported and sent"


def _describe_data(context: RunContext, before: RunState, after: RunState) -> Iterator[str]:
    """Sentences about clients that joined or are no longer waited for, and about inputs on another scale."""
    for name in after.live.members.changed(before.live.members):
        was, now = before.live.members.get(name, FleetMember()), after.live.members[name]
        yield from (f"client {name} {words}" for words in describe_waits(was, now))
    for name in after.profiles.changed(before.profiles):
        known, profile = before.profiles.get(name), after.profiles[name]
        if profile == known:
            continue
        if known is None:
            runtimes = ", ".join(profile.runtimes)
            yield f"client {name} joined: {profile.device}, {runtimes}, {profile.sample_count} samples"
        if warning := find_scale_warning(context, profile):
            yield f"client {name}: {warning}"
    if after.phase == "train" != before.phase and after.round == 1 and not after.attempt:
        yield from compare_peers(
            context, {name: after.profiles[name] for name in after.clients if name in after.profiles}
        )


def _describe_outliers(before: RunState, after: RunState) -> Iterator[str]:
    """Sentences about outliers that are aggregated all the same, when the aggregation begins."""
    if after.phase != "aggregate" or before.phase == "aggregate":
        return
    for name, client in sorted(after.clients.items()):
        if client.stage == "done" and client.outlier:
            treated = "counts as it is" if client.scale == 1 else f"is scaled by {client.scale:.3g}"
            yield f"the update of client {name} in round {after.round} {treated}: {client.outlier}"


class Pace:
    """Measures the progress of a run, and estimates the remaining time from the rounds that it has seen.

    Args:
        round_count: of the run.
        clock: monotonic seconds.
    """

    def __init__(self, round_count: int, clock: Callable[[], float]) -> None:
        self._round_count = round_count
        self._clock = clock
        self._first: tuple[int, float] | None = None  # the first round whose start was seen, and its time
        self._begins = False  # the last state was before the tasks of a round
        self._round = 0
        self._begun_s = 0.0
        self._position: tuple[int, int, int, tuple[str, ...]] | None = None

    def progress(self, state: RunState, away: tuple[str, ...] = ()) -> Progress | None:
        """The progress of the run; None if it has not changed. `away` describes absent clients without an answer."""
        if state.phase not in ("train", "aggregate") or not state.clients:
            self._begins = True
            return None
        if state.round != self._round:
            self._round, self._begun_s = state.round, self._clock()
            # A resumed run may start in the middle of a round.
            self._first = self._first or ((self._round, self._begun_s) if self._begins else None)
        taking_part = [client for client in state.clients.values() if client.stage not in ("skipped", "missing")]
        answered = sum(not client.open for client in taking_part)
        position = (state.round, answered, len(taking_part), away)
        if position == self._position:
            return None
        self._position = position
        return Progress(
            round=state.round,
            round_count=self._round_count,
            answered=answered,
            devices=len(taking_part),
            left_s=self._estimate_left_s(state.round),
            away=away,
        )

    def _estimate_left_s(self, round_number: int) -> float | None:
        """By the mean time of the rounds seen; None before the first."""
        if self._first is None or round_number == self._first[0]:
            return None
        each_s = (self._begun_s - self._first[1]) / (round_number - self._first[0])
        return max(0.0, each_s * (self._round_count - round_number + 1) - (self._clock() - self._begun_s))


_EVERY_S = 1.0
_REPORTED = ("goodbye", "will", "silent")
"""Kinds of absence that are reported. A client that has not sent anything yet may be there, and a client that refused
a task is there."""


class Attendance:
    """Tracks absent clients, and writes changes to the journal."""

    def __init__(self, context: RunContext, journal: Journal) -> None:
        self._context = context
        self._journal = journal
        self._checked_s = -_EVERY_S
        self._away: Mapping[str, Absence] = {}
        self._saved: frozenset[tuple[str, str]] | None = None

    def check(self, state: RunState, now_s: float) -> Iterator[str]:
        """Sentences about changes since the last call; nothing within a second of it.

        Raises:
            FileError: the journal cannot be written.
        """
        if 0 <= now_s - self._checked_s < _EVERY_S:
            return
        before, self._checked_s = self._away, now_s
        self._away = {absence.client_id: absence for absence in list_absences(self._context, state, now_s)}
        kinds = frozenset((name, absence.kind) for name, absence in self._away.items())
        if kinds == self._saved:
            return
        self._saved = kinds
        self._journal.save_absences(_build_record(absence, now_s) for absence in self._away.values())
        if state.phase in ("finished", "failed"):
            return  # all clients leave
        for name, absence in self._away.items():
            if absence.kind in _REPORTED and (name not in before or before[name].kind != absence.kind):
                yield f"client {name} is away: {absence.reason}"
        for name, absence in before.items():
            if absence.kind in _REPORTED and (name not in self._away or self._away[name].kind not in _REPORTED):
                yield f"client {name} is there again" if name in state.live.members else f"client {name} is forgotten"

    def awaited(self, state: RunState) -> tuple[str, ...]:
        """The absent clients that the round waits for: name, reason and time of the last message."""
        return tuple(
            f"{name}: {absence.describe(self._checked_s)}"
            for name, absence in self._away.items()
            if absence.kind != "refused"
            and name in state.clients
            and state.clients[name].open
            and not is_unawaited(state, name)
        )


def _build_record(absence: Absence, now_s: float) -> AbsenceRecord:
    seen_at = None if absence.seen_s is None else time.time() - (now_s - absence.seen_s)
    return AbsenceRecord(client_id=absence.client_id, kind=absence.kind, reason=absence.reason, seen_at=seen_at)
