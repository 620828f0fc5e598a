"""Rounds of a method with a thousand members, and the cost of each step of the pure coordinator."""

import time
from dataclasses import dataclass
from random import Random
from typing import Any

from coordinator_benchmark.fleet import EstimatesOf, Fleet
from subfleet.aggregation.path_scoring import propose_generation
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.networks import choose_networks
from subfleet.rounds.signals import Action, Event, RequestDone, Tick
from subfleet.rounds.sizing import explore_sizes
from subfleet.rounds.state import RunState
from subfleet.rounds.work import GenerationRequest, NetworksRequest, ProposedGeneration, SearchRequest
from subfleet.serving.session import freeze_loaded_objects

__all__ = ["StepFigures", "measure_steps"]

_MOST_STEPS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Costs of the steps of a method's run.

    Attributes:
        worst_ms: CPU time of the slowest step in the first round, without programs, and in later rounds.
        worst_step: event and phase of the slowest step.
        mean_ms: mean CPU time of all steps.
        beside_s: CPU time of searches beside the loop.
        steps: number of steps.
        aggregated: number of aggregated rounds.
    """

    worst_ms: tuple[float, float]
    worst_step: str
    mean_ms: float
    beside_s: float
    steps: int
    aggregated: int


def measure_steps(context: RunContext, estimates: EstimatesOf, *, members: int, spoil: bool) -> StepFigures:
    """Play a run to its end, and time each step.

    Args:
        context: the run context.
        estimates: the exporter's memory estimates.
        members: number of devices.
        spoil: whether to search within the step that requests it.
    """
    fleet = Fleet(context=context, estimates=estimates, names=tuple(f"client{number}" for number in range(members)))
    fleet.waiting.extend(fleet.join())
    freeze_loaded_objects()  # as a server does at its start
    state, now_s, worst_ms, worst_step = RunState(), 1.0, [0.0, 0.0], ""
    total_s = beside_s = 0.0
    steps = 0
    while state.phase not in ("finished", "failed") and steps < _MOST_STEPS:
        if not fleet.waiting:
            now_s += 1.0
        event: Event = fleet.waiting.popleft() if fleet.waiting else Tick()
        before, started_s = state, time.thread_time()
        state, actions = step(context, state, event, now_s)
        answers = _answer_searches(context, state, actions) if spoil else ()
        step_s = time.thread_time() - started_s
        steps, total_s = steps + 1, total_s + step_s
        stage = min(before.aggregated_round, 1)
        if 1000 * step_s > max(worst_ms):
            worst_step = f"{type(event).__name__} in {before.phase}"
        worst_ms[stage] = max(worst_ms[stage], 1000 * step_s)
        started_s = time.thread_time()
        fleet.waiting.extend(answers if spoil else _answer_searches(context, state, actions))
        beside_s += time.thread_time() - started_s
        for action in actions:
            fleet.handle(state, action)
        fleet.report_telemetry(state)
    return StepFigures(
        worst_ms=(worst_ms[0], worst_ms[1]),
        worst_step=worst_step,
        mean_ms=1000 * total_s / steps,
        beside_s=beside_s,
        steps=steps,
        aggregated=state.aggregated_round,
    )


def _answer_searches(context: RunContext, state: RunState, actions: tuple[Action, ...]) -> tuple[Event, ...]:
    """Do the searches that the server runs in other threads."""
    searches = [action for action in actions if isinstance(action, SearchRequest | NetworksRequest | GenerationRequest)]
    return tuple(RequestDone(request=request, result=_search(context, state, request)) for request in searches)


def _search(context: RunContext, state: RunState, request: SearchRequest | NetworksRequest | GenerationRequest) -> Any:
    if isinstance(request, SearchRequest):
        return explore_sizes(context, state)
    return (
        choose_networks(context, state)
        if isinstance(request, NetworksRequest)
        else _propose_generation(context, state, request)
    )


def _propose_generation(context: RunContext, state: RunState, request: GenerationRequest) -> ProposedGeneration:
    """Propose the next paths of a search, with random scores."""
    generation = propose_generation(context, state)
    rng = Random(request.number)  # noqa: S311 - no secret
    scores = tuple(rng.random() for _ in ([] if generation is None else generation.paths))
    return ProposedGeneration(generation=generation, scores=scores)
