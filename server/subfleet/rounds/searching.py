"""A search between two rounds for paths of a supernet, one generation at a time. Pure.

    waiting --> search     a round was aggregated, and the method has a search to do
    search  --> search     a generation was proposed and scored
    search  --> waiting    nothing is left to propose: the best paths are the networks of the run from now on
    search  --> failed     a generation cannot be scored, or none of any tier could be

If devices score, a tier with paths that no device can compute is skipped.

Generations are proposed beside the loop, and scored there or by devices. Each is in the journal before the next is
requested: a run that was killed continues after the last one.

A device receives the smallest supernet that contains the generation's paths, and evaluates each path (FedorAS, section
3.2). The score of a path in a scoring round is a mean over all counted labels, with a limited fraction for each device
and without the best and the worst quarter of the devices (of three or more, at least one each); its score is the mean
over all scoring rounds. A server that restarts has the generation scored again, by tasks with new ids, since devices do
not answer a task twice.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from subfleet.elastic.network import Network
from subfleet.methods.assigner import open_stream
from subfleet.methods.claims import trimmed_mean
from subfleet.methods.run_networks import FederatedScoring, Generation, PathSearch
from subfleet.protocol.answers import Evaluated
from subfleet.protocol.metric_sums import Totals
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.awaiting import close_phase, collect, drop_departed, get_punctuality
from subfleet.rounds.context import RunContext
from subfleet.rounds.evaluating import build_evaluator
from subfleet.rounds.live import GenerationScores
from subfleet.rounds.members import list_expected
from subfleet.rounds.networks import find_supernet, list_lineages, replace_lineages
from subfleet.rounds.progress import Searching, Waiting
from subfleet.rounds.signals import Action, CloseGeneration, Outcome
from subfleet.rounds.sizing import request_new
from subfleet.rounds.state import RunState, get_memory
from subfleet.rounds.tasks import request_tasks
from subfleet.rounds.weights import find_fraction_limit, limit_client_fraction
from subfleet.rounds.work import GenerationRequest, ProposedGeneration
from subfleet.search.supernets import kendall_tau

_NOBODY = "no device that can compute its paths has scored them; let some devices hold out samples"


def is_search_due(context: RunContext, state: RunState) -> bool:
    """Whether a search is due; after it the supernet has retired, so there is nothing to search."""
    search = context.roles.networks.path_search
    if search is None or not state.aggregated_round or find_supernet(context, state) is None:
        return False
    return search.is_due(get_memory(context, state), state.aggregated_round)


def advance_search(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Request the next generation, unless that is open or devices are scoring one."""
    state, actions = _collect_scores(context, state, now_s)
    if state.phase != "search" or state.live.scores is not None:
        return state, actions
    state, more = request_new(state, (request_generation(state),))
    return state, (*actions, *more)


def request_generation(state: RunState) -> GenerationRequest:
    """The request for the next generation."""
    return GenerationRequest(round=state.aggregated_round, number=state.generations + 1)


def receive_generation(
    context: RunContext,
    state: RunState,
    request: GenerationRequest,
    proposed: ProposedGeneration | None,
    problem: str,
    now_s: float,
) -> Outcome:
    """Record a generation's scores, let devices score it, or end the search if nothing is left to propose."""
    search = context.roles.networks.path_search
    if state.phase != "search" or request != request_generation(state) or search is None:
        return state, ()
    if proposed is None:
        return _fail(state, problem, now_s), ()
    supernet = find_supernet(context, state)
    if proposed.generation is None:
        concluded = _conclude(context, state, search, supernet)
        return _fail(state, _NOBODY, now_s) if concluded is None else concluded.enter(Waiting(), now_s), ()
    if search.federated is not None and supernet is not None:
        scores = GenerationScores(
            proposed=proposed,
            supernet=build_smallest_supernet(supernet, proposed.generation),
            requested_s=state.live.entered_s,
            sums=(0.0,) * len(proposed.generation.paths),
        )
        live = replace(state.live, scores=scores, entered_s=now_s)
        return replace(state, live=live, clients=MappingProxyType({})), ()
    close = CloseGeneration(
        round=state.aggregated_round,
        generation=proposed.generation,
        scores=proposed.scores,
        seconds=now_s - state.live.entered_s,
    )
    return _record_generation(context, state, search, close, now_s)


def _fail(state: RunState, reason: str, now_s: float) -> RunState:
    """Fail the run: a search that cannot go on has no networks for it."""
    number, after = state.generations + 1, state.aggregated_round
    return state.fail(f"generation {number} of the search after round {after} cannot be scored: {reason}", now_s)


def find_searched_round(context: RunContext, state: RunState) -> int:
    """The round after which a supernet was searched and retired; 0 if none was. Only its checkpoint has all paths."""
    supernets = (lineage for lineage in state.lineages if context.get_declared(lineage).network.choices)
    return max((lineage.retired_round or 0 for lineage in supernets), default=0)


def _collect_scores(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Collect the scores of devices, and record the generation when all scoring rounds are over."""
    search, supernet = context.roles.networks.path_search, find_supernet(context, state)
    if search is None or search.federated is None or supernet is None:
        return state, ()
    state, actions = score_by_devices(context, state, supernet, search.federated, now_s)
    scoring = state.live.scores
    if scoring is None or scoring.closed < search.federated.rounds:
        return state, actions
    state, generation = replace(state, live=replace(state.live, scores=None)), scoring.proposed.generation
    scores = average_scores(scoring) or scoring.proposed.scores  # the server's own, if it has any
    if generation is not None and not scores and not scoring.clients:  # no device can compute this tier
        memory = search.skip(get_memory(context, state), generation)
        return replace(state, memory=memory).enter(state.at, now_s), actions
    if generation is None or not scores:
        return _fail(state, _NOBODY, now_s), actions
    close = CloseGeneration(
        round=state.aggregated_round,
        generation=generation,
        scores=scores,
        seconds=now_s - scoring.requested_s,
        devices=scoring,
    )
    state, more = _record_generation(context, state, search, close, now_s)
    return state, (*actions, *more)


def _record_generation(
    context: RunContext, state: RunState, search: PathSearch, close: CloseGeneration, now_s: float
) -> Outcome:
    memory = search.record(get_memory(context, state), close.generation, close.scores)
    at = Searching(generations=close.generation.number)
    return replace(state, memory=memory).enter(at, now_s), (close,)


def _conclude(context: RunContext, state: RunState, search: PathSearch, network: Network | None) -> RunState | None:
    """Retire the supernet and use the networks that were found; None if none was found.

    Raises:
        ValueError: there is no supernet, or the method has found networks that do not descend from it.
    """
    if network is None:
        raise ValueError("a search has ended, but the run has no supernet")
    new = tuple(search.conclude(get_memory(context, state), network, state.aggregated_round))
    origin = (network.id, state.aggregated_round)
    odd = [lineage.id for lineage in new if (lineage.parent, lineage.born_round) != origin]
    if odd:
        raise ValueError(f"a search has found networks {odd}, which do not descend from network {network.id!r}")
    if not new:
        return None
    lineages, after = list_lineages(context, state.lineages), state.aggregated_round
    before = (replace(lineage, retired_round=after) if lineage.id == network.id else lineage for lineage in lineages)
    return replace_lineages(context, state, (*before, *new))


_MOST_GUESSES = 2.0
"""The most that a loss counts, in losses of guessing: worse paths are equal."""


def build_smallest_supernet(network: Network, generation: Generation) -> Architecture:
    """The subspace with the operators of a generation's paths, and no others.

    Args:
        network: the supernet.
        generation: the generation with its paths.
    """
    used = [set(operators) for operators in zip(*generation.paths, strict=True)]
    choices = {
        name: tuple(operator for operator in choice.operators if operator in own)
        for (name, choice), own in zip(network.choices.items(), used, strict=True)
    }
    named = tuple((name, own) for name, own in choices.items() if own != network.choices[name].operators)
    return replace(network.full_architecture(), choices=named, name=f"supernet of {len(generation.paths)} paths")


def score_by_devices(
    context: RunContext, state: RunState, network: Network, federated: FederatedScoring, now_s: float
) -> Outcome:
    """Send score tasks, and close scoring rounds that wait for no client; `GenerationScores.closed` counts them."""
    actions: tuple[Action, ...] = ()
    while (scores := state.live.scores) is not None and scores.closed < federated.rounds:
        if not state.clients:
            names = _draw_clients(context, state, scores, federated, now_s)
            new = [build_evaluator(state, name, network.full_architecture(), scores.supernet) for name in names]
            state = state.with_clients(*new)
            actions += request_tasks(state, new)
        state, parted = drop_departed(context, state, now_s)
        actions += parted
        collection = collect(context, state, "paths", now_s)
        may_close = state.clients or collection.late  # a round without clients lasts until its deadline
        if not (may_close and collection.closes):
            break
        state, withdrawn = close_phase(context, state, "paths", collection, now_s)
        state = _close_scoring(context, state, scores, now_s)
        actions += withdrawn
    return state, actions


def average_scores(scores: GenerationScores) -> tuple[float, ...]:
    """The mean score of each path over all counted labels; empty without any."""
    return tuple(total / scores.weight for total in scores.sums) if scores.weight else ()


def _draw_clients(
    context: RunContext, state: RunState, scores: GenerationScores, federated: FederatedScoring, now_s: float
) -> Sequence[str]:
    """Draw the clients and extras of a scoring round: others in each round, the same again after a crash."""
    able = sorted(_list_capable(context, state, scores, now_s))
    name = f"{context.config.seed}/{state.round}/{state.generations + 1}/{scores.closed}/scoring"
    extras = [client_id for client_id in able if get_punctuality(state, client_id, "paths").extra]
    regular = sorted(set(able) - set(extras))
    drawn = open_stream(name).sample(regular, min(federated.clients, len(regular)))
    return sorted((*drawn, *open_stream(f"{name}/extras").sample(extras, min(federated.clients, len(extras)))))


def _list_capable(context: RunContext, state: RunState, scores: GenerationScores, now_s: float) -> Iterator[str]:
    """The present clients that have held-out data and can compute the generation's tier."""
    least_macs = scores.proposed.generation.least_macs if scores.proposed.generation is not None else 0
    for name in list_expected(context, state, now_s):
        if name in state.last and state.profiles[name].held_out_count:
            most = state.last[name].offer.budget.forward_macs
            if most is None or most >= least_macs:
                yield name


def _close_scoring(context: RunContext, state: RunState, scores: GenerationScores, now_s: float) -> RunState:
    """Add the scores of a scoring round, and begin the next one."""
    done = (client for _, client in sorted(state.clients.items()) if client.stage == "done")
    answers = [client.evaluated for client in done if client.evaluated is not None]
    labels = [answer.label_count for answer in answers]
    # The number of labels is only a claim of the device.
    limit = find_fraction_limit(labels, limit_client_fraction(context.config.max_client_fraction, len(labels)))
    weights = [float(own if limit is None or own <= limit else limit) for own in labels]
    together = math.fsum(weights)
    scored = [_read_scores(context, answer) for answer in answers]
    sums = scores.sums
    if scored:
        means = (trimmed_mean(own, weights) for own in zip(*scored, strict=True))
        sums = tuple(before + together * mean for before, mean in zip(sums, means, strict=True))
    tasks = [(client, client.task) for client in state.clients.values() if client.task is not None]
    blobs = (blob for _, task in tasks for blob in task.weights)
    scores = replace(
        scores,
        closed=scores.closed + 1,
        labels=scores.labels + sum(labels),
        weight=scores.weight + together,
        sums=sums,
        answers=scores.answers + len(answers),
        clients=tuple(sorted({*scores.clients, *(client.client_id for client, _ in tasks)})),
        supernet_bytes=max([scores.supernet_bytes, *(blob.size_bytes for blob in blobs)]),
    )
    central = scores.proposed.scores
    if central and scores.weight:
        scores = replace(scores, ranks=(*scores.ranks, kendall_tau(average_scores(scores), central)))
    settled = state.settled.union(task.task_id for client, task in tasks if client.stage == "done")
    live = replace(state.live, scores=scores, entered_s=now_s)
    return replace(state, live=live, clients=MappingProxyType({}), settled=settled)


def _read_scores(context: RunContext, answer: Evaluated) -> list[float]:
    """The score of each path."""
    kind = context.config.training.objective.kind
    if kind.by_accuracy:
        return [score.accuracy for score in answer.scores]
    # An unbounded loss of one device would outweigh all others.
    most = _MOST_GUESSES * kind.guess_loss(context.config.model.class_count, Totals(label_count=0, loss=0.0))
    return [-min(score.loss, most) for score in answer.scores]
