"""What is then to be done: plain data for `session`. Each may be done twice."""

from dataclasses import dataclass

from subfleet.methods.policies import Participant
from subfleet.protocol.messages import Receipt, Task, Update
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.state import Queued, Seat

__all__ = [
    "Action",
    "Close",
    "Export",
    "Fetch",
    "Fold",
    "Prepare",
    "PrepareModels",
    "PrepareScoring",
    "Reply",
    "SendTask",
    "Withdraw",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Export the size's program, extract the subnet's weights; answer with Prepared or PrepareFailed."""

    participant: Participant
    round: int
    attempt: int
    target: str
    student: SubnetSpec | None = None

    @property
    def client_id(self) -> str:
        """Whose task it is."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareScoring:
    """Export programs that score these sizes, extract their first weights; answer with ScoringPrepared."""

    client_id: str
    round: int
    target: str
    sizes: tuple[SubnetSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareModels:
    """Export the client's own models for inference; answer with DeployPrepared or PrepareFailed."""

    participant: Participant
    round: int

    @property
    def client_id(self) -> str:
        """Whose models they are."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Write a program for later rounds; answer with Exported."""

    queued: Queued
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTask:
    """Send a task until its receipt comes."""

    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Stop sending a task."""

    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Send a receipt."""

    client_id: str
    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Pull an update's blob; answer with UpdateStored or UpdateRejected."""

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Fold these updates, in this order, into the model; answer with Folded."""

    round: int
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A round is over: record it. `exported` programs were written in it, and `retries` tries of it came to nothing."""

    round: int
    accuracy: float
    loss: float
    sha256: str
    seconds: float
    seats: tuple[Seat, ...]
    exported: int = 0
    turn: int = 0
    retries: int = 0


Action = Prepare | PrepareScoring | PrepareModels | Export | SendTask | Withdraw | Reply | Fetch | Fold | Close
