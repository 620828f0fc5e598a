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
from subfleet.rounds.assigning import ask_of
from subfleet.rounds.context import RunContext
from subfleet.rounds.estimation import estimates_of, estimates_wanted
from subfleet.rounds.live import Requested
from subfleet.rounds.proposing import proposed_client
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CostRequest, ProgramRequest, SearchRequest, SearchResult
from subfleet.search.query import CostEstimates, FoundSize, Search
from subfleet.search.queue import rank_requested

__all__ = ["AT_ONCE", "asking", "explored", "lacking", "sized"]

AT_ONCE = 4
"""Clients that are given a size in one step: each takes milliseconds where hundreds of programs are written."""

Outcome = tuple[RunState, tuple[Action, ...]]


def lacking(context: RunContext, state: RunState) -> tuple[CostRequest | SearchRequest, ...]:
    """What is to be made next before sizes can be chosen for the round's clients; nothing where all is there."""
    search = context.roles.assigner.search
    if search is None:
        return ()
    targets = {client.offer.runtime for client in state.clients.values() if client.stage not in ("skipped", "missing")}
    unpriced = [wanted for target in sorted(targets) for wanted in estimates_wanted(context, state, target)]
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


def sized(context: RunContext, state: RunState) -> Outcome:
    """Give sizes to the next of those that have answered, or have candidates proposed to them."""
    count = sum(client.stage == "answered" for client in state.clients.values())
    if not count:
        return _with_requested_programs(context, state)
    if wanted := lacking(context, state):
        return asking(state, wanted)
    clients, actions = dict(state.clients), list[Action]()
    for name in nsmallest(AT_ONCE, (name for name, client in clients.items() if client.stage == "answered")):
        clients[name], more = proposed_client(context, state, clients[name])
        actions += more
    state = replace(state, clients=MappingProxyType(clients))
    if count > AT_ONCE:
        return state, (*actions, GoOn())
    state, last = _with_requested_programs(context, state)
    return state, (*actions, *last)


def _with_requested_programs(context: RunContext, state: RunState) -> Outcome:
    """Begin the programs for later rounds that this one's clients would rather have had, once all have been asked."""
    if state.requested_turn == state.turn:
        return state, ()
    state = replace(state, requested_turn=state.turn)
    if context.config.calibrates(state.round):
        return state, ()
    requested_programs = [client.first_wanted for client in state.clients.values() if client.first_wanted is not None]
    known = {*state.written, *(program.key for program in state.queue)}
    new = tuple(
        requested_program.program
        for requested_program in rank_requested(requested_programs, known, context.config.exports_per_round)
    )
    actions = tuple(ProgramRequest(program=one, round=state.round) for one in new)
    return replace(state, queue=(*state.queue, *new)), actions


_KEPT = 2**15
"""Cost estimates that are kept for one look: a search asks for the neighbours of what it knows again and again."""


def explored(context: RunContext, state: RunState) -> SearchResult:
    """Look for sizes for all clients that are to be given one; or, where that was done, know again what was found.

    Args:
        context: of the run.
        state: with the cost estimates of all their targets.
    """
    explore = _search_of_method(context).explore
    clients = [client for _, client in sorted(state.clients.items()) if client.stage not in ("skipped", "missing")]
    estimates = {
        target: estimates_of(context, state, target) for target in sorted({client.offer.runtime for client in clients})
    }
    # Remembered while this look lasts: a search that is handed back keeps nothing of it.
    recalled: dict[str, CostEstimates] = {
        target: lru_cache(maxsize=_KEPT)(estimate) for target, estimate in estimates.items()
    }
    searches = {
        target: _search_of(context, state, target).with_estimates(estimate) for target, estimate in recalled.items()
    }
    new: list[FoundSize] = []
    pool = dict.fromkeys(state.pool)
    for client in clients:
        if client.stage != "answered" or client.offer.budget is None or state.explored_turn == state.turn:
            continue
        target = client.offer.runtime
        ask = replace(ask_of(context, state, client, search=searches[target]), estimate=recalled[target])
        found = [one for one in dict.fromkeys(explore(ask)) if one not in pool]
        pool |= dict.fromkeys(found)
        new += found
        searches = {target: search.learn(found) for target, search in searches.items()}
    handed = {target: search.with_estimates(estimates[target]) for target, search in searches.items()}
    written = (one.program for key, one in state.written.items() if key not in state.live.written_estimates)
    unpriced = (program for program in written if program.target in estimates)
    return SearchResult(
        found=tuple(new),
        searches=MappingProxyType(handed),
        written_estimates=MappingProxyType({one.key: estimates[one.target](one.size) for one in unpriced}),
    )


def _search_of(context: RunContext, state: RunState, target: str) -> Search:
    """The search of a target, with all that was found so far."""
    known = state.live.searches.get(target)  # it has learned the whole pool, which grows here alone
    if known is not None:
        return known
    start = _search_of_method(context).start
    return start(context.network, estimates_of(context, state, target), target).learn(state.pool)


def _search_of_method(context: RunContext) -> SizeSearch:
    if context.roles.assigner.search is None:
        raise ValueError("a search was requested, but the method has none")
    return context.roles.assigner.search
