"""Candidates that a device scores on its own data before one of them is chosen for it: stage "scoring". Pure.

FedFA (Park and Joe-Wong 2024, algorithm 1, lines 1 and 2): the server proposes architectures, each device has one that
suits its own data, found by ZiCo (section 5.1).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

from subfleet.methods.assigner import Assignment
from subfleet.protocol.memory_plan import planned_for
from subfleet.protocol.messages import Scores
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Score
from subfleet.rounds.actions import Action, SendTask, Withdraw
from subfleet.rounds.assigning import ask_of, assigned_client, given_client
from subfleet.rounds.awaiting import any_scores, awaited_scores, limit_s, with_missing
from subfleet.rounds.context import RunContext
from subfleet.rounds.refusals import unscorable_sizes
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.tasks import score_task
from subfleet.rounds.work import Scorable, ScoringRequest

__all__ = [
    "proposed_client",
    "scored_client",
    "scoring_client",
    "scoring_wanted",
    "unscored_client",
    "without_late_scores",
]

_LEAST = 2
"""Candidates; one alone needs no score."""


def proposed_client(
    context: RunContext, state: RunState, client: ClientState
) -> tuple[ClientState, tuple[Action, ...]]:
    """Propose candidates to a client that has answered, where the method has some; else choose a size at once."""
    propose = context.roles.assigner.propose
    if propose is None or client.offer.budget is None or context.config.calibrates(state.round):
        return assigned_client(context, state, client)
    unscorable = unscorable_sizes(state, client.client_id, client.offer.runtime)
    proposals = [
        one for one in propose(ask_of(context, state, client)) if one.architecture.architecture_id not in unscorable
    ]
    if len(proposals) < _LEAST:
        return assigned_client(context, state, client)
    waiting = replace(client, stage="scoring", proposals=tuple(one.architecture for one in proposals))
    return waiting, (scoring_wanted(state, waiting),)


def scoring_wanted(state: RunState, client: ClientState) -> ScoringRequest:
    """What a client state's score task is made of."""
    return ScoringRequest(
        client_id=client.client_id, round=state.round, target=client.offer.runtime, sizes=client.proposals
    )


def scoring_client(
    context: RunContext, state: RunState, client: ClientState, candidates: Sequence[Scorable], now_s: float
) -> tuple[ClientState, tuple[Action, ...]]:
    """Send the candidates whose programs' own plans fit the budget; with too few of them no score is needed."""
    budget, width = client.offer.budget, client.offer.packing_width
    planned = {one: planned_for(one.planned_peak_bytes, one.packings, width) for one in candidates}
    fitting = [one for one, size_bytes in planned.items() if budget is not None and size_bytes <= budget.memory_bytes]
    fitting = _with_disk(budget, fitting)
    if budget is None or len(fitting) < _LEAST:
        return unscored_client(context, state, client)
    task = score_task(context, state, client, {one: planned[one] for one in fitting}, now_s)
    return replace(client, task=task), (SendTask(task=task),)


def _with_disk(budget: Budget | None, candidates: list[Scorable]) -> list[Scorable]:
    """The smallest of some candidates, as many as may lie on a device's disk beside each other."""
    left_bytes = None if budget is None else budget.disk_bytes
    if left_bytes is None:
        return candidates
    taken = accumulate(one.program.blob.size_bytes + one.weights.size_bytes for one in candidates)
    return candidates[: sum(taken_bytes <= left_bytes for taken_bytes in taken)]


def scored_client(
    context: RunContext, state: RunState, client: ClientState, scores: Scores
) -> tuple[ClientState, tuple[Action, ...]]:
    """Give the client its best-scored candidate, of equals the largest; without any score as without scores."""
    best = _best(client, scores)
    if best is None:
        return unscored_client(context, state, client)
    ask = ask_of(context, state, client)
    return given_client(context, state, client, ask, Assignment(candidate=ask.estimate(best)))


def _best(client: ClientState, scores: Scores) -> Architecture | None:
    if client.task is None or not isinstance(client.task.work, Score):
        return None
    # Candidates are ordered from smallest to largest.
    known = [(one.score, place) for place, one in enumerate(scores.scores) if one.score is not None]
    return client.task.submodels[max(known)[1]].architecture if known else None


def unscored_client(
    context: RunContext, state: RunState, client: ClientState
) -> tuple[ClientState, tuple[Action, ...]]:
    """Give the client what the method gives without scores.

    What a search finds now is not remembered: it would depend on who was answered first.
    """
    given, actions = assigned_client(context, state, replace(client, task=None))
    return given, actions


def without_late_scores(context: RunContext, state: RunState, now_s: float) -> tuple[RunState, tuple[Action, ...]]:
    """Wait no longer for scores when half of the round's time is over; nor for those for which nobody waits so long."""
    waiting = [client for _, client in sorted(state.clients.items()) if client.stage == "scoring"]
    if not waiting:
        return state, ()
    over = now_s - state.live.entered_s >= limit_s(context, "scores")
    awaited = frozenset[str]() if over else awaited_scores(context, state, now_s)
    late = [client for client in waiting if client.client_id not in awaited]
    if not late:
        return state, ()
    asked = [client.client_id for client in late if client.task is not None]
    state = with_missing(state, asked, "scores", most=None if any_scores(state) else 1)
    clients, actions = dict(state.clients), list[Action]()
    for client in late:
        clients[client.client_id], more = unscored_client(context, state, replace(client, proposals=()))
        actions += more if client.task is None else (Withdraw(task_id=client.task.task_id), *more)
    return replace(state, clients=MappingProxyType(clients)), tuple(actions)
