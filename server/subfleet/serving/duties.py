"""The functions that do the server's requests, except those that supply tasks."""

from collections.abc import Callable, Mapping
from typing import Any

from subfleet.aggregation.checking import Checker
from subfleet.aggregation.path_scoring import score_generation
from subfleet.aggregation.round_aggregator import RoundAggregator
from subfleet.elastic.model_state import ModelState
from subfleet.programs.worker import Handler, Threads
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import choose_networks
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.sizing import explore_sizes
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest, GenerationRequest, NetworksRequest, SearchRequest
from subfleet.tasks import Dataset


def build_duties(
    context: RunContext,
    threads: Threads,
    aggregator: RoundAggregator,
    checker: Checker,
    validation: Dataset | None = None,
) -> Mapping[type, Handler]:
    """The server's duties by type of request; `Supply.duties` has the others.

    Args:
        context: of the run.
        threads: run the work, with a lane for each kind.
        aggregator: of updates.
        checker: of updates.
        validation: samples on which paths of a supernet are scored, if there are any.
    """

    def of_search(work: Callable[[RunState, ModelState], Any]) -> Handler:
        function = threads.work("search", lambda _, state, model: work(state, model))
        return Handler(work=function, failure="the search failed")

    return {
        SearchRequest: of_search(lambda state, _: explore_sizes(context, state)),
        NetworksRequest: of_search(lambda state, _: choose_networks(context, state)),
        GenerationRequest: of_search(lambda state, model: score_generation(context, state, model, validation)),
        CheckRequest: Handler(
            work=threads.work("check", checker.check),
            failure="it could not be checked",
            reasons=(ProtocolError, FileError),
        ),
        AggregationRequest: Handler(
            work=threads.work("aggregate", aggregator.aggregate), failure="aggregation failed", needs_disk=True
        ),
    }
