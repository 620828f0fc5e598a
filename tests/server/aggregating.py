"""Aggregates client updates as the server does at the end of a round."""

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


def aggregate_clients(  # noqa: PLR0917 - the fields of a request
    context: RunContext,
    blobs: BlobStore,
    state: ModelState,
    round_number: int,
    clients: Sequence[ClientState],
    memory: Any = None,
    lineages: tuple[Lineage, ...] = (),
    brought: tuple[AnyFamily, ...] = (),
) -> AggregatedModel:
    """Return the model after a round, from the request that the coordinator would make."""
    request = AggregationRequest(
        round=round_number, clients=tuple(clients), memory=memory, lineages=lineages, brought=brought
    )
    return aggregate_model(context, blobs, state, request)
