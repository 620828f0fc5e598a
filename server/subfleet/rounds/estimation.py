"""What submodels cost in a run: by its context, or by the cost estimates in its state. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import TargetEstimates
from subfleet.rounds.networks import lineages_in_use
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CostRequest
from subfleet.search.candidates import Candidate, ordered
from subfleet.search.estimates import Estimates, planned_memory
from subfleet.search.query import CostEstimates


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfEach:
    """A `CostEstimates` of several networks."""

    estimates: Mapping[str, Estimates]

    def __call__(self, architecture: Architecture) -> Candidate:
        """What a submodel costs, by the cost estimates of its own network."""
        return self.estimates[architecture.network](architecture)


def estimates_wanted(context: RunContext, state: RunState, target: str) -> tuple[CostRequest, ...]:
    """The cost estimates that are lacking before sizes can be chosen for a target: those of every network in use."""
    if not context.roles.assigner.planned_estimates:
        return ()
    wanted = (_wanted(target, lineage) for lineage in lineages_in_use(context, state))
    return tuple(one for one in wanted if one.key not in state.live.estimates)


def has_estimates(context: RunContext, state: RunState, target: str) -> bool:
    """Whether cost estimates are there, for a target on which sizes are to be chosen."""
    return not estimates_wanted(context, state, target)


def estimates_of(context: RunContext, state: RunState, target: str) -> CostEstimates:
    """What any size costs on a target that has cost estimates."""
    found = {one.id: _estimates(context, state, one, target) for one in lineages_in_use(context, state)}
    return next(iter(found.values())) if len(found) == 1 else _OfEach(estimates=MappingProxyType(found))


def candidates_of(context: RunContext, state: RunState, target: str) -> Sequence[Candidate]:
    """The method's space, from smallest to largest, with its costs on a target that has cost estimates."""
    found = [_candidates(context, state, one, target) for one in lineages_in_use(context, state)]
    return found[0] if len(found) == 1 else ordered([one for of_network in found for one in of_network])


def target_estimates(
    context: RunContext, wanted: CostRequest, memory: MemoryEstimates | None, problem: str = ""
) -> TargetEstimates:
    """What cost estimates of a network on a target come to; without any, nothing can be trained there."""
    estimate, space = _planned(context, wanted.lineage, wanted.target, memory), context.declared(wanted.lineage).space
    return TargetEstimates(memory=memory, candidates=tuple(map(estimate, space)), problem=problem)


def _wanted(target: str, lineage: Lineage) -> CostRequest:
    return CostRequest(target=target, lineage=lineage if lineage.id else None)


def _estimates(context: RunContext, state: RunState, lineage: Lineage, target: str) -> Estimates:
    if not context.roles.assigner.planned_estimates:
        return context.declared(lineage).estimate
    return _planned(context, lineage, target, state.live.estimates[_wanted(target, lineage).key].memory)


def _candidates(context: RunContext, state: RunState, lineage: Lineage, target: str) -> tuple[Candidate, ...]:
    if not context.roles.assigner.planned_estimates:
        return context.declared(lineage).candidates
    return state.live.estimates[_wanted(target, lineage).key].candidates


def _planned(context: RunContext, lineage: Lineage | None, target: str, memory: MemoryEstimates | None) -> Estimates:
    declared = context.declared(lineage)
    return replace(declared.estimate, memory=planned_memory(declared.network, target, memory))
