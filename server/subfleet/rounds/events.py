"""What can happen to a run: plain data for `coordinator`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from subfleet.protocol.messages import Deployed, Presence, Profile, Refusal, Scores, Telemetry, Update
from subfleet.rounds.requests import Made, Wanted
from subfleet.rounds.suspicion import ChangeSize

__all__ = [
    "Event",
    "Failed",
    "Folded",
    "FromDevice",
    "FromServer",
    "Heard",
    "Measured",
    "Profiled",
    "Ready",
    "Refused",
    "Reported",
    "Scored",
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
class Ready:
    """What was asked for is made."""

    made: Made


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """What was asked for cannot be made."""

    wanted: Wanted
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A client has scored its candidates."""

    scores: Scores


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


FromDevice = Heard | Profiled | Measured | Scored | Refused | UpdateOffered | Reported
"""What devices say."""
FromServer = Tick | Ready | Failed | UpdateStored | UpdateRejected | Folded
"""What happens at the server."""
Event = FromDevice | FromServer
