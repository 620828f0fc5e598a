"""Aggregates the updates of clients, as the server does when a round asks for it."""

from collections.abc import Sequence
from typing import Any

from subfleet.aggregation.aggregation import AggregatedModel, aggregate_model
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.rounds.context import RunContext
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.state import ClientState
from subfleet.transport.blob_store import BlobStore


def aggregate_clients(  # noqa: PLR0917 - as a request has them
    context: RunContext,
    blobs: BlobStore,
    state: ModelState,
    round_number: int,
    clients: Sequence[ClientState],
    memory: Any = None,
    lineages: tuple[Lineage, ...] = (),
    brought: tuple[AnyFamily, ...] = (),
) -> AggregatedModel:
    """The model after a round, by the request that the coordinator makes."""
    request = AggregationRequest(
        round=round_number, clients=tuple(clients), memory=memory, lineages=lineages, brought=brought
    )
    return aggregate_model(context, blobs, state, request)
