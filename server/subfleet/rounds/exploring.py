"""What a method's search comes by for a round: seconds of arithmetic, made beside the loop from a state. Pure.

All look before any is given anything: what is found for one serves all others, whatever their names.
"""

from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from subfleet.methods.assigner import SizeSearch
from subfleet.rounds.pricing import prices_of
from subfleet.rounds.seating import ask_of
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import SearchResult
from subfleet.search.query import FoundSize, PriceList, Search

__all__ = ["explored"]

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
