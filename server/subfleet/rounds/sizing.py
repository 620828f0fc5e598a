"""A round's clients are given sizes, a few in each step, once everything that is needed to choose is there. Pure.

All clients choose from the same sizes, whatever their order: the search runs for all of them before any is given a size
(seconds of arithmetic, beside the loop, on a snapshot of the state), and a program that is written meanwhile counts
from the next attempt on.

A method may propose candidates that a device scores on its own data before one of them is chosen for it: its client is
then in stage "scoring". FedFA (Park and Joe-Wong 2024, algorithm 1, lines 1 and 2) proposes architectures, of which
each device is given the one that suits its data best by ZiCo (section 5.1).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import nsmallest
from itertools import accumulate
from types import MappingProxyType

from subfleet.methods.assigner import Assignment, SizeSearch
from subfleet.protocol.memory_plan import compute_peak_bytes
from subfleet.protocol.messages import Scores
from subfleet.rounds.assigning import assign_client, build_question, give_size
from subfleet.rounds.awaiting import get_limit_s, has_scores, list_awaited_scores, record_missing
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import Requested
from subfleet.rounds.networks import get_estimates, request_estimates
from subfleet.rounds.obstacles import list_unfit_sizes
from subfleet.rounds.signals import Action, ClientOutcome, GoOn, Outcome, SendTask, Withdraw
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.tasks import build_score_task, request_tasks
from subfleet.rounds.work import CostRequest, ProgramRequest, Scorable, SearchRequest, SearchResult
from subfleet.search.query import CostEstimates, FoundSize, Search
from subfleet.search.queue import rank_requested

AT_ONCE = 4
"""Clients that are given a size in one step: each takes milliseconds with hundreds of written programs."""


def list_lacking(context: RunContext, state: RunState) -> tuple[CostRequest | SearchRequest, ...]:
    """The requests that must end before sizes can be chosen for the round's clients; empty if none is left."""
    search = context.roles.assigner.search
    if search is None:
        return ()
    targets = {client.offer.runtime for client in state.clients.values() if client.stage not in ("skipped", "missing")}
    unpriced = [request for target in sorted(targets) for request in request_estimates(context, state, target)]
    if unpriced or not targets:
        return tuple(unpriced)
    explored = state.explored_attempt == state.run_attempt and targets <= state.live.searches.keys()
    return () if explored else (SearchRequest(run_attempt=state.run_attempt),)


def request_new(state: RunState, requests: Iterable[Requested]) -> Outcome:
    """Make those requests that are not open yet."""
    new = tuple(request for request in requests if request not in state.live.requested)
    if not new:
        return state, ()
    return replace(state, live=replace(state.live, requested=state.live.requested.union(new))), new


def give_sizes(context: RunContext, state: RunState) -> Outcome:
    """Give sizes, or propose candidates, to the next few clients that have answered."""
    count = sum(client.stage == "answered" for client in state.clients.values())
    if not count:
        return _request_programs(context, state)
    if lacking := list_lacking(context, state):
        return request_new(state, lacking)
    clients, actions = dict(state.clients), list[Action]()
    for name in nsmallest(AT_ONCE, (name for name, client in clients.items() if client.stage == "answered")):
        clients[name], more = propose_sizes(context, state, clients[name])
        actions += more
    state = replace(state, clients=MappingProxyType(clients))
    if count > AT_ONCE:
        return state, (*actions, GoOn())
    state, last = _request_programs(context, state)
    return state, (*actions, *last)


def _request_programs(context: RunContext, state: RunState) -> Outcome:
    """Request the programs that the round's clients lacked, for later rounds, once all clients have a size."""
    if state.requested_attempt == state.run_attempt:
        return state, ()
    state = replace(state, requested_attempt=state.run_attempt)
    if context.config.calibrates(state.round):
        return state, ()
    requested_programs = [
        client.first_requested for client in state.clients.values() if client.first_requested is not None
    ]
    known = {*state.written, *(program.key for program in state.queue)}
    ranked = rank_requested(requested_programs, known, context.config.exports_per_round)
    new = tuple(requested.program for requested in ranked)
    actions = tuple(ProgramRequest(program=program, round=state.round) for program in new)
    return replace(state, queue=(*state.queue, *new)), actions


_KEPT = 2**15
"""Size of the cache of cost estimates: a search asks for the neighbours of known sizes again and again."""


def explore_sizes(context: RunContext, state: RunState) -> SearchResult:
    """Search sizes for all clients that wait for one; if that was done in this attempt, only restore the searches.

    Args:
        context: the run context.
        state: the state with the cost estimates of all targets.
    """
    method = context.roles.assigner.search
    if method is None:
        raise ValueError("a search was requested, but the method has none")
    clients = [client for _, client in sorted(state.clients.items()) if client.stage not in ("skipped", "missing")]
    estimates = {
        target: get_estimates(context, state, target) for target in sorted({client.offer.runtime for client in clients})
    }
    # The caches end with this function: the returned searches do not hold them.
    recalled: dict[str, CostEstimates] = {
        target: lru_cache(maxsize=_KEPT)(estimate) for target, estimate in estimates.items()
    }
    searches = {
        target: _get_search(context, state, method, target).with_estimates(estimate)
        for target, estimate in recalled.items()
    }
    new: list[FoundSize] = []
    pool = dict.fromkeys(state.pool)
    for client in clients:
        if client.stage != "answered" or state.explored_attempt == state.run_attempt:
            continue
        target = client.offer.runtime
        question = replace(build_question(context, state, client), search=searches[target], estimate=recalled[target])
        sizes = [size for size in dict.fromkeys(method.explore(question)) if size not in pool]
        pool |= dict.fromkeys(sizes)
        new += sizes
        searches = {target: search.learn(sizes) for target, search in searches.items()}
    handed = {target: search.with_estimates(estimates[target]) for target, search in searches.items()}
    written = (entry.program for key, entry in state.written.items() if key not in state.live.written_estimates)
    unpriced = (program for program in written if program.target in estimates)
    return SearchResult(
        sizes=tuple(new),
        searches=MappingProxyType(handed),
        written_estimates={program.key: estimates[program.target](program.size) for program in unpriced},
    )


def _get_search(context: RunContext, state: RunState, method: SizeSearch, target: str) -> Search:
    """The search of a target, which knows the pool."""
    known = state.live.searches.get(target)  # its pool is complete, since only this function extends it
    if known is not None:
        return known
    return method.start(context.network, get_estimates(context, state, target), target).learn(state.pool)


_LEAST = 2
"""Candidates; a single one needs no score."""


def propose_sizes(context: RunContext, state: RunState, client: ClientState) -> ClientOutcome:
    """Propose candidates to a client that has answered, if the method has some; else choose a size at once."""
    propose = context.roles.assigner.propose
    if propose is None or context.config.calibrates(state.round):
        return assign_client(context, state, client)
    unscorable = list_unfit_sizes(state, client.client_id, client.offer.runtime, scoring=True)
    proposed = propose(build_question(context, state, client))
    proposals = [candidate for candidate in proposed if candidate.architecture.architecture_id not in unscorable]
    if len(proposals) < _LEAST:
        return assign_client(context, state, client)
    waiting = replace(client, stage="scoring", proposals=tuple(candidate.architecture for candidate in proposals))
    return waiting, request_tasks(state, [waiting])


def send_scoring(
    context: RunContext, state: RunState, client: ClientState, candidates: Sequence[Scorable], now_s: float
) -> ClientOutcome:
    """Send the candidates with programs that fit the budget; with fewer than two no score is needed."""
    budget, width = client.offer.budget, client.offer.packing_width
    planned = {size: compute_peak_bytes(size.planned_peak_bytes, size.packings, width) for size in candidates}
    fitting = [candidate for candidate, size_bytes in planned.items() if size_bytes <= budget.memory_bytes]
    if budget.disk_bytes is not None:  # as many of the smallest ones as fit together
        sums_bytes = accumulate(
            candidate.program.blob.size_bytes + candidate.weights.size_bytes for candidate in fitting
        )
        fitting = fitting[: sum(taken_bytes <= budget.disk_bytes for taken_bytes in sums_bytes)]
    if len(fitting) < _LEAST:
        return assign_client(context, state, client)
    task = build_score_task(context, state, client, {candidate: planned[candidate] for candidate in fitting}, now_s)
    return replace(client, task=task), (SendTask(task=task),)


def assign_best(context: RunContext, state: RunState, client: ClientState, scores: Scores) -> ClientOutcome:
    """Give the client its candidate with the best score, the largest of equals; without any score, what fits."""
    # Candidates are ordered from smallest to largest.
    known = [(score.score, index) for index, score in enumerate(scores.scores) if score.score is not None]
    if client.task is None or not known:
        return assign_client(context, state, replace(client, task=None))
    question, best = build_question(context, state, client), client.task.submodels[max(known)[1]].architecture
    return give_size(context, state, client, question, Assignment(candidate=question.estimate(best)))


def drop_late_scores(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Give sizes to clients without scores after half of the round's time, or when the round stops waiting for them."""
    scoring = (client for client in state.clients.values() if client.stage == "scoring")
    waiting = sorted(scoring, key=lambda client: client.client_id)
    if not waiting:
        return state, ()
    over = now_s - state.live.entered_s >= get_limit_s(context, "scores")
    awaited = frozenset[str]() if over else list_awaited_scores(context, state, now_s)
    late = [client for client in waiting if client.client_id not in awaited]
    if not late:
        return state, ()
    late_ids = [client.client_id for client in late if client.task is not None]
    state = record_missing(state, late_ids, "scores", most=None if has_scores(state) else 1)
    clients, actions = dict(state.clients), list[Action]()
    for client in late:
        clients[client.client_id], more = assign_client(context, state, replace(client, proposals=(), task=None))
        actions += more if client.task is None else (Withdraw(task_id=client.task.task_id), *more)
    return replace(state, clients=MappingProxyType(clients)), tuple(actions)
