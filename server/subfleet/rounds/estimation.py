"""The estimated costs of submodels: by the run context, or by the planner's estimates in the state. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import TargetEstimates
from subfleet.rounds.networks import list_living_lineages
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CostRequest
from subfleet.search.candidates import Candidate, order_candidates
from subfleet.search.estimates import Estimates, estimate_by_plans
from subfleet.search.query import CostEstimates


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfEach:
    """A `CostEstimates` of several networks."""

    estimates: Mapping[str, Estimates]

    def __call__(self, architecture: Architecture) -> Candidate:
        """The cost of a submodel, by the estimates of its network."""
        return self.estimates[architecture.network](architecture)


def request_estimates(context: RunContext, state: RunState, target: str) -> tuple[CostRequest, ...]:
    """Request the cost estimates that sizes for a target are chosen by; nothing if all are known."""
    if not context.roles.assigner.planned_estimates:
        return ()
    wanted = (_request(target, lineage) for lineage in list_living_lineages(context, state))
    return tuple(one for one in wanted if one.key not in state.live.estimates)


def has_estimates(context: RunContext, state: RunState, target: str) -> bool:
    """Whether the cost estimates of a target are known."""
    return not request_estimates(context, state, target)


def get_estimates(context: RunContext, state: RunState, target: str) -> CostEstimates:
    """The cost of any size on a target with known estimates."""
    found = {one.id: _get_estimates(context, state, one, target) for one in list_living_lineages(context, state)}
    return next(iter(found.values())) if len(found) == 1 else _OfEach(estimates=MappingProxyType(found))


def list_candidates(context: RunContext, state: RunState, target: str) -> Sequence[Candidate]:
    """The method's space, from smallest to largest, with its costs on a target with known estimates."""
    found = [_list_candidates(context, state, one, target) for one in list_living_lineages(context, state)]
    return found[0] if len(found) == 1 else order_candidates([one for of_network in found for one in of_network])


def build_target_estimates(
    context: RunContext, request: CostRequest, memory: MemoryEstimates | None, problem: str = ""
) -> TargetEstimates:
    """The estimates of a network on a target; without memory estimates, the target can train nothing."""
    estimate = _plan_estimates(context, request.lineage, request.target, memory)
    candidates = tuple(map(estimate, context.declared(request.lineage).space))
    return TargetEstimates(memory=memory, candidates=candidates, problem=problem)


def _request(target: str, lineage: Lineage) -> CostRequest:
    return CostRequest(target=target, lineage=lineage if lineage.id else None)


def _get_estimates(context: RunContext, state: RunState, lineage: Lineage, target: str) -> Estimates:
    if not context.roles.assigner.planned_estimates:
        return context.declared(lineage).estimate
    return _plan_estimates(context, lineage, target, state.live.estimates[_request(target, lineage).key].memory)


def _list_candidates(context: RunContext, state: RunState, lineage: Lineage, target: str) -> tuple[Candidate, ...]:
    if not context.roles.assigner.planned_estimates:
        return context.declared(lineage).candidates
    return state.live.estimates[_request(target, lineage).key].candidates


def _plan_estimates(
    context: RunContext, lineage: Lineage | None, target: str, memory: MemoryEstimates | None
) -> Estimates:
    declared = context.declared(lineage)
    return replace(declared.estimate, memory=estimate_by_plans(declared.network, target, memory))
