"""What can happen to a run: plain data for `coordinator`."""

from dataclasses import dataclass
from typing import Any

from subfleet.protocol.messages import Deployed, Evaluated, Presence, Profile, Refusal, Scores, Telemetry, Update
from subfleet.rounds.actions import Request

__all__ = ["Done", "Event", "Failed", "FromDevice", "FromServer", "Tick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Work beside the loop is done.

    Attributes:
        result: of the type that the docstring of the request names.
    """

    request: Request
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Work beside the loop cannot be done.

    Attributes:
        by_disk: the server's own disk is to blame, so that neither another attempt nor other clients would help.
    """

    request: Request
    reason: str
    by_disk: bool = False


FromDevice = Presence | Profile | Telemetry | Scores | Refusal | Update | Evaluated | Deployed
"""What devices say: of an update, that it is there; its blob is still on the device."""
FromServer = Tick | Done | Failed
"""What happens at the server."""
Event = FromDevice | FromServer
