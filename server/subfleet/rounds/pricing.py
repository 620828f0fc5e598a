"""What sizes cost in a run: told by its terms, or by prices in the state that were asked for. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.rounds.state import RunState, TargetPrices, Terms
from subfleet.search.candidates import Candidate
from subfleet.search.prices import Prices, planned_memory

__all__ = ["candidates_of", "has_prices", "prices_of", "target_prices"]


def has_prices(terms: Terms, state: RunState, target: str) -> bool:
    """Whether prices are there, for a target on which sizes are to be chosen."""
    return not terms.policies.planned_prices or target in state.prices


def prices_of(terms: Terms, state: RunState, target: str) -> Prices:
    """What any size costs on a target that has prices."""
    if not terms.policies.planned_prices:
        return terms.price
    return _planned(terms, target, state.prices[target].memory)


def candidates_of(terms: Terms, state: RunState, target: str) -> Sequence[Candidate]:
    """The method's space, from smallest to largest, with its costs on a target that has prices."""
    return state.prices[target].candidates if terms.policies.planned_prices else terms.candidates


def target_prices(terms: Terms, target: str, memory: MemoryPrices | None, problem: str = "") -> TargetPrices:
    """What prices of a target come to; without any, nothing can be trained there."""
    price = _planned(terms, target, memory)
    return TargetPrices(memory=memory, candidates=tuple(map(price, terms.space)), problem=problem)


def _planned(terms: Terms, target: str, memory: MemoryPrices | None) -> Prices:
    return replace(terms.price, memory=planned_memory(terms.network, target, memory))
