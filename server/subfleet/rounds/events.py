"""What can happen to a run: plain data for `coordinator`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.lineage import Lineage
from subfleet.methods.model_kinds import EvaluatedModel
from subfleet.protocol.messages import Deployed, Evaluated, Presence, Profile, Refusal, Scores, Telemetry, Update
from subfleet.rounds.requests import Made, Wanted
from subfleet.rounds.suspicion import ChangeSize

__all__ = [
    "Event",
    "Failed",
    "Folded",
    "FromDevice",
    "FromServer",
    "NotFolded",
    "Ready",
    "Tick",
    "UpdateRejected",
    "UpdateStored",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


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
        accuracy: of the new model on the evaluation data, as are loss and metrics; None where that means nothing.
        model: the one that they describe.
        refused: clients whose update could not be folded after all, and why.
        found: what the method found in the updates, see `Memory.observe`.
        lineages: of the networks that the run has had, with what became of them after the round.
        model_bytes: of all tensors that the server has to keep for the next round.
        metrics: of its kind of task, by name, without accuracy.
        guess_loss: that of knowing nothing of the inputs; None where the number of classes says it.
    """

    round: int
    accuracy: float | None
    loss: float
    sha256: str
    refused: Mapping[str, str]
    found: Any = None
    lineages: tuple[Lineage, ...] = ()
    model_bytes: int = 0
    model: EvaluatedModel | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    guess_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFolded:
    """The round's updates could not be folded, or what comes of them could not be evaluated."""

    round: int
    reason: str


FromDevice = Presence | Profile | Telemetry | Scores | Refusal | Update | Evaluated | Deployed
"""What devices say: of an update, that it is there; its blob is still on the device."""
FromServer = Tick | Ready | Failed | UpdateStored | UpdateRejected | Folded | NotFolded
"""What happens at the server."""
Event = FromDevice | FromServer
