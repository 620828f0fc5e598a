"""What sizes cost in a run: told by its terms, or by prices in the state that were asked for. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.live import TargetPrices
from subfleet.rounds.networks import lineages_in_use
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import CostRequest
from subfleet.search.candidates import Candidate, ordered
from subfleet.search.prices import Prices, planned_memory
from subfleet.search.query import PriceList

__all__ = ["candidates_of", "has_prices", "prices_of", "prices_wanted", "target_prices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfEach:
    """A `PriceList` of several networks."""

    prices: Mapping[str, Prices]

    def __call__(self, spec: SubnetSpec) -> Candidate:
        """What a subnet costs, by the prices of its own network."""
        return self.prices[spec.network](spec)


def prices_wanted(terms: Terms, state: RunState, target: str) -> tuple[CostRequest, ...]:
    """The prices that are lacking before sizes can be chosen for a target: those of every network in use."""
    if not terms.roles.assigner.planned_prices:
        return ()
    wanted = (_wanted(target, lineage) for lineage in lineages_in_use(terms, state))
    return tuple(one for one in wanted if one.key not in state.live.prices)


def has_prices(terms: Terms, state: RunState, target: str) -> bool:
    """Whether prices are there, for a target on which sizes are to be chosen."""
    return not prices_wanted(terms, state, target)


def prices_of(terms: Terms, state: RunState, target: str) -> PriceList:
    """What any size costs on a target that has prices."""
    found = {one.id: _prices(terms, state, one, target) for one in lineages_in_use(terms, state)}
    return next(iter(found.values())) if len(found) == 1 else _OfEach(prices=MappingProxyType(found))


def candidates_of(terms: Terms, state: RunState, target: str) -> Sequence[Candidate]:
    """The method's space, from smallest to largest, with its costs on a target that has prices."""
    found = [_candidates(terms, state, one, target) for one in lineages_in_use(terms, state)]
    return found[0] if len(found) == 1 else ordered([one for of_network in found for one in of_network])


def target_prices(terms: Terms, wanted: CostRequest, memory: MemoryPrices | None, problem: str = "") -> TargetPrices:
    """What prices of a network on a target come to; without any, nothing can be trained there."""
    price, space = _planned(terms, wanted.lineage, wanted.target, memory), terms.declared(wanted.lineage).space
    return TargetPrices(memory=memory, candidates=tuple(map(price, space)), problem=problem)


def _wanted(target: str, lineage: Lineage) -> CostRequest:
    return CostRequest(target=target, lineage=lineage if lineage.id else None)


def _prices(terms: Terms, state: RunState, lineage: Lineage, target: str) -> Prices:
    if not terms.roles.assigner.planned_prices:
        return terms.declared(lineage).price
    return _planned(terms, lineage, target, state.live.prices[_wanted(target, lineage).key].memory)


def _candidates(terms: Terms, state: RunState, lineage: Lineage, target: str) -> tuple[Candidate, ...]:
    if not terms.roles.assigner.planned_prices:
        return terms.declared(lineage).candidates
    return state.live.prices[_wanted(target, lineage).key].candidates


def _planned(terms: Terms, lineage: Lineage | None, target: str, memory: MemoryPrices | None) -> Prices:
    declared = terms.declared(lineage)
    return replace(declared.price, memory=planned_memory(declared.network, target, memory))
