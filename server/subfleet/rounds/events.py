"""What can happen to a run: plain data for `coordinator`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.memory import Packing
from subfleet.protocol.messages import Deployed, Presence, Profile, Refusal, Scores, Telemetry, Update
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.state import ModelFile, Queued
from subfleet.rounds.suspicion import ChangeSize

__all__ = [
    "DeployPrepared",
    "Event",
    "Exported",
    "Folded",
    "Heard",
    "Measured",
    "PrepareFailed",
    "Prepared",
    "Profiled",
    "Refused",
    "Reported",
    "Scorable",
    "Scored",
    "ScoringPrepared",
    "Tick",
    "UpdateOffered",
    "UpdateRejected",
    "UpdateStored",
]


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
    """A task's program and weights are ready. `attempt` and `size_id` tell for which choice.

    Attributes:
        operators: that the program's runtime must have; empty where it is not told.
        packings: what of the plan differs between processors.
    """

    client_id: str
    round: int
    attempt: int
    size_id: str
    program: ProgramRef
    weights: BlobRef
    planned_peak_bytes: int
    operators: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorable:
    """A candidate with the program and the weights that it is scored with, and what both plan to need."""

    size: SubnetSpec
    program: ProgramRef
    weights: BlobRef
    planned_peak_bytes: int
    packings: tuple[Packing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPrepared:
    """The candidates of a score task are ready, from smallest to largest; those without a program are left out."""

    client_id: str
    round: int
    candidates: tuple[Scorable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A client has scored its candidates."""

    scores: Scores


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
class Exported:
    """A queued program was written, or cannot be: then its plan is `NO_PROGRAM_BYTES`."""

    queued: Queued
    planned_peak_bytes: int
    operators: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()


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
    """The update's blob is on disk, synced and checked; and how far it moves what it trained."""

    update: Update
    change: ChangeSize = field(default_factory=ChangeSize)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRejected:
    """The update's blob is not what it should be."""

    update: Update
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The round's updates are folded, the new model is on disk; it counts once the round is closed.

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
    | ScoringPrepared
    | Scored
    | DeployPrepared
    | PrepareFailed
    | Exported
    | Refused
    | UpdateOffered
    | UpdateStored
    | UpdateRejected
    | Folded
    | Reported
)
