"""The clients that the server remembers: participants; others for a limited time and up to a limited number. Pure.

A client is away for a reason, which also decides whether a round waits for it.
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from subfleet.protocol.messages import Presence, Profile
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import FleetMember, Sweep
from subfleet.rounds.state import RunState

MOST_STRANGERS = 16_384
"""Clients that never took part; if there are more, the ones with the longest silence are forgotten first."""
MOST_VALUES = 4_000_000
"""Values in the profiles of all of them together."""
MOST_OF_ARCHITECTURE = 1000
"""Values that a declared architecture counts as."""
SILENT_SINCE = "it has been silent since round"
"""Why a client that the round has not waited for is missing; a round number follows."""


def holds_lease(context: RunContext, member: FleetMember, now_s: float) -> bool:
    """Whether the last sign of life of a client is recent."""
    return member.heard_s is not None and now_s - member.heard_s <= context.config.deadlines.lease_s


def mark_heard(member: FleetMember, session_id: str, now_s: float) -> FleetMember:
    """The member after a sign of life."""
    return replace(
        member, session_id=session_id, heard_s=now_s, departure="", farewell="", silent_since=0, noted_s=now_s
    )


def with_members(state: RunState, members: Mapping[str, FleetMember]) -> RunState:
    """The state with these members added or replaced."""
    live = state.live
    swept = live.swept if all(name in live.members for name in members) else Sweep()  # there may be too many of them
    return replace(state, live=replace(live, members=live.members.with_items(members), swept=swept))


def record_departure(member: FleetMember, presence: Presence, now_s: float) -> FleetMember:
    """The member after its goodbye or will; a will after a goodbye changes nothing."""
    farewell = presence.reason or member.farewell
    departure: Literal["goodbye", "will"] = "goodbye" if farewell else "will"
    return replace(member, heard_s=None, departure=departure, farewell=farewell, noted_s=now_s)


def has_left(context: RunContext, member: FleetMember, now_s: float) -> bool:
    """Whether a client has said goodbye, and the run does not wait for it.

    In a strict run it has the time of a lease to come back: a client that restarts takes part as before. A will is only
    a hint and ends nothing.
    """
    if member.departure != "goodbye":
        return False
    grace_s = context.config.deadlines.lease_s if context.config.strict else 0.0
    return now_s - member.noted_s >= grace_s


def explain_away(context: RunContext, member: FleetMember, now_s: float) -> str:
    """Why a client is away; empty if it is present."""
    if member.departure == "goodbye":
        return f"it said goodbye ({member.farewell})"
    if member.departure == "will":
        return "the broker reported a broken connection (its will)"
    if member.heard_s is None:
        return "it has not been heard since the server started"
    if holds_lease(context, member, now_s):
        return ""
    return f"no heartbeat for {now_s - member.heard_s:.0f} s"


def list_expected(context: RunContext, state: RunState, now_s: float, answered: Container[str] = ()) -> Iterator[str]:
    """The clients that the run waits for, in no order, without those that have answered.

    These are the clients with a lease; in a strict run all that were ever heard, since a client that was killed and
    restarts takes part as before. The run does not wait for clients that have left, see `has_left`, nor for those that
    were silent until a deadline, until they are heard again; the rounds that they miss count against participation.
    """
    strict = context.config.strict
    for name, member in state.live.members.items():
        if name in answered or member.silent_since or has_left(context, member, now_s):
            continue
        if (strict or holds_lease(context, member, now_s)) and name in state.profiles:
            yield name


def list_silent_members(state: RunState, answered: Container[str]) -> tuple[str, ...]:
    """The clients of the run that have not left and have not answered in the open round.

    A client belongs to the run if it was heard by this server or took part before; a profile alone is not enough.
    """
    return tuple(
        sorted(
            name
            for name, member in state.live.members.items()
            if name not in answered
            and name in state.profiles
            and not member.departure
            and (member.session_id or name in state.last)
        )
    )


def forget_strangers(context: RunContext, state: RunState, now_s: float) -> RunState:
    """Forget clients that never took part, if they are silent for too long or too many.

    A forgotten client that comes back is new. Members are checked only when one may have to be forgotten: if members
    are new, one may have been silent for too long, or client states have changed and there are too many.
    """
    live, profiles, swept = state.live, state.profiles, state.live.swept
    same = swept.clients == (state.run_attempt, state.phase)
    if now_s <= swept.until_s and (same or not swept.crowded):
        return state
    deadlines = context.config.deadlines

    def expires_s(name: str) -> float:
        return live.members[name].noted_s + (deadlines.forget_s if name in profiles else deadlines.lease_s)

    # A client that is missing has no part in the round.
    assigned = {name for name, client in state.clients.items() if client.stage != "missing"}.union(*state.idle.values())
    unknown = {name: member for name, member in live.members.items() if name not in state.last}
    strangers = {name: member for name, member in unknown.items() if name not in assigned}
    forgotten = {name for name in strangers if now_s > expires_s(name)}
    count = len(strangers) - len(forgotten)
    values = sum(_count_values(profiles.get(name)) for name in strangers if name not in forgotten)
    if count > MOST_STRANGERS or values > MOST_VALUES:
        for name in sorted(strangers, key=lambda name: (strangers[name].noted_s, name)):
            if count <= MOST_STRANGERS and values <= MOST_VALUES:
                break
            if name not in forgotten:
                forgotten.add(name)
                count, values = count - 1, values - _count_values(profiles.get(name))
    members, left = live.members.without(forgotten), unknown.keys() - forgotten
    until_s = min(map(expires_s, left), default=math.inf)
    crowded = len(left) > MOST_STRANGERS or sum(_count_values(profiles.get(name)) for name in left) > MOST_VALUES
    swept = Sweep(until_s=until_s, crowded=crowded, clients=(state.run_attempt, state.phase))
    return replace(state, profiles=profiles.without(forgotten), live=replace(live, members=members, swept=swept))


def _count_values(profile: Profile | None) -> int:
    if profile is None:
        return 0
    values = len(profile.class_counts) + len(profile.operators) + len(profile.software)
    return values + (MOST_OF_ARCHITECTURE if profile.architecture is not None else 0)
