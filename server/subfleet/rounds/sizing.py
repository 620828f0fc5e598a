"""A round's clients get their sizes: a few in each step, once what is needed to choose was made. Pure.

All have the same to choose from, whoever comes first: the search looks for all before any is given anything (seconds of
arithmetic, made beside the loop from a state), and a program that is written meanwhile counts from the next round on.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from heapq import nsmallest
from types import MappingProxyType

from subfleet.methods.assigner import SizeSearch
from subfleet.rounds.actions import Action, GoOn
from subfleet.rounds.live import Requested
from subfleet.rounds.pricing import prices_of, prices_wanted
from subfleet.rounds.proposing import proposed_seat
from subfleet.rounds.seating import ask_of
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import CostRequest, ProgramRequest, SearchRequest, SearchResult
from subfleet.search.query import FoundSize, PriceList, Search
from subfleet.search.queue import most_wanted

__all__ = ["AT_ONCE", "asking", "explored", "lacking", "sized"]

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


_KEPT = 2**15
"""Prices that are kept for one look: a search asks for the neighbours of what it knows again and again."""


def explored(terms: Terms, state: RunState) -> SearchResult:
    """Look for sizes for all clients that are to be given one; or, where that was done, know again what was found.

    Args:
        terms: of the run.
        state: with the prices of all their targets.
    """
    explore = _search_of_method(terms).explore
    seats = [seat for _, seat in sorted(state.seats.items()) if seat.stage not in ("skipped", "missing")]
    prices = {target: prices_of(terms, state, target) for target in sorted({seat.offer.runtime for seat in seats})}
    # Remembered while this look lasts: a search that is handed back keeps nothing of it.
    recalled: dict[str, PriceList] = {target: lru_cache(maxsize=_KEPT)(price) for target, price in prices.items()}
    searches = {target: _search_of(terms, state, target).priced(price) for target, price in recalled.items()}
    new: list[FoundSize] = []
    pool = dict.fromkeys(state.pool)
    for seat in seats:
        if seat.stage != "answered" or seat.offer.budget is None or state.explored_turn == state.turn:
            continue
        target = seat.offer.runtime
        ask = replace(ask_of(terms, state, seat, search=searches[target]), price=recalled[target])
        found = [one for one in dict.fromkeys(explore(ask)) if one not in pool]
        pool |= dict.fromkeys(found)
        new += found
        searches = {target: search.learned(found) for target, search in searches.items()}
    handed = {target: search.priced(prices[target]) for target, search in searches.items()}
    written = (one.program for key, one in state.written.items() if key not in state.live.written_prices)
    unpriced = (program for program in written if program.target in prices)
    return SearchResult(
        found=tuple(new),
        searches=MappingProxyType(handed),
        written_prices=MappingProxyType({one.key: prices[one.target](one.size) for one in unpriced}),
    )


def _search_of(terms: Terms, state: RunState, target: str) -> Search:
    """The search of a target, with all that was found so far."""
    known = state.live.searches.get(target)  # it has learned the whole pool, which grows here alone
    if known is not None:
        return known
    start = _search_of_method(terms).start
    return start(terms.network, prices_of(terms, state, target), target).learned(state.pool)


def _search_of_method(terms: Terms) -> SizeSearch:
    if terms.roles.assigner.search is None:
        raise ValueError("a search was requested, but the method has none")
    return terms.roles.assigner.search
