"""Evaluates a method's model on the server's samples."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from subfleet.aggregation.aggregation import AggregatedModel
from subfleet.aggregation.path_scoring import draw_random_paths
from subfleet.aggregation.views import Views, imitate_client, measure_untrained
from subfleet.elastic.evaluate import EvaluationResult, evaluate
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import EvaluatedModel, Participant
from subfleet.methods.assigner import open_stream
from subfleet.protocol.metric_sums import Totals
from subfleet.rounds.networks import find_standing
from subfleet.rounds.state import RunState
from subfleet.tasks import Dataset

_PATHS = 8
"""Random paths for the evaluation of a supernet."""
_ALL = slice(None)
_Key = tuple[str | int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The evaluation of a model; of several models, over the labels of all."""

    evaluation: EvaluationResult
    model: EvaluatedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """An evaluation, and its tensors."""

    seen: dict[str, Tensor]
    evaluation: EvaluationResult


@dataclass(slots=True)
class _Memory:
    """Evaluations of this round and of the one before: an unchanged model is not evaluated again."""

    before: dict[_Key, _Known] = field(default_factory=dict)
    now: dict[_Key, _Known] = field(default_factory=dict)

    def find(self, key: _Key, seen: dict[str, Tensor]) -> EvaluationResult | None:
        """The evaluation of the same tensors, if there is one."""
        found = self.now.get(key) or self.before.get(key)
        if found is None or any(found.seen[name] is not tensor for name, tensor in seen.items()):
            return None
        self.now[key] = found
        return found.evaluation


class Examiner:
    """Evaluates one aggregated model after the other.

    Args:
        views: what clients see of a model.
        evaluation: held-out samples, in the shape that the model takes.
    """

    def __init__(self, views: Views, evaluation: Dataset) -> None:
        self._views = views
        self._inputs = torch.from_numpy(evaluation.inputs.copy())
        self._labels = torch.from_numpy(evaluation.labels.copy())
        self._memory = _Memory()

    def examine(self, aggregated: AggregatedModel, state: RunState, round_number: int) -> Examined:
        """Evaluate the model after a round.

        One model for all is that of the newest network that devices have trained. With personalised models, the mean is
        over all clients that have taken part so far: those of this round with what they have trained, the others with
        what they keep. A supernet is evaluated by the mean of random paths (FedorAS, equation 4), each on different
        samples, so that it takes no longer than a network.

        Args:
            aggregated: the model, before networks appeared or retired.
            state: of the run, before the round is closed.
            round_number: of the round.
        """
        self._memory = _Memory(before=self._memory.now)
        roles, network = self._views.context.roles, self._find_newest(aggregated.aggregated)
        if network.choices:
            return self._evaluate_paths(aggregated.aggregated, network, round_number)
        everyone = self._list_clients(aggregated, state) if roles.aggregator.personal else []
        if everyone:
            evaluations = [self._evaluate(aggregated.aggregated, client) for client in everyone]
            untrained = self._mean(self._measure_untrained(aggregated.aggregated, client) for client in everyone)
            return self._combine(
                evaluations, EvaluatedModel(kind=roles.aggregator.model, count=len(evaluations), untrained=untrained)
            )
        full = network.full_architecture()
        architecture = aggregated.aggregated.of(network.id).model or full
        client = imitate_client(network, architecture)
        model = EvaluatedModel(
            kind="whole" if roles.aggregator.personal else roles.aggregator.model,
            submodel="" if architecture.architecture_id == full.architecture_id else architecture.name,
            architecture_id=architecture.architecture_id,
            network=network.id,
            untrained=self._measure_untrained(aggregated.aggregated, client),
        )
        return self._combine([self._evaluate(aggregated.aggregated, client)], model)

    def _find_newest(self, state: ModelState) -> Network:
        """The newest network that devices have trained; the newest of all if there is none."""
        states = [state.of(network_id) for network_id in state.network_ids]
        lineages = [own.lineage for own in states if own.model is not None] or [own.lineage for own in states]
        newest = max(lineages, key=lambda lineage: 0 if lineage is None else lineage.born_round)
        return self._views.context.declared(newest).network

    def _list_clients(self, aggregated: AggregatedModel, state: RunState) -> list[Participant]:
        """All clients that have taken part, each with a submodel of a network in use."""
        done = {client.client_id: client for client in aggregated.clients}
        others = (
            find_standing(self._views.context, state, client) for name, client in state.last.items() if name not in done
        )
        in_use = aggregated.aggregated.network_ids
        known = [client for client in others if client is not None and client.architecture.network in in_use]
        return sorted((*done.values(), *known), key=lambda client: client.client_id)

    def _evaluate_paths(self, state: ModelState, network: Network, round_number: int) -> Examined:
        seed = self._views.context.config.seed
        architectures = draw_random_paths(
            network, min(_PATHS, len(self._labels)), open_stream(f"{seed}/{round_number}/paths")
        )
        clients = [imitate_client(network, architecture) for architecture in architectures]
        parts = (slice(place, None, len(clients)) for place in range(len(clients)))
        evaluations = [self._evaluate(state, client, part) for client, part in zip(clients, parts, strict=True)]
        untrained = self._mean(self._measure_untrained(state, client) for client in clients)
        return self._combine(evaluations, EvaluatedModel(kind="paths", count=len(clients), untrained=untrained))

    def _evaluate(self, state: ModelState, client: Participant, samples: slice = _ALL) -> EvaluationResult:
        key = (*self._views.key(state, client), samples.start, samples.step)
        seen = self._views.for_training(state, client)
        known = self._memory.find(key, seen)
        if known is None:
            network, used = self._views.find_network(state, client), self._views.for_use(state, client)
            objective = self._views.context.config.training.objective.name
            inputs, labels = self._inputs[samples], self._labels[samples]
            known = evaluate(network, client.architecture, used, inputs, labels, objective=objective)
            self._memory.now[key] = _Known(seen=seen, evaluation=known)
        return known

    def _measure_untrained(self, state: ModelState, client: Participant) -> float:
        network = self._views.find_network(state, client)
        return measure_untrained(self._views.context.roles, network, state.of(network.id), client)

    def _combine(self, evaluations: Sequence[EvaluationResult], model: EvaluatedModel) -> Examined:
        totals = Totals.of_all(evaluation.totals for evaluation in evaluations)
        return Examined(evaluation=replace(evaluations[0], totals=totals), model=model)

    @staticmethod
    def _mean(figures: Iterable[float]) -> float:
        known = [*figures]
        return math.fsum(known) / len(known)
