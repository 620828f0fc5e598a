"""Selects the clients of a round, describes them to methods, and estimates their times. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.methods.roles import ClosedRound
from subfleet.methods.selector import AvailableClient, LastUpdate, SelectionContext, draw_at_random, select_at_random
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.protocol.training import TRAINING_MACS_PER_FORWARD, TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import PUNCTUAL
from subfleet.rounds.measuring import list_unread
from subfleet.rounds.networks import estimate_size, list_networks, map_networks
from subfleet.rounds.state import ClientState, RunState, get_memory
from subfleet.rounds.work import AggregatedRound
from subfleet.search.candidates import Candidate

NOT_DRAWN = "it was not drawn for this round"
"""Why a client that could take part was skipped."""

Estimate = Callable[[Architecture], Candidate]


def select_clients(context: RunContext, state: RunState) -> tuple[RunState, frozenset[str]]:
    """The clients that the method selects from those that can take part, and the state with its new memory.

    All clients take part in a calibration, since statistics are those of all data. Extras, which the round does not
    wait for, are drawn in addition to the selected clients, at most as many; the method selects among them only if no
    other client can take part.
    """
    answered = frozenset(name for name, client in state.clients.items() if client.stage == "answered")
    able = answered | list_unread(state)
    tried = ((name, member.punctuality) for name, member in state.live.members.items() if member.punctuality)
    extras = able.intersection(name for name, known in tried if known.get("training", PUNCTUAL).extra)
    if not extras or len(extras) == len(able) or context.config.calibrates(state.round):
        return _choose(context, state, able)
    state, chosen = _choose(context, state, able - extras)
    return state, chosen | _draw_at_random(context, state, extras)


def _draw_at_random(context: RunContext, state: RunState, names: frozenset[str]) -> frozenset[str]:
    config = context.config
    count, attempt = config.clients_per_round, state.attempt
    return frozenset(draw_at_random(names, count, seed=config.seed, round_number=state.round, attempt=attempt))


def _choose(context: RunContext, state: RunState, names: frozenset[str]) -> tuple[RunState, frozenset[str]]:
    config, select = context.config, context.roles.selector.select
    if not names or config.calibrates(state.round):
        return state, names
    if select is select_at_random:  # it needs no facts about the clients
        return state, _draw_at_random(context, state, names)
    able = [state.clients[name] for name in sorted(names)]
    estimate = _cache_estimates(context, state.lineages)
    training = context.training(state.round)
    selection = select(
        SelectionContext(
            clients=tuple(_build_available(context, state, client, training, estimate) for client in able),
            count=config.clients_per_round,
            round=state.round,
            attempt=state.attempt,
            seed=config.seed,
            memory=get_memory(context, state),
            networks=map_networks(context, state),
        )
    )
    chosen = names & set(selection.clients)
    if not chosen:
        raise ValueError(f"method {config.method.TYPE!r} chose none of {len(able)} clients, but must choose one")
    return replace(state, memory=selection.memory), chosen


def remember_round(
    context: RunContext, state: RunState, event: AggregatedRound, clients: Mapping[str, ClientState]
) -> RunState:
    """The state with the method's memory of a round that aggregated the updates of these clients."""
    if context.roles.memory.remember is None:
        return state
    estimate = _cache_estimates(context, state.lineages)
    updates = ((name, _build_last_update(client, estimate)) for name, client in sorted(clients.items()))
    past = {name: update for name, update in updates if update is not None}
    closed = ClosedRound(
        round=state.aggregated_round,
        clients=MappingProxyType(past),
        loss=event.loss or 0.0,
        accuracy=event.accuracy or 0.0,
        observation=event.observation,
    )
    return replace(state, memory=context.roles.memory.remember(get_memory(context, state), closed))


def _cache_estimates(context: RunContext, lineages: tuple[Lineage, ...]) -> Estimate:
    """Cached cost estimates, first by the identity of the object: most clients share the same size."""
    of_sizes = lru_cache(maxsize=None)(partial(estimate_size, context, lineages))
    of_objects = dict[int, tuple[Architecture, Candidate]]()

    def estimate(size: Architecture) -> Candidate:
        known = of_objects.get(id(size))
        if known is None:
            known = of_objects[id(size)] = size, of_sizes(size)  # the reference prevents reuse of the size's id
        return known[1]

    return estimate


def _build_available(
    context: RunContext, state: RunState, client: ClientState, training: TrainingSettings, estimate: Estimate
) -> AvailableClient:
    """A client that has answered, in the form that methods get."""
    last = state.last.get(client.client_id)
    past = None if last is None else _build_last_update(last, estimate)
    size = estimate(list_networks(context, state)[0].space[0] if past is None else past.size)
    expected = estimate_time(context, client, size, training)
    return AvailableClient(
        client_id=client.client_id,
        sample_count=client.offer.sample_count,
        class_counts=client.offer.class_counts,
        budget=client.offer.budget,
        expected_training_s=expected.training_s,
        expected_downlink_s=expected.downlink_s,
        expected_uplink_s=expected.uplink_s,
        past=past,
        evaluation=state.evaluated.get(client.client_id),
    )


def _build_last_update(client: ClientState, estimate: Estimate) -> LastUpdate | None:
    """A client's last update; None if it trained nothing."""
    if client.trained is None or client.given is None or client.task is None or not isinstance(client.task.work, Train):
        return None
    update, size = client.trained.update, client.given.size
    reported = update.square_loss
    return LastUpdate(
        round=update.round,
        size=size,
        architecture=client.given.architecture,
        sample_count=min(update.sample_count, client.offer.sample_count),
        epochs=client.task.work.settings.epochs,
        loss=update.loss,
        square_loss=update.loss**2 if reported is None else max(reported, update.loss**2),
        change_norm=client.trained.change.weights * math.sqrt(estimate(size).parameters),
        train_s=update.train_seconds,
        took_s=client.trained.took_s,
    )


_MOST_S = 1e9
"""Thirty years, the longest estimate, so that no claim of a device makes it infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTime:
    """Estimated seconds of a client's part of a round, each 0 if the client reports no pace or link.

    Attributes:
        training_s: seconds of its training, by its reported pace.
        downlink_s: seconds to send the weights to the client, by its reported link in this round.
        uplink_s: seconds to receive the update from the client.
    """

    training_s: float = 0.0
    downlink_s: float = 0.0
    uplink_s: float = 0.0


def estimate_time(
    context: RunContext, client: ClientState, size: Candidate, training: TrainingSettings
) -> ExpectedTime:
    """The estimated time of a training.

    Args:
        context: the run context.
        client: the client's state.
        size: the costs of its submodel; programs, which devices cache, are not counted.
        training: the client's local training.
    """
    training_s = 0.0
    if client.offer.macs_per_s is not None:
        passes = training.sample_passes(client.offer.sample_count)
        training_s = min(TRAINING_MACS_PER_FORWARD * size.forward_macs * passes / client.offer.macs_per_s, _MOST_S)
    return ExpectedTime(
        training_s=training_s,
        downlink_s=_estimate_link_s(context, size.weight_bytes, client.offer.budget.downlink_bytes),
        uplink_s=_estimate_link_s(context, size.update_bytes, client.offer.budget.uplink_bytes),
    )


def _estimate_link_s(context: RunContext, moved_bytes: int, link_bytes: int | None) -> float:
    """Seconds on a link that moves `link_bytes` in `communication_s` seconds."""
    if link_bytes is None:
        return 0.0
    return min(context.config.communication_s * moved_bytes / max(link_bytes, 1), _MOST_S)
