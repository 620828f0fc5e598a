"""A search between two rounds for paths of a supernet, a generation at a time. Pure.

    waiting --> search     a round was folded, and the method has something to search for
    search  --> search     a generation was proposed and scored, and is remembered
    search  --> waiting    nothing is left to propose: what was found are the networks of the run from now on
    search  --> failed     a generation cannot be scored

Generations are proposed and scored beside the loop, and each is in the journal before the next is asked for: a run that
was killed goes on behind the last one.
"""

from dataclasses import replace

from subfleet.elastic.lineage import Lineage
from subfleet.methods.path_search import ScoredGeneration
from subfleet.rounds.actions import Action, CloseGeneration, Request
from subfleet.rounds.networks import all_lineages, lineages_in_use, with_lineages
from subfleet.rounds.requests import GenerationMade, GenerationWanted
from subfleet.rounds.state import RunState, remembered
from subfleet.rounds.terms import Terms

__all__ = ["generation_failed", "generation_made", "generation_wanted", "search_due", "searching"]

Outcome = tuple[RunState, tuple[Action, ...]]


def search_due(terms: Terms, state: RunState) -> bool:
    """Whether a search comes before anything else: after it the supernet has retired, and there is none to search."""
    search = terms.policies.path_search
    if search is None or not state.folded_round or _supernet(terms, state) is None:
        return False
    return search.due(remembered(terms, state), state.folded_round)


def searching(terms: Terms, state: RunState) -> Outcome:
    """Ask for the next generation, unless it is being made."""
    wanted = generation_wanted(state)
    if wanted in state.asked:
        return state, ()
    return replace(state, asked=state.asked | {wanted}), (Request(wanted=wanted),)


def generation_wanted(state: RunState) -> GenerationWanted:
    """The next generation, by its number."""
    return GenerationWanted(round=state.folded_round, number=state.generations + 1)


def generation_made(terms: Terms, state: RunState, made: GenerationMade, now_s: float) -> Outcome:
    """Remember a generation's scores; or end the search, where there was nothing left to propose."""
    state = replace(state, asked=state.asked - {made.wanted})
    search = terms.policies.path_search
    if state.phase != "search" or made.wanted != generation_wanted(state) or search is None:
        return state, ()
    if made.generation is None:
        found = _with_found(terms, state)
        return replace(found, phase="waiting", entered_s=now_s, generations=0), ()
    memory = search.scored(remembered(terms, state), ScoredGeneration(generation=made.generation, scores=made.scores))
    close = CloseGeneration(
        round=state.folded_round,
        generation=made.generation,
        scores=made.scores,
        seconds=now_s - state.entered_s,
    )
    return replace(state, memory=memory, generations=made.wanted.number, entered_s=now_s), (close,)


def generation_failed(state: RunState, wanted: GenerationWanted, reason: str, now_s: float) -> RunState:
    """A search that cannot go on ends the run: its networks would be chosen by nothing."""
    state = replace(state, asked=state.asked - {wanted})
    if state.phase != "search" or wanted != generation_wanted(state):
        return state
    failure = f"generation {wanted.number} of the search after round {wanted.round} cannot be scored: {reason}"
    return replace(state, phase="failed", entered_s=now_s, failure=failure)


def _supernet(terms: Terms, state: RunState) -> Lineage | None:
    """The lineage of the network in use that has choices of operators; None where there is none."""
    living = lineages_in_use(terms, state)
    return next((one for one in living if terms.declared(one).network.choices), None)


def _with_found(terms: Terms, state: RunState) -> RunState:
    """The state in which the supernet has retired, and the networks that were found are in use.

    Raises:
        ValueError: the method has found none, or some that do not come from the supernet: a mistake of the method's.
    """
    supernet, search = _supernet(terms, state), terms.policies.path_search
    if supernet is None or search is None:
        raise ValueError("a search has ended of a run that has no supernet")
    network = terms.declared(supernet).network
    found = tuple(search.found(remembered(terms, state), network, state.folded_round))
    odd = [one.id for one in found if (one.parent, one.born_round) != (network.id, state.folded_round)]
    if not found or odd:
        raise ValueError(f"a search has found the networks {odd}, but must find some of network {network.id!r}")
    before = (
        replace(one, retired_round=state.folded_round) if one.id == network.id else one
        for one in all_lineages(terms, state.lineages)
    )
    return with_lineages(terms, state, (*before, *found))
