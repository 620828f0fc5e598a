"""Dynamic model selection: every device trains the submodel that a search finds for what it can give this round.

Yao et al., "Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection", 2024, section 3.

Client half: train the given submodel with the given objective.
Server half: a search under the device's budgets, over any width of any layer and any set of blocks; a mean over the
clients that hold an element; then, on noise, the whole model teaches submodels of the space that is searched (in-place
distillation). An element that nobody held keeps its bits, where the public code zeroes it.

A submodel becomes a task only with a program. What the search wants and has no program yet is queued, a few each round,
and until it is written the device gets the largest submodel with a program that fits.
"""

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.elastic.teaching import DistillationSettings
from subfleet.methods.aggregator import UNIFORM, Aggregator, Weighting, weigh_by
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, SizeSearch, WrittenSize
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.roles import Roles
from subfleet.methods.techniques import Techniques
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Count, Fraction
from subfleet.search.candidates import Candidate
from subfleet.search.paper import PaperSearch, PaperSettings
from subfleet.search.pareto import ParetoSearch, ParetoSettings
from subfleet.search.query import CostEstimates, FoundSize, Query, Search, fit_of
from subfleet.search.queue import given_now, requested_program_of

__all__ = ["DynamicSelection"]

_POOL = 1024
"""Submodels that a run remembers; its journal holds them all."""


_EVERY_RATE = tuple(step / 16 for step in range(1, 17))
"""Of uniform submodels that are known from the start, where the space has every size."""
_UNSHOWN, _SURE = 1.03, 0.9
"""Plans over cost estimates, before any program is written, and of those that are the share that is no higher than
believed."""
_PUBLISHED = DistillationSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class DynamicSelection:
    """Parameters of dynamic model selection.

    Attributes:
        search: "pareto" is ours, which finds larger submodels for every budget; "paper" the published one.
        rates: ratios of the search space, without the 0 that drops a block; empty takes every size.
        estimates: "planned" estimates submodels by a model of the planner, "estimated" by their shapes, without
            the seconds that the model takes at first and with more that turn out too large.
        epsilon: probability to take what the pool has; 1 never explores.
        t_max: draws beyond which a search ends.
        distillation: after each round; None leaves it out. As printed, with a teacher that moves and a learning rate of
            1e-3, small networks forget what clients learned; the default's teacher stays as it was.
        weighting: "uniform" counts each client as 1, as the public code does; "samples" by its samples.
    """

    TYPE: ClassVar[str] = "dynamic_selection"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Dynamic model selection",
        paper="Yao et al., Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection, 2024",
        varies=("width", "depth"),
        judges=("distillation",),
        published={
            "search": Published(value="paper", told="the search algorithm is ours"),
            "rates": None,
            "estimates": None,
            "epsilon": Published(value=0.8),
            "t_max": Published(value=5),
            "distillation": Published(value=_PUBLISHED, told=None),
            "weighting": UNIFORM,
        },
    )
    search: Literal["pareto", "paper"] = "pareto"
    rates: tuple[Annotated[float, Range(least=0.001, most=1)], ...] = (0.25, 0.5, 0.75, 1.0)
    estimates: Literal["planned", "estimated"] = "planned"
    epsilon: Fraction = 0.8
    t_max: Count = 5
    distillation: DistillationSettings | None = field(
        default_factory=lambda: DistillationSettings(mode="anchored", learning_rate=1e-4)
    )
    weighting: Weighting = "uniform"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        taught = setting.techniques.distillation or self.distillation
        taught = taught if taught is not None and taught.iterations > 0 else None
        return (
            "while a submodel has no training program, the device gets the largest one that has",
            "activations are the network's own, without the paper's ReLU6",
            *those_true({"nothing is distilled": taught is None}),
            *(() if taught is None else _taught_otherwise(taught)),
        )

    def roles(self) -> Roles:
        """A search for each client, and what the whole model teaches."""
        search = SizeSearch(start=self.start, explore=self._explore, planned_estimates=self.estimates == "planned")
        return Roles(
            assigner=Assigner(search=search, assign=self._assign),
            aggregator=Aggregator(
                weigh=weigh_by(self.weighting), taught=lambda network, sizes: search_space(network, self.rates)
            ),
            techniques=Techniques(distillation=self.distillation),
        )

    def start(self, network: Network, estimate: CostEstimates, target: str) -> Search:
        """A search that knows nothing yet."""
        space = search_space(network, self.rates)
        if self.search == "paper":
            return PaperSearch.over(space, estimate, (target,), self._settings())
        uniform = uniform_space(network, self.rates or _EVERY_RATE)
        settings = ParetoSettings(paper=self._settings(), built_limit=_POOL)
        return ParetoSearch.over(space, estimate, (target,), uniform=uniform, settings=settings)

    def _explore(self, context: AssignmentContext) -> tuple[FoundSize, ...]:
        """What the search comes by when it looks for submodels for a client."""
        return _search_of(context).explore(self._query(context), context.draw.stream("search")).found

    def _assign(self, context: AssignmentContext) -> Assignment:
        """See the module. The answer depends on what is asked alone."""
        query = self._query(context)
        fit = _search_of(context).best(query)
        if fit is None:
            return Assignment(candidate=None)
        best = fit.candidate
        # Where the best one is written, this is that one, or one above it whose cost estimate was too high.
        written = (_as_planned(context, one) for one in context.written.values())
        ready = given_now(written, context.candidates, lambda one: _allows(context, query, one)) or best
        return Assignment(candidate=ready, wanted=requested_program_of(best, ready, context.target))

    def _query(self, context: AssignmentContext) -> Query:
        """What the client can give, in cost estimates: a budget of so much less as they tell too little."""
        corrected = int(context.budget.memory_bytes / self._correction(context))
        return Query(
            target=context.target,
            limits=replace(context.budget, memory_bytes=corrected),
            refused=context.barred,
            below_parameters=None if context.below is None else context.below.parameters,
        )

    def _correction(self, context: AssignmentContext) -> float:
        """Plans over cost estimates, a high quantile over written programs: a search prefers what is estimated too low.

        It follows from what is asked alone, whatever was asked before.
        """
        if self.estimates == "estimated":
            return 1.0
        plans = (
            (one.facts.planned_peak_bytes, _estimate_of(context, one).training_memory_bytes[context.target])
            for one in context.written.values()
            if one.facts.planned_peak_bytes is not None
        )
        over = sorted(planned_bytes / estimate_bytes for planned_bytes, estimate_bytes in plans)
        return over[math.ceil(_SURE * (len(over) - 1))] if over else _UNSHOWN

    def _settings(self) -> PaperSettings:
        return PaperSettings(epsilon=self.epsilon, t_max=self.t_max, pool_limit=_POOL)


def _search_of(context: AssignmentContext) -> Search:
    if context.search is None:
        raise ValueError(
            f"client {context.draw.client_id!r} is asked for without the search of target {context.target!r}"
        )
    return context.search


def _allows(context: AssignmentContext, query: Query, candidate: Candidate) -> bool:
    """Whether a size may be given: a written one by its plan, another one by its corrected cost estimate."""
    known = candidate.architecture.architecture_id in context.written
    return context.allows(candidate) and (known or fit_of(candidate, query) is not None)


def _as_planned(context: AssignmentContext, written: WrittenSize) -> Candidate:
    """A written size with its program's own plan in place of the estimate."""
    peak_bytes = written.facts.planned_peak_bytes
    memory = MappingProxyType({} if peak_bytes is None else {context.target: peak_bytes})
    return replace(_estimate_of(context, written), training_memory_bytes=memory)


def _estimate_of(context: AssignmentContext, written: WrittenSize) -> Candidate:
    return written.estimate or context.estimate(written.size)


def _taught_otherwise(taught: DistillationSettings) -> tuple[str, ...]:
    """In what the whole model teaches otherwise than published."""
    return those_true(
        {
            "the teacher is constant during distillation": taught.mode == "anchored",
            f"distillation takes {taught.iterations} steps, in the paper {_PUBLISHED.iterations}": taught.iterations
            != _PUBLISHED.iterations,
            "the learning rate of distillation is not 1e-3": taught.learning_rate != _PUBLISHED.learning_rate,
            f"logits are divided by {taught.temperature:g} before they teach": taught.temperature
            != _PUBLISHED.temperature,
        }
    )
