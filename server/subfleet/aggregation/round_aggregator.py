"""The slow part of a round, beside the loop: aggregate, evaluate, write the checkpoint."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.aggregation.aggregation import AggregatedModel, aggregate_model
from subfleet.aggregation.calibration import calibrate_model
from subfleet.aggregation.checkpoint import save_checkpoint
from subfleet.aggregation.path_scoring import draw_random_paths
from subfleet.aggregation.update_ranges import UpdateRanges
from subfleet.aggregation.views import View, Views, imitate_client
from subfleet.elastic.evaluate import EvaluationResult, evaluate
from subfleet.elastic.model_state import ModelState, pack_state
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import EvaluatedModel, Participant
from subfleet.methods.assigner import open_stream
from subfleet.protocol.errors import FileError
from subfleet.protocol.metric_sums import Totals
from subfleet.rounds.networks import find_standing
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound
from subfleet.tasks import Dataset
from subfleet.transport.blob_store import BlobStore

_LOG = logging.getLogger(__name__)
_PATHS = 8
"""Random paths for the evaluation of a supernet."""
_Key = tuple[str | int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The evaluation of a model; of several models, over the labels of all."""

    evaluation: EvaluationResult
    model: EvaluatedModel


class Examiner:
    """Evaluates one aggregated model after the other; an unchanged model is not evaluated again.

    Args:
        views: what clients see of a model.
        evaluation: held-out samples, in the shape that the model takes.
    """

    def __init__(self, views: Views, evaluation: Dataset) -> None:
        self._views = views
        self._inputs = torch.from_numpy(evaluation.inputs.copy())
        self._labels = torch.from_numpy(evaluation.labels.copy())
        # The tensors and the evaluation of each model of this round and of the one before.
        self._now: dict[_Key, tuple[dict[str, Tensor], EvaluationResult]] = {}
        self._before = self._now

    def examine(self, aggregated: AggregatedModel, state: RunState, round_number: int) -> Examined:
        """Evaluate the model after a round.

        One model for all is that of the newest network that devices have trained. With personalised models, the mean is
        over all clients that have taken part so far: clients of this round with the submodel that they have trained,
        others with the one that they keep. A supernet is evaluated by the mean of random paths (FedorAS, equation 4),
        each on different samples, so that it takes no longer than a network.

        Args:
            aggregated: the model, before networks appeared or retired.
            state: of the run, before the round is closed.
            round_number: of the round.
        """
        self._before, self._now = self._now, {}
        context, model = self._views.context, aggregated.aggregated
        network, aggregator = self._find_newest(model), context.roles.aggregator
        everyone = self._list_clients(aggregated, state) if aggregator.personal else []
        if network.choices:
            stream = open_stream(f"{context.config.seed}/{round_number}/paths")
            paths = draw_random_paths(network, min(_PATHS, len(self._labels)), stream)
            clients, described = [imitate_client(network, path) for path in paths], EvaluatedModel(kind="paths")
        elif everyone:
            clients, described = everyone, EvaluatedModel(kind=aggregator.model)
        else:
            full = network.full_architecture()
            architecture = model.of(network.id).model or full
            clients = [imitate_client(network, architecture)]
            described = EvaluatedModel(
                kind="whole" if aggregator.personal else aggregator.model,
                submodel="" if architecture.architecture_id == full.architecture_id else architecture.name,
                architecture_id=architecture.architecture_id,
                network=network.id,
            )
        views = [self._views.of(model, client) for client in clients]
        parts = len(views) if network.choices else 1
        evaluations = [self._evaluate(view, slice(index % parts, None, parts)) for index, view in enumerate(views)]
        totals = Totals.of_all(evaluation.totals for evaluation in evaluations)
        untrained = math.fsum(view.untrained for view in views) / len(views)
        return Examined(
            evaluation=replace(evaluations[0], totals=totals),
            model=replace(described, count=len(views), untrained=untrained),
        )

    def _find_newest(self, state: ModelState) -> Network:
        """The newest network that devices have trained; the newest of all if there is none."""
        states = [state.of(network_id) for network_id in state.network_ids]
        lineages = [own.lineage for own in states if own.model is not None] or [own.lineage for own in states]
        newest = max(lineages, key=lambda lineage: 0 if lineage is None else lineage.born_round)
        return self._views.context.get_declared(newest).network

    def _list_clients(self, aggregated: AggregatedModel, state: RunState) -> list[Participant]:
        """All clients that have taken part, each with a submodel of a network in use."""
        done = {client.client_id: client for client in aggregated.clients}
        others = (
            find_standing(self._views.context, state, client) for name, client in state.last.items() if name not in done
        )
        in_use = aggregated.aggregated.network_ids
        known = [client for client in others if client is not None and client.architecture.network in in_use]
        return sorted((*done.values(), *known), key=lambda client: client.client_id)

    def _evaluate(self, view: View, samples: slice) -> EvaluationResult:
        """Evaluate what a client sees, unless the same tensors were evaluated on the same samples before."""
        key = (*view.key, samples.start, samples.step)
        seen, known = view.tensors, self._now.get(key) or self._before.get(key)
        if known is None or any(known[0][name] is not tensor for name, tensor in seen.items()):
            evaluation = evaluate(
                view.network,
                view.client.architecture,
                self._views.prepare_tensors(view),
                self._inputs[samples],
                self._labels[samples],
                objective=self._views.context.config.training.objective.name,
            )
            known = (seen, evaluation)
        self._now[key] = known
        return known[1]


class RoundAggregator:
    """Aggregates one round after the other.

    Args:
        views: what clients see of a model.
        blobs: where updates are stored.
        evaluation: held-out samples, in the shape that the model takes.
        checkpoints: folder of the models.
        ranges: knows how large the changes of stored updates are.
    """

    def __init__(
        self,
        views: Views,
        blobs: BlobStore,
        evaluation: Dataset,
        *,
        checkpoints: Path,
        ranges: UpdateRanges | None = None,
    ) -> None:
        self._context = views.context
        self._blobs = blobs
        self._ranges = ranges or UpdateRanges()
        self._examiner = Examiner(views, evaluation)
        self._checkpoints = checkpoints
        self.model = ModelState(shared={})
        """The model of the last aggregated round; its checkpoint is on disk."""

    def aggregate(self, request: AggregationRequest, state: RunState, model: ModelState) -> AggregatedRound:
        """Aggregate a round's updates into the next model, in two attempts.

        Args:
            request: for the round.
            state: of the run, before the round is closed.
            model: that the round started from.

        Raises:
            FileError: the checkpoint cannot be written; another attempt would not help.
            Exception: raised by the second attempt.
        """
        try:
            return self._attempt(request, state, model)
        except FileError:
            raise
        except Exception as error:  # noqa: BLE001  # the cause may be temporary, such as too little memory
            _LOG.warning("round %d could not be aggregated and is attempted again", request.round, exc_info=error)
        return self._attempt(request, state, model)

    def _attempt(self, request: AggregationRequest, state: RunState, model: ModelState) -> AggregatedRound:
        if self._context.config.calibrates(request.round):
            aggregated = calibrate_model(self._context, self._blobs, model, request)
        else:
            aggregated = aggregate_model(self._context, self._blobs, model, request, self._ranges)
        examined = self._examiner.examine(aggregated, state, request.round)
        metrics = dict(examined.evaluation.metrics)
        sha256 = save_checkpoint(self._checkpoints, request.round, pack_state(aggregated.state))
        self.model = aggregated.state
        return AggregatedRound(
            accuracy=metrics.pop("accuracy", None),
            loss=examined.evaluation.loss,
            model=examined.model,
            sha256=sha256,
            refused=aggregated.refused,
            observation=aggregated.observation,
            lineages=aggregated.lineages,
            model_bytes=aggregated.state.tensor_bytes,
            metrics=MappingProxyType(metrics),
            guess_loss=examined.evaluation.guess_loss,
        )
