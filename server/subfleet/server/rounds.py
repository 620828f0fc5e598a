"""The state of a run, what can happen to it and what is then to be done: plain data for `coordinator`.

    waiting --> measure    enough clients are there        (failed: not within the join deadline)
    measure --> train      all have answered, or deadline  (waiting: nobody has; failed: for the join deadline)
    train   --> fold       all have answered, quorum, or deadline
    fold    --> waiting    the new model is on disk        (rounds are left)
    waiting --> deploy     no round is left
    deploy  --> finished   all have their models, or deadline

A client's seat in a round:

    answered  --> preparing  a subnet was chosen              (skipped: none fits, not available, ...)
    preparing --> out        its program fits and is sent     (preparing: a smaller one; skipped: none is left)
    out       --> done       its update is stored             (refused; missing at the deadline)
    out       --> preparing  refused for memory: a smaller task
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.network import Network
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Deployed, Presence, Profile, Receipt, Refusal, Task, Telemetry, Update
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.server.assignment import Candidate
from subfleet.server.config import ServerConfig
from subfleet.server.methods.policies import Participant, Policies

__all__ = [
    "Action",
    "Close",
    "DeployPrepared",
    "Event",
    "Fetch",
    "Fold",
    "Folded",
    "Heard",
    "KnownPlan",
    "Measured",
    "Member",
    "ModelFile",
    "Phase",
    "Plan",
    "Prepare",
    "PrepareFailed",
    "PrepareModels",
    "Prepared",
    "Profiled",
    "Refused",
    "Reply",
    "Reported",
    "RunState",
    "Seat",
    "SendTask",
    "Tick",
    "UpdateOffered",
    "UpdateRejected",
    "UpdateStored",
    "Withdraw",
]

Phase = Literal["waiting", "measure", "train", "fold", "deploy", "finished", "failed"]
Stage = Literal["answered", "preparing", "out", "done", "refused", "skipped", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What does not change during a run.

    Attributes:
        run_id: the configured name and a part that no other run has: devices remember what they did for a run.
        network: the declaration of the whole model.
        policies: of the configured method.
        candidates: the method's space with its costs, from smallest to largest.
        price: the cost of any subnet.
    """

    config: ServerConfig
    run_id: str
    network: Network
    policies: Policies
    candidates: tuple[Candidate, ...]
    price: Callable[[SubnetSpec], Candidate]

    @property
    def space(self) -> tuple[SubnetSpec, ...]:
        """The sizes that may be assigned, from smallest to largest."""
        return tuple(candidate.spec for candidate in self.candidates)

    def training(self, round_number: int) -> TrainingSettings:
        """The local training of a round."""
        return self.policies.training(self.config.training_of(round_number), round_number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client of the fleet, whether it takes part or not.

    Attributes:
        heard_s: monotonic time of its last sign of life; None where it said that it is gone or was never heard.
        absent: it was missing when telemetry was due and has not been heard since.
    """

    profile: Profile | None = None
    session_id: str = ""
    heard_s: float | None = None
    absent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One inference model of a client.

    Attributes:
        file: its path.
        max_abs_diff: largest difference from PyTorch; None where the exporter did not tell.
        quantised_accuracy: of a model in 8-bit integers, on evaluation samples; else None.
        float_accuracy: of the same model in float32, on the same samples.
    """

    target: str
    file: str
    max_abs_diff: float | None
    quantised_accuracy: float | None = None
    float_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One client's place in a round.

    Attributes:
        attempt: how many tasks it was given before in this round.
        class_counts: samples of each class in the client's data.
        size: what it was given, kept at the front of every axis; None before one is chosen.
        spec: the same, as placed in the model.
        student: the nested subnet of self-distillation; None where there is none.
        reason: why it was refused, skipped or is missing.
        task: what was sent to it, kept so that it is sent again unchanged.
        result: its accepted update.
        models: its inference models, in the deploy phase.
    """

    client_id: str
    device: str
    stage: Stage
    runtime: str = ""
    budget: Budget | None = None
    memory_free_bytes: int | None = None
    memory_budget_bytes: int = 0
    attempt: int = 0
    class_counts: tuple[int, ...] = ()
    size: SubnetSpec | None = None
    spec: SubnetSpec | None = None
    student: SubnetSpec | None = None
    reason: str = ""
    task: Task | None = None
    result: Update | None = None
    models: tuple[ModelFile, ...] = ()

    @property
    def open(self) -> bool:
        """Whether an answer of this client is still awaited."""
        return self.stage in ("preparing", "out")

    @property
    def participant(self) -> Participant | None:
        """The client with its subnet; None before one is chosen."""
        if self.size is None or self.spec is None:
            return None
        return Participant(client_id=self.client_id, spec=self.spec, size=self.size, class_counts=self.class_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """What a written program needs.

    Attributes:
        planned_peak_bytes: from its manifest.
        round: in which it was learned; later rounds may count on it, whatever came first within the round.
    """

    planned_peak_bytes: int
    round: int


def _nothing() -> Mapping[str, "Seat"]:
    return MappingProxyType({})


def _nobody() -> Mapping[str, Member]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands. Everything but `members`, `entered_s` and `opened_s` survives a crash.

    Attributes:
        round: the open or last round; 0 before the first.
        folded_round: the round whose model is the current one; 0 is the initial model.
        entered_s: monotonic time at which the phase began.
        opened_s: monotonic time at which the round was first announced.
        seats: of the open round, or of the deploy phase, by client.
        last: each client's seat in the last round that folded it: from it follows the model it is given.
        pool: sizes that the method's search has found so far, in the order in which they were found.
        plans: of the programs written so far, by target and size's id, as "onnx/0123456789abcdef".
        settled: tasks of the last closed round whose updates were accepted, to answer their repetitions.
        failure: why the run failed.
    """

    round: int = 0
    folded_round: int = 0
    phase: Phase = "waiting"
    entered_s: float = 0.0
    opened_s: float = 0.0
    members: Mapping[str, Member] = field(default_factory=_nobody)
    seats: Mapping[str, Seat] = field(default_factory=_nothing)
    last: Mapping[str, Seat] = field(default_factory=_nothing)
    pool: tuple[SubnetSpec, ...] = ()
    plans: Mapping[str, KnownPlan] = field(default_factory=lambda: MappingProxyType({}))
    settled: frozenset[str] = frozenset()
    failure: str = ""


# Events: what can happen.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A client's presence: a heartbeat, or its will."""

    presence: Presence


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A client says what it is."""

    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A client says what it can give."""

    telemetry: Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A task's program and weights are ready. `attempt` and `size_id` tell for which choice."""

    client_id: str
    round: int
    attempt: int
    size_id: str
    program: ProgramRef
    weights: BlobRef
    planned_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployPrepared:
    """A client's inference models are ready."""

    client_id: str
    programs: tuple[ProgramRef, ...]
    models: tuple[ModelFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFailed:
    """A program or model could not be made."""

    client_id: str
    round: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A client does not do its task."""

    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOffered:
    """A client has an update; its blob is still on the device."""

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStored:
    """The update's blob is on disk, synced and checked."""

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRejected:
    """The update's blob is not what it should be."""

    update: Update
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The round's updates are folded, the new model is on disk.

    Attributes:
        refused: clients whose update could not be folded after all, and why.
    """

    round: int
    accuracy: float
    loss: float
    sha256: str
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A client has its models."""

    deployed: Deployed


Event = (
    Tick
    | Heard
    | Profiled
    | Measured
    | Prepared
    | DeployPrepared
    | PrepareFailed
    | Refused
    | UpdateOffered
    | UpdateStored
    | UpdateRejected
    | Folded
    | Reported
)


# Actions: what is to be done. Each may be done twice.


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
class PrepareModels:
    """Export the client's own models for inference; answer with DeployPrepared or PrepareFailed."""

    participant: Participant
    round: int

    @property
    def client_id(self) -> str:
        """Whose models they are."""
        return self.participant.client_id


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
    """A round is over: record it."""

    round: int
    accuracy: float
    loss: float
    sha256: str
    seconds: float
    seats: tuple[Seat, ...]


Action = Prepare | PrepareModels | SendTask | Withdraw | Reply | Fetch | Fold | Close
