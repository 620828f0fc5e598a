"""The slow part of a round, beside the loop: aggregate, evaluate, write the checkpoint."""

import logging
from pathlib import Path
from types import MappingProxyType

from subfleet.aggregation.aggregation import aggregate_model
from subfleet.aggregation.calibration import calibrate_model
from subfleet.aggregation.checkpoint import save_checkpoint
from subfleet.aggregation.examining import Examiner
from subfleet.aggregation.views import Views
from subfleet.elastic.model_state import ModelState, pack_state
from subfleet.protocol.errors import FileError
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound
from subfleet.tasks import Dataset
from subfleet.transport.blob_store import BlobStore

_LOG = logging.getLogger(__name__)


class RoundAggregator:
    """Aggregates one round after the other.

    Args:
        views: what clients see of a model.
        blobs: where updates are stored.
        evaluation: held-out samples, in the shape that the model takes.
        checkpoints: folder of the models.
    """

    def __init__(self, views: Views, blobs: BlobStore, evaluation: Dataset, *, checkpoints: Path) -> None:
        self._context = views.context
        self._blobs = blobs
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
        aggregate = calibrate_model if self._context.config.calibrates(request.round) else aggregate_model
        aggregated = aggregate(self._context, self._blobs, model, request)
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
