"""When a run is over: after its last round, or when its method says so. Pure."""

from dataclasses import replace
from types import MappingProxyType

from subfleet.rounds.progress import Failed, Searching, Waiting
from subfleet.rounds.state import RunState, remembered
from subfleet.rounds.terms import Terms

__all__ = ["over", "taken_up", "why_early"]


def over(terms: Terms, state: RunState) -> bool:
    """Whether no further round begins."""
    return state.folded_round >= terms.config.total_rounds or bool(why_early(terms, state))


def taken_up(terms: Terms, state: RunState) -> RunState:
    """The stored state of a run that somebody starts again.

    What failed is tried, what has more rounds goes on, and a generation that devices were scoring is scored anew.
    """
    if isinstance(state.at, Failed):
        tries = replace(state.tries, failing=MappingProxyType({}))
        return replace(state, at=Waiting(), tries=tries)
    if isinstance(state.at, Searching):
        return replace(state, seats=MappingProxyType({}))
    if state.phase in ("deploy", "finished") and not over(terms, state):
        return replace(state, at=Waiting(), seats=MappingProxyType({}))
    return state


def why_early(terms: Terms, state: RunState) -> str:
    """Why a run is over before its last round; empty where it is not.

    A run whose norms are measured in its last round is not left without them, and goes on to its end.
    """
    config = terms.config
    if not 0 < state.folded_round < config.total_rounds or config.calibrates(config.total_rounds):
        return ""
    return terms.roles.memory.stop(remembered(terms, state))
