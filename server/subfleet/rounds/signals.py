"""The inputs (events) and outputs (actions) of a step of the run: plain data for `coordinator`.

Every action may be performed twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.methods.run_networks import Generation
from subfleet.protocol.answers import Answer
from subfleet.protocol.messages import Ack, Presence, Profile, RoundInfo, Task, Telemetry
from subfleet.rounds import work
from subfleet.rounds.live import GenerationScores, Survey
from subfleet.rounds.state import ClientState, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationRequest:
    """Aggregate the updates of these clients into the next model. Results in `AggregatedRound`.

    Attributes:
        memory: the method's memory.
        lineages: the lineages of the run's networks.
        brought: networks of the round's clients that are not in a union model yet.
    """

    round: int
    clients: tuple[ClientState, ...]
    memory: Any = None
    lineages: tuple[Lineage, ...] = ()
    brought: tuple[AnyFamily, ...] = ()


Request = (
    work.TaskRequest
    | work.ScoringRequest
    | work.EvaluationRequest
    | work.ModelsRequest
    | work.ProgramRequest
    | work.CostRequest
    | work.SearchRequest
    | work.NetworksRequest
    | work.GenerationRequest
    | work.CheckRequest
    | AggregationRequest
)
"""Work beside the loop; `RequestDone` or `RequestFailed` answers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """Take the next step without waiting, because it may decide more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Send an announcement to one client, until its telemetry arrives or the announcement's deadline is over."""

    client_id: str
    info: RoundInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTask:
    """Send a task until it is acknowledged."""

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
        result: the result of its aggregation.
        seconds: from its announcement until it was closed.
        idle: numbers of further clients that had nothing to do, by the reason.
        exported: programs that were written in it.
        run_attempt: number of this attempt, counted over the whole run.
        failed_attempts: attempts of the round that aggregated nothing.
        lineages: the lineages of the networks that the run had when the round began.
    """

    round: int
    result: work.AggregatedRound
    seconds: float
    clients: tuple[ClientState, ...]
    idle: Mapping[str, int]
    exported: int = 0
    run_attempt: int = 0
    failed_attempts: int = 0
    lineages: tuple[Lineage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseEvaluation:
    """The evaluation by devices after a round is over: record it.

    Attributes:
        lineages: the lineages of the run's networks.
    """

    round: int
    seconds: float
    clients: tuple[ClientState, ...]
    lineages: tuple[Lineage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGeneration:
    """A generation of a search between rounds has been scored: record it.

    Attributes:
        round: the round that the search follows.
        scores: the scores of its paths.
        devices: the scoring by devices; None if the server scored.
    """

    round: int
    generation: Generation
    scores: tuple[float, ...]
    seconds: float
    devices: GenerationScores | None = None


AnyClose = Close | CloseEvaluation | CloseGeneration
Action = Request | GoOn | Ask | SendTask | Withdraw | Reply | AnyClose


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    """Work beside the loop is done.

    Attributes:
        result: of the type that the docstring of the request names.
    """

    request: Request
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """Work beside the loop has failed.

    Attributes:
        by_disk: the server's own disk is the cause, so that neither another attempt nor other clients would help.
    """

    request: Request
    reason: str
    by_disk: bool = False


FromDevice = Presence | Profile | Telemetry | Answer
"""Messages of devices. An `Update` only announces its blob, which is still on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Clients have appeared together: what their presence and profiles say."""

    profiles: tuple[Profile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """Clients have answered an announcement together."""

    survey: Survey


Arrival = FromDevice | Joined | Surveyed
"""What comes from devices: from one of them, or from a fleet in the server's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What has arrived together, in order. The state moves on once all of it has been applied."""

    messages: tuple[Arrival, ...]


SingleEvent = Arrival | Tick | RequestDone | RequestFailed
Event = SingleEvent | Messages

Outcome = tuple[RunState, tuple[Action, ...]]
"""The next state, and the actions that follow."""
ClientOutcome = tuple[ClientState, tuple[Action, ...]]
"""The next state of one client, and the actions that follow."""
