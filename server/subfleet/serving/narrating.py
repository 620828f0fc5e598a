"""What people are told while a run goes on: sentences on what a step has changed. Pure."""

from collections.abc import Iterator

from subfleet.rounds.awaiting import waits_told
from subfleet.rounds.continuing import why_early
from subfleet.rounds.live import Member
from subfleet.rounds.networks import networks_told, readiness_told
from subfleet.rounds.offers import peers_told, scale_warning
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms

__all__ = ["told"]


def told(terms: Terms, before: RunState, after: RunState) -> Iterator[str]:
    """The sentences that a step is worth, in order."""
    yield from _data_told(terms, before, after)
    if after.tries.lost != before.tries.lost:
        tries, pause_s = after.tries, after.live.retries.pause_s
        pause = f"in {pause_s:g} s" if pause_s else "at once"
        again = "" if after.phase == "failed" else f"; it is tried again {pause}"
        yield f"round {before.round} left nothing to fold ({tries.waits_for}){again}"
    for name, excluded in after.suspicion.excluded.items():
        if before.suspicion.excluded.get(name) != excluded:
            yield f"client {name} is {excluded.reason}"
    yield from _outliers_told(before, after)
    yield from networks_told(before.lineages, after.lineages)
    yield from readiness_told(terms, before, after)
    if after.folded_round != before.folded_round and (why := why_early(terms, after)):
        yield f"the run ends after round {after.folded_round} of {terms.config.total_rounds}: {why}"
    if after.phase == "deploy" != before.phase:
        yield "the last round is done; each device's own model is exported and sent"


def _data_told(terms: Terms, before: RunState, after: RunState) -> Iterator[str]:
    """Who has joined, for whom nobody waits any more, and whether a client's inputs go together with all others."""
    for name in after.live.members.changed(before.live.members):
        was, now = before.live.members.get(name, Member()), after.live.members[name]
        yield from (f"client {name} {words}" for words in waits_told(was, now))
    for name in after.profiles.changed(before.profiles):
        known, profile = before.profiles.get(name), after.profiles[name]
        if profile == known:
            continue
        if known is None:
            runtimes = ", ".join(profile.runtimes)
            yield f"client {name} joined: {profile.device}, {runtimes}, {profile.sample_count} samples"
        if warning := scale_warning(terms, profile):
            yield f"client {name}: {warning}"
    if after.phase == "train" != before.phase and after.round == 1 and not after.retry:
        yield from peers_told(terms, {name: after.profiles[name] for name in after.seats if name in after.profiles})


def _outliers_told(before: RunState, after: RunState) -> Iterator[str]:
    """Updates that count, but are unlike the others, when a round's are folded."""
    if after.phase != "fold" or before.phase == "fold":
        return
    for name, seat in sorted(after.seats.items()):
        if seat.stage == "done" and seat.outlier:
            treated = "counts as it is" if seat.scale == 1 else f"is scaled by {seat.scale:.3g}"
            yield f"the update of client {name} in round {after.round} {treated}: {seat.outlier}"
