"""Dynamic model selection: every device trains the submodel that a search finds for its budget in this round.

Yao et al., "Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection", 2024, section 3.

Client half: train the given submodel with the given objective.
Server half: a search within the device's budget, over any width of any layer and any set of blocks; a mean over the
clients that hold an element; then, on noise, the whole model teaches submodels of the searched space (in-place
distillation). An element that nobody held keeps its bits, where the public code zeroes it.

A submodel needs a training program. Submodels that the search chooses without one are queued, a few each round; until
its program is written, the device gets the largest submodel with a program that fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods.aggregator import COUNTED_BY_SAMPLES, Aggregator, Weighting, weigh_by
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, SizeSearch, WrittenSize
from subfleet.methods.describing import MethodInfo, Setting, always, parameter
from subfleet.methods.roles import Roles
from subfleet.methods.techniques import Techniques
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Count, Fraction
from subfleet.search.candidates import Candidate
from subfleet.search.query import CostEstimates, FoundSize, Query, Search, satisfies
from subfleet.search.queue import give_written, request_program
from subfleet.search.searches import PaperSearch, PaperSettings, ParetoSearch, ParetoSettings

_POOL = 1024
"""The most submodels in a run's pool; its journal holds all of them."""
_EVERY_RATE = tuple(step / 16 for step in range(1, 17))
"""The uniform submodels that are known from the start, if the space has every size."""
_INITIAL_CORRECTION, _QUANTILE = 1.03, 0.9
"""Plans over cost estimates before any program is written; and the quantile of that ratio over written programs."""
_PUBLISHED = DistillationSettings()


def _find_distillation(method: DynamicSelection, setting: Setting) -> DistillationSettings | None:
    """The settings of the run's distillation; None if nothing is distilled."""
    techniques = setting.techniques.complete_from(Techniques(distillation=method.distillation))
    return techniques.distillation if techniques.teaches else None


def _differs(key: str, method: DynamicSelection, setting: Setting) -> bool:
    """Whether a setting of the distillation, if there is any, differs from the paper's."""
    settings = _find_distillation(method, setting)
    return settings is not None and getattr(settings, key) != getattr(_PUBLISHED, key)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class DynamicSelection:
    """Parameters of dynamic model selection.

    Attributes:
        search: "pareto" is ours, which finds larger submodels for every budget; "paper" the published one.
        rates: width ratios of the search space, without the 0 that drops a block; empty allows every size.
        estimates: "planned" estimates memory by a model of the planner; "estimated" by shapes, which saves the seconds
            that the model takes at first, but more submodels turn out too large.
        epsilon: probability to take the best of the pool; 1 never explores.
        t_max: the most draws of a search.
        distillation: after each round; None leaves it out. As printed, with a teacher that moves and a learning rate of
            1e-3, small networks forget what clients learned; by default the teacher is constant.
        weighting: "uniform" counts each client as 1, as the public code does; "samples" by its samples.
    """

    TYPE: ClassVar[str] = "dynamic_selection"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Dynamic model selection",
        paper="Yao et al., Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection, 2024",
        varies=("width", "depth"),
        judges=("distillation",),
        departures={
            "while a submodel has no training program, the device gets the largest one that has one": always,
            "activations are the network's own, without the paper's ReLU6": always,
            "nothing is distilled": lambda method, setting: _find_distillation(method, setting) is None,
            "the teacher is constant during distillation": partial(_differs, "mode"),
            "the number of distillation steps is not 100": partial(_differs, "iterations"),
            "the learning rate of distillation is not 1e-3": partial(_differs, "learning_rate"),
            "the temperature of distillation is not 1": partial(_differs, "temperature"),
        },
    )
    search: Literal["pareto", "paper"] = parameter(
        "pareto", paper="paper", otherwise="the search is a Pareto search, not the paper's"
    )
    rates: tuple[Annotated[float, Range(least=0.001, most=1)], ...] = (0.25, 0.5, 0.75, 1.0)
    estimates: Literal["planned", "estimated"] = "planned"
    epsilon: Fraction = parameter(0.8)
    t_max: Count = parameter(5)
    distillation: DistillationSettings | None = parameter(
        DistillationSettings(mode="anchored", learning_rate=1e-4), paper=_PUBLISHED, otherwise=None
    )
    weighting: Weighting = parameter("uniform", otherwise=COUNTED_BY_SAMPLES)

    def roles(self) -> Roles:
        """A search for each client, and in-place distillation."""
        search = SizeSearch(start=self.start, explore=self._explore)
        planned = self.estimates == "planned"
        return Roles(
            assigner=Assigner(search=search, planned_estimates=planned, assign=self._assign),
            aggregator=Aggregator(
                weigh=weigh_by(self.weighting), taught=lambda network, sizes: search_space(network, self.rates)
            ),
            techniques=Techniques(distillation=self.distillation),
        )

    def start(self, network: Network, estimate: CostEstimates, target: str) -> Search:
        """A search that has learned nothing yet."""
        space = search_space(network, self.rates)
        settings = PaperSettings(epsilon=self.epsilon, t_max=self.t_max, pool_limit=_POOL)
        if self.search == "paper":
            return PaperSearch.begin(space, estimate, target, settings)
        uniform = uniform_space(network, self.rates or _EVERY_RATE)
        pareto = ParetoSettings(paper=settings, built_limit=_POOL)
        return ParetoSearch.begin(space, estimate, target, uniform=uniform, settings=pareto)

    def _explore(self, context: AssignmentContext) -> tuple[FoundSize, ...]:
        return _require_search(context).explore(self._query(context), context.draw.stream("search"))

    def _assign(self, context: AssignmentContext) -> Assignment:
        query = self._query(context)
        fit = _require_search(context).best(query)
        if fit is None:
            return Assignment(candidate=None)
        best = fit.candidate
        # If the best one is written, this is it, or a larger one with a cost estimate that was too high.
        written = (_replace_by_plan(context, size) for size in context.written.values())
        ready = give_written(written, context.candidates, lambda size: _allows(context, query, size)) or best
        return Assignment(candidate=ready, requested=request_program(best, ready, context.target))

    def _query(self, context: AssignmentContext) -> Query:
        """The client's budget in terms of cost estimates: less memory, as estimates are too low."""
        corrected_bytes = int(context.budget.memory_bytes / self._correction(context))
        return Query(
            target=context.target,
            limits=replace(context.budget, memory_bytes=corrected_bytes),
            refused=context.why_never,
            below_parameters=None if context.below is None else context.below.parameters,
        )

    def _correction(self, context: AssignmentContext) -> float:
        """Plans over cost estimates: a high quantile over written programs, as a search prefers low estimates.

        It follows from this context alone, whatever was asked before.
        """
        if self.estimates == "estimated":
            return 1.0
        plans = (
            (size.facts.planned_peak_bytes, _estimate(context, size).training_memory_bytes.get(context.target))
            for size in context.written.values()
        )
        ratios = sorted(
            plan_bytes / estimate_bytes for plan_bytes, estimate_bytes in plans if plan_bytes and estimate_bytes
        )
        return ratios[math.ceil(_QUANTILE * (len(ratios) - 1))] if ratios else _INITIAL_CORRECTION


def _require_search(context: AssignmentContext) -> Search:
    if context.search is None:
        raise ValueError(f"there is no search of target {context.target!r} to assign client {context.draw.client_id!r}")
    return context.search


def _allows(context: AssignmentContext, query: Query, candidate: Candidate) -> bool:
    """Whether a size may be assigned: a written one by its plan, another one by its corrected cost estimate."""
    written = candidate.architecture.architecture_id in context.written
    return context.allows(candidate) and (written or satisfies(candidate, query))


def _replace_by_plan(context: AssignmentContext, written: WrittenSize) -> Candidate:
    """A written size with its program's plan in place of the estimated memory."""
    peak_bytes = written.facts.planned_peak_bytes
    memory = {} if peak_bytes is None else {context.target: peak_bytes}
    return replace(_estimate(context, written), training_memory_bytes=MappingProxyType(memory))


def _estimate(context: AssignmentContext, written: WrittenSize) -> Candidate:
    return written.estimate or context.estimate(written.size)
