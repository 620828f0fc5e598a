"""A round's clients get their sizes: a few in each step, once what is needed to choose was made. Pure.

All have the same to choose from, whoever comes first: what the search finds is there before anyone is given anything,
and a program that is written meanwhile counts from the next round on.
"""

from collections.abc import Iterable
from dataclasses import replace
from heapq import nsmallest
from types import MappingProxyType

from subfleet.rounds.actions import Action, GoOn
from subfleet.rounds.live import Requested
from subfleet.rounds.pricing import prices_wanted
from subfleet.rounds.proposing import proposed_seat
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import CostRequest, ProgramRequest, SearchRequest
from subfleet.search.queue import most_wanted

__all__ = ["AT_ONCE", "asking", "lacking", "sized"]

AT_ONCE = 4
"""Clients that are given a size in one step: each takes milliseconds where hundreds of programs are written."""

Outcome = tuple[RunState, tuple[Action, ...]]


def lacking(terms: Terms, state: RunState) -> tuple[CostRequest | SearchRequest, ...]:
    """What is to be made next before sizes can be chosen for the round's clients; nothing where all is there."""
    search = terms.roles.assigner.search
    if search is None:
        return ()
    targets = {seat.offer.runtime for seat in state.seats.values() if seat.stage not in ("skipped", "missing")}
    unpriced = [wanted for target in sorted(targets) for wanted in prices_wanted(terms, state, target)]
    if unpriced or not targets:
        return tuple(unpriced)
    found = state.explored_turn == state.turn and targets <= state.live.searches.keys()
    return () if found else (SearchRequest(turn=state.turn),)


def asking(state: RunState, wanted: Iterable[Requested]) -> Outcome:
    """Ask for what is not being made already."""
    new = tuple(one for one in wanted if one not in state.live.requested)
    if not new:
        return state, ()
    return replace(state, live=replace(state.live, requested=state.live.requested.union(new))), new


def sized(terms: Terms, state: RunState) -> Outcome:
    """Give sizes to the next of those that have answered, or have candidates proposed to them."""
    count = sum(seat.stage == "answered" for seat in state.seats.values())
    if not count:
        return _with_wishes(terms, state)
    if wanted := lacking(terms, state):
        return asking(state, wanted)
    seats, actions = dict(state.seats), list[Action]()
    for name in nsmallest(AT_ONCE, (name for name, seat in seats.items() if seat.stage == "answered")):
        seats[name], more = proposed_seat(terms, state, seats[name])
        actions += more
    state = replace(state, seats=MappingProxyType(seats))
    if count > AT_ONCE:
        return state, (*actions, GoOn())
    state, last = _with_wishes(terms, state)
    return state, (*actions, *last)


def _with_wishes(terms: Terms, state: RunState) -> Outcome:
    """Begin the programs for later rounds that this one's clients would rather have had, once all have been asked."""
    if state.wished_turn == state.turn:
        return state, ()
    state = replace(state, wished_turn=state.turn)
    if terms.config.calibrates(state.round):
        return state, ()
    wishes = [seat.first_wanted for seat in state.seats.values() if seat.first_wanted is not None]
    known = {*state.written, *(program.key for program in state.queue)}
    new = tuple(wish.program for wish in most_wanted(wishes, known, terms.config.exports_per_round))
    actions = tuple(ProgramRequest(program=one, round=state.round) for one in new)
    return replace(state, queue=(*state.queue, *new)), actions
