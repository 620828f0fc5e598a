"""What a step asks the server to do: plain data for `session`. Each may be done twice."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.methods.aggregator import EvaluatedModel
from subfleet.methods.run_networks import Generation
from subfleet.protocol.messages import Ack, Task
from subfleet.rounds.live import GenerationScores
from subfleet.rounds.state import ClientState
from subfleet.rounds.work import (
    CheckRequest,
    CostRequest,
    EvaluationRequest,
    GenerationRequest,
    ModelsRequest,
    NetworksRequest,
    ProgramRequest,
    ScoringRequest,
    SearchRequest,
    TaskRequest,
)

__all__ = [
    "Action",
    "AggregationRequest",
    "Close",
    "CloseEvaluation",
    "CloseGeneration",
    "GoOn",
    "Reply",
    "Request",
    "SendTask",
    "Withdraw",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationRequest:
    """Aggregate the updates of these clients into the next model. Results in `AggregatedRound`.

    Attributes:
        memory: what the method remembers.
        lineages: of the networks that the run has had.
        brought: networks of the round's clients that are not in the union model yet.
    """

    round: int
    clients: tuple[ClientState, ...]
    memory: Any = None
    lineages: tuple[Lineage, ...] = ()
    brought: tuple[AnyFamily, ...] = ()


Request = (
    TaskRequest
    | ScoringRequest
    | EvaluationRequest
    | ModelsRequest
    | ProgramRequest
    | CostRequest
    | SearchRequest
    | NetworksRequest
    | GenerationRequest
    | CheckRequest
    | AggregationRequest
)
"""Work beside the loop; `Done` or `Failed` answers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """More is to be decided: let the next step wait for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTask:
    """Send a task until its ack comes."""

    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Stop sending a task."""

    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Send an ack."""

    client_id: str
    ack: Ack


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A round is over: record it.

    Attributes:
        exported: programs that were written in it.
        retries: of its tries, those that came to nothing.
        lineages: of the networks that the run had had when it began.
        model_bytes: of all tensors that the server has to keep for the next round.
        accuracy: as in `AggregatedRound`, as are loss, metrics and model.
    """

    round: int
    accuracy: float | None
    loss: float
    sha256: str
    seconds: float
    clients: tuple[ClientState, ...]
    exported: int = 0
    turn: int = 0
    retries: int = 0
    lineages: tuple[Lineage, ...] = ()
    model_bytes: int = 0
    model: EvaluatedModel | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseEvaluation:
    """The devices' evaluation after a round is over: record it.

    Attributes:
        lineages: of the networks that the run has had.
    """

    round: int
    seconds: float
    clients: tuple[ClientState, ...]
    lineages: tuple[Lineage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGeneration:
    """A generation of a search between rounds has been scored: record it.

    Attributes:
        round: after which it was.
        scores: of its paths, which the search goes by.
        devices: what devices told, where they scored; None where the server did.
    """

    round: int
    generation: Generation
    scores: tuple[float, ...]
    seconds: float
    devices: GenerationScores | None = None


Action = Request | GoOn | SendTask | Withdraw | Reply | Close | CloseEvaluation | CloseGeneration
