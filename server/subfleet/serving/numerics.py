"""What the requests of a run are handled with: the programs, the model and its aggregation, or accounts of them."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from subfleet.aggregation.checking import Checker
from subfleet.aggregation.devices import compute_device
from subfleet.aggregation.path_scoring import score_generation
from subfleet.aggregation.round_aggregator import RoundAggregator
from subfleet.aggregation.update_ranges import UpdateRanges
from subfleet.aggregation.views import Views
from subfleet.elastic.model_state import ModelState
from subfleet.export.quantisation.models import samples_of
from subfleet.journal.base import RunJournal
from subfleet.journal.places import Places
from subfleet.programs.supply import Exports, Supply
from subfleet.programs.worker import Handler, Threads
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.rounds import signals
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import choose_networks
from subfleet.rounds.sizing import explore_sizes
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest, GenerationRequest, NetworksRequest, SearchRequest
from subfleet.serving.loading import load_model
from subfleet.tasks import Dataset
from subfleet.transport.blob_store import BlobStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What numerics work with.

    Attributes:
        context: of the run.
        places: folders of the server.
        blobs: what devices fetch, and their updates.
        threads: run the work, with a lane for each kind.
        exports: the exporter.
        evaluation: evaluation data without validation samples.
        validation: validation samples, if there are any.
    """

    context: RunContext
    places: Places
    blobs: BlobStore
    threads: Threads
    exports: Exports
    evaluation: Dataset
    validation: Dataset | None


class Numerics(Protocol):
    """Handles the requests of a run. The model belongs to the thread of the server's loop."""

    @property
    def duties(self) -> Mapping[type, Handler]:
        """The handlers, by the type of the request."""
        ...

    @property
    def digests(self) -> Set[str]:
        """Digests of every blob that tasks may still need."""
        ...

    def load(self, state: RunState, journal: RunJournal) -> ModelState:
        """The model of a state, from which tasks are prepared from now on.

        Raises:
            FileError: it is missing, or has changed.
            ConfigError: the first weights belong to another network.
        """
        ...

    def adopt(self) -> ModelState:
        """The model of the round that was aggregated last, from which tasks are prepared from now on."""
        ...


def decide(threads: Threads, context: RunContext) -> Mapping[type, Handler]:
    """The handlers of requests that are decisions: they need no model."""

    def search(work: Callable[[RunContext, RunState], Any]) -> Handler:
        function = threads.work("search", lambda _, state, __: work(context, state))
        return Handler(work=function, failure="the search failed")

    return {SearchRequest: search(explore_sizes), NetworksRequest: search(choose_networks)}


class ModelNumerics:
    """See `Numerics`: models are trained by devices, aggregated and evaluated.

    Args:
        means: what it works with.
    """

    def __init__(self, means: Means) -> None:
        self._means, context = means, means.context
        self._device = compute_device(context.config.device)
        views = Views(context=context, samples=torch.from_numpy(means.evaluation.inputs.copy()))
        quantised = context.config.deploy_quantisation != "none"
        self._supply = Supply(
            views,
            means.exports,
            means.threads,
            blobs=means.blobs,
            models_folder=means.places.models / context.run_id,
            samples_sha256=samples_of(means.evaluation).sha256 if quantised else "",
        )
        self._ranges = UpdateRanges()
        self._aggregator = RoundAggregator(
            views, means.blobs, means.evaluation, checkpoints=means.places.checkpoints, ranges=self._ranges
        )

    @property
    def duties(self) -> Mapping[type, Handler]:
        """See `Numerics.duties`."""
        context, threads, validation = self._means.context, self._means.threads, self._means.validation
        checker = Checker(context, self._means.blobs, self._ranges)

        def generate(_: GenerationRequest, state: RunState, model: ModelState) -> Any:
            return score_generation(context, state, model, validation)

        return {
            **self._supply.duties,
            **decide(threads, context),
            GenerationRequest: Handler(work=threads.work("search", generate), failure="the search failed"),
            CheckRequest: Handler(
                work=threads.work("check", checker.check),
                failure="it could not be checked",
                reasons=(ProtocolError, FileError),
            ),
            signals.AggregationRequest: Handler(
                work=threads.work("aggregate", self._aggregator.aggregate),
                failure="aggregation failed",
                needs_disk=True,
            ),
        }

    @property
    def digests(self) -> Set[str]:
        """See `Numerics.digests`."""
        return self._supply.digests

    def load(self, state: RunState, journal: RunJournal) -> ModelState:
        """See `Numerics.load`."""
        means = self._means
        sorting = means.evaluation if means.validation is None else means.validation
        model = load_model(means.context, state, journal, means.places.checkpoints, sorting).to(self._device)
        self._supply.renew(model)
        return model

    def adopt(self) -> ModelState:
        """See `Numerics.adopt`."""
        self._supply.renew(self._aggregator.model)
        return self._aggregator.model
