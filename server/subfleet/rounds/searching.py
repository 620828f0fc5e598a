"""A search between two rounds for paths of a supernet, a generation at a time. Pure.

    waiting --> search     a round was folded, and the method has something to search for
    search  --> search     a generation was proposed and scored, and is remembered
    search  --> waiting    nothing is left to propose: what was found are the networks of the run from now on
    search  --> failed     a generation cannot be scored, or none of any tier could

A tier whose paths no device can compute is passed over where devices score.

Generations are proposed beside the loop, and scored there or by devices, see `federated_scoring`. Each is in the
journal before the next is asked for: a run that was killed goes on behind the last one.
"""

from dataclasses import replace

from subfleet.elastic.lineage import Lineage
from subfleet.methods.path_search import PathSearch, ScoredGeneration
from subfleet.rounds.actions import Action, CloseGeneration
from subfleet.rounds.federated_scoring import begun_scoring, mean_scores, scored_by_devices
from subfleet.rounds.networks import all_lineages, lineages_in_use, with_lineages
from subfleet.rounds.progress import Searching, Waiting
from subfleet.rounds.sizing import asking
from subfleet.rounds.state import RunState, remembered
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import GenerationRequest, ProposedGeneration

__all__ = ["generation_failed", "generation_made", "generation_wanted", "search_due", "searched_round", "searching"]

Outcome = tuple[RunState, tuple[Action, ...]]
_NOBODY = "no device that can compute its paths has scored them; see that some hold samples out"


def search_due(terms: Terms, state: RunState) -> bool:
    """Whether a search comes before anything else: after it the supernet has retired, and there is none to search."""
    search = terms.roles.networks.path_search
    if search is None or not state.folded_round or _supernet(terms, state) is None:
        return False
    return search.is_due(remembered(terms, state), state.folded_round)


def searching(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """Ask for the next generation, unless it is being made, or devices are scoring it."""
    state, actions = _with_scores(terms, state, now_s)
    wanted = generation_wanted(state)
    if state.phase != "search" or state.live.scores is not None:
        return state, actions
    state, more = asking(state, (wanted,))
    return state, (*actions, *more)


def generation_wanted(state: RunState) -> GenerationRequest:
    """The next generation, by its number."""
    return GenerationRequest(round=state.folded_round, number=state.generations + 1)


def generation_made(
    terms: Terms, state: RunState, request: GenerationRequest, made: ProposedGeneration, now_s: float
) -> Outcome:
    """Remember a generation's scores; or end the search, where there was nothing left to propose."""
    state = state.without_request(request)
    search = terms.roles.networks.path_search
    if state.phase != "search" or request != generation_wanted(state) or search is None:
        return state, ()
    supernet = _supernet(terms, state)
    if made.generation is None:
        found = _with_found(terms, state, search, supernet)
        if found is None:
            return generation_failed(state, request, _NOBODY, now_s), ()
        return found.entered(Waiting(), now_s), ()
    if search.federated is not None and supernet is not None:
        return begun_scoring(state, terms.declared(supernet).network, made, now_s), ()
    close = CloseGeneration(
        round=state.folded_round,
        generation=made.generation,
        scores=made.scores,
        seconds=now_s - state.live.entered_s,
    )
    return _scored(terms, state, search, close, now_s)


def generation_failed(state: RunState, wanted: GenerationRequest, reason: str, now_s: float) -> RunState:
    """A search that cannot go on ends the run: its networks would be chosen by nothing."""
    state = state.without_request(wanted)
    if state.phase != "search" or wanted != generation_wanted(state):
        return state
    failure = f"generation {wanted.number} of the search after round {wanted.round} cannot be scored: {reason}"
    return state.failed(failure, now_s)


def searched_round(terms: Terms, state: RunState) -> int:
    """The round after which a supernet was searched and retired: its checkpoint alone has all paths; 0 for none."""
    retired = (one for one in state.lineages if one.retired_round)
    return max((one.retired_round or 0 for one in retired if terms.declared(one).network.choices), default=0)


def _with_scores(terms: Terms, state: RunState, now_s: float) -> Outcome:
    """The state with what devices have told of a generation; it is remembered when all rounds of scoring are over."""
    search, supernet = terms.roles.networks.path_search, _supernet(terms, state)
    if search is None or search.federated is None or supernet is None:
        return state, ()
    state, actions = scored_by_devices(terms, state, terms.declared(supernet).network, search.federated, now_s)
    told = state.live.scores
    if told is None or told.closed < search.federated.rounds:
        return state, actions
    state, generation = replace(state, live=replace(state.live, scores=None)), told.made.generation
    scores = mean_scores(told) or told.made.scores  # the server's own, where it has any
    if generation is not None and not scores and not told.asked:  # a tier for which there is no device
        memory = search.skip(remembered(terms, state), generation)
        return replace(state, memory=memory).entered(state.at, now_s), actions
    if generation is None or not scores:
        return generation_failed(state, generation_wanted(state), _NOBODY, now_s), actions
    close = CloseGeneration(
        round=state.folded_round, generation=generation, scores=scores, seconds=now_s - told.asked_s, devices=told
    )
    state, more = _scored(terms, state, search, close, now_s)
    return state, (*actions, *more)


def _scored(terms: Terms, state: RunState, search: PathSearch, close: CloseGeneration, now_s: float) -> Outcome:
    scored = ScoredGeneration(generation=close.generation, scores=close.scores)
    memory = search.record(remembered(terms, state), scored)
    at = Searching(generations=close.generation.number)
    return replace(state, memory=memory).entered(at, now_s), (close,)


def _supernet(terms: Terms, state: RunState) -> Lineage | None:
    """The lineage of the network in use that has choices of operators; None where there is none."""
    living = lineages_in_use(terms, state)
    return next((one for one in living if terms.declared(one).network.choices), None)


def _with_found(terms: Terms, state: RunState, search: PathSearch, supernet: Lineage | None) -> RunState | None:
    """The state in which the supernet has retired, and the networks that were found are in use; None without any.

    Raises:
        ValueError: there is no supernet, or the method has found networks that do not come from it: a mistake of ours.
    """
    if supernet is None:
        raise ValueError("a search has ended of a run that has no supernet")
    network = terms.declared(supernet).network
    found = tuple(search.conclude(remembered(terms, state), network, state.folded_round))
    odd = [one.id for one in found if (one.parent, one.born_round) != (network.id, state.folded_round)]
    if odd:
        raise ValueError(f"a search has found the networks {odd}, but must find some of network {network.id!r}")
    if not found:
        return None
    before = (
        replace(one, retired_round=state.folded_round) if one.id == network.id else one
        for one in all_lineages(terms, state.lineages)
    )
    return with_lineages(terms, state, (*before, *found))
