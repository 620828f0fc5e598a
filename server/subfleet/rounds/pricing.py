"""What sizes cost in a run: told by the plan, or by prices in the state that were asked for. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.rounds.state import Plan, RunState, TargetPrices
from subfleet.search.candidates import Candidate
from subfleet.search.prices import Prices, planned_memory

__all__ = ["candidates_of", "has_prices", "prices_of", "target_prices"]


def has_prices(plan: Plan, state: RunState, target: str) -> bool:
    """Whether prices are there, for a target on which sizes are to be chosen."""
    return not plan.policies.planned_prices or target in state.prices


def prices_of(plan: Plan, state: RunState, target: str) -> Prices:
    """What any size costs on a target that has prices."""
    if not plan.policies.planned_prices:
        return plan.price
    return _planned(plan, target, state.prices[target].memory)


def candidates_of(plan: Plan, state: RunState, target: str) -> Sequence[Candidate]:
    """The method's space, from smallest to largest, with its costs on a target that has prices."""
    return state.prices[target].candidates if plan.policies.planned_prices else plan.candidates


def target_prices(plan: Plan, target: str, memory: MemoryPrices | None, problem: str = "") -> TargetPrices:
    """What prices of a target come to; without any, nothing can be trained there."""
    price = _planned(plan, target, memory)
    return TargetPrices(memory=memory, candidates=tuple(map(price, plan.space)), problem=problem)


def _planned(plan: Plan, target: str, memory: MemoryPrices | None) -> Prices:
    return replace(plan.price, memory=planned_memory(plan.network, target, memory))
