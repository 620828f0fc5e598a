"""Whom the server remembers: who took part; and for a while, and up to a number, those it only heard of. Pure."""

import math
from collections.abc import Iterator
from dataclasses import replace

from subfleet.protocol.messages import Profile
from subfleet.rounds.state import Member, RunState, Swept
from subfleet.rounds.terms import Terms

__all__ = ["MOST_STRANGERS", "SILENT_SINCE", "expected", "holds_lease", "silent_members", "without_strangers"]

MOST_STRANGERS = 16_384
"""Clients that never took part; beyond them those go first that were silent for the longest."""
MOST_VALUES = 4_000_000
"""In the profiles of all of them together."""
MOST_OF_SPEC = 1000
"""What a declared architecture counts for."""
SILENT_SINCE = "it has been silent since round"
"""Why a client is missing that a round has not waited for; the round follows."""


def holds_lease(terms: Terms, member: Member, now_s: float) -> bool:
    """Whether a client has given a sign of life not long ago."""
    return member.heard_s is not None and now_s - member.heard_s <= terms.config.deadlines.lease_s


def expected(terms: Terms, state: RunState, now_s: float) -> Iterator[str]:
    """The clients that are waited for, in no order.

    Whoever holds its lease; in a strict run everyone who ever spoke in this run: a client that was killed and comes
    back takes part as if nothing had happened. Who let a deadline pass without a word is not waited for until it is
    heard again; the rounds that it misses count against participation all the same.
    """
    strict = terms.config.strict
    for name, member in state.members.items():
        if member.profile is not None and not member.silent_since and (strict or holds_lease(terms, member, now_s)):
            yield name


def silent_members(state: RunState) -> tuple[str, ...]:
    """The clients that belong to the run, have not said that they go, and have no seat in the open round.

    Whoever spoke to this server belongs to it, and whoever took part before; a profile alone makes nobody one of them.
    """
    return tuple(
        name
        for name, member in sorted(state.members.items())
        if name not in state.seats
        and member.profile is not None
        and not member.left
        and (member.session_id or name in state.last)
    )


def without_strangers(terms: Terms, state: RunState, now_s: float) -> RunState:
    """The state without those that never took part and are silent, or are too many.

    A client that is forgotten and comes back is as new as it was the first time. Members are looked through where one
    may have to go: some are new, or who has a seat has changed, or one may have been silent for too long.
    """
    if now_s <= state.swept.until_s and state.swept.seats == (state.turn, state.phase):
        return state
    deadlines = terms.config.deadlines

    def expires_s(member: Member) -> float:
        return member.noted_s + (deadlines.forget_s if member.profile is not None else deadlines.lease_s)

    def silent(member: Member) -> bool:
        return now_s > expires_s(member)

    # That a client is missing is no part in the round.
    seated = {name for name, seat in state.seats.items() if seat.stage != "missing"}
    strangers = {
        name: member for name, member in state.members.items() if name not in state.last and name not in seated
    }
    gone = {name for name, member in strangers.items() if silent(member)}
    count = len(strangers) - len(gone)
    values = sum(_values(member.profile) for name, member in strangers.items() if name not in gone)
    if count > MOST_STRANGERS or values > MOST_VALUES:
        for name, member in sorted(strangers.items(), key=lambda one: (one[1].noted_s, one[0])):
            if count <= MOST_STRANGERS and values <= MOST_VALUES:
                break
            if name not in gone:
                gone.add(name)
                count, values = count - 1, values - _values(member.profile)
    members = state.members.without(gone)
    until_s = min((expires_s(member) for name, member in members.items() if name not in state.last), default=math.inf)
    return replace(state, members=members, swept=Swept(until_s=until_s, seats=(state.turn, state.phase)))


def _values(profile: Profile | None) -> int:
    if profile is None:
        return 0
    values = len(profile.class_counts) + len(profile.operators) + len(profile.software)
    return values + (MOST_OF_SPEC if profile.architecture is not None else 0)
