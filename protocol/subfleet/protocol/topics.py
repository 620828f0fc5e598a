"""Topics: the only module that builds or parses topic strings.

    subfleet/1/<fleet>/all/<kind>                server to everyone, retained; "claim" is for other servers
    subfleet/1/<fleet>/down/<client>/<kind>      server to one device; "task" is retained
    subfleet/1/<fleet>/up/<client>/<kind>        one device to the server; "presence" and "profile" are
                                                 retained, and "claim", which is for other devices of that id
    subfleet/1/<fleet>/up/<client>/check/<what>  a client that tests the broker, to itself

A broker's access list needs three rules: a device reads `all/#` and `down/<its id>/#`, and reads and writes
`up/<its id>/#`. The payload of kind "chunk" is binary; all others are JSON.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from subfleet.protocol.bounds import Condition
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.identifiers import check_client_id

CHUNK = "chunk"
DEFAULT_FLEET = "main"
_FLEET = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORM = "1 to 64 letters, digits, '_', '.' or '-'"
FleetName = Annotated[str, Condition(accepts=lambda name: _FLEET.fullmatch(name) is not None, words=_FORM)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The parts of a topic: direction, device (empty for "all") and message kind."""

    direction: Literal["all", "down", "up"]
    client_id: str
    kind: str


class Topics:
    """Builds and parses the topics of one fleet.

    Raises:
        ConfigError: the fleet's name is not 1 to 64 letters, digits, '_', '.' and '-'.
    """

    def __init__(self, fleet: str = DEFAULT_FLEET) -> None:
        if _FLEET.fullmatch(fleet) is None:
            raise ConfigError(f"fleet name {fleet!r:.80} must be {_FORM}")
        self._root = f"subfleet/1/{fleet}"

    def all(self, kind: str) -> str:
        """Make the topic from the server to everyone."""
        return f"{self._root}/all/{kind}"

    def downlink(self, client_id: str, kind: str) -> str:
        """Make the topic from the server to one device; kind `+` subscribes to all kinds."""
        return f"{self._root}/down/{client_id}/{kind}"

    def uplink(self, client_id: str, kind: str) -> str:
        """Make the topic from one device to the server; `+` subscribes to all clients or kinds."""
        return f"{self._root}/up/{client_id}/{kind}"

    def check(self, name: str, what: str) -> str:
        """Make a topic from a client to itself; nobody else reads it."""
        return f"{self._root}/up/{name}/check/{what}"

    def parse(self, topic: str) -> Address:
        """Parse a topic of this fleet.

        Raises:
            ProtocolError: the topic does not belong to this fleet.
        """
        parts = topic.removeprefix(f"{self._root}/").split("/") if topic.startswith(f"{self._root}/") else []
        if len(parts) == 2 and parts[0] == "all":
            return Address(direction="all", client_id="", kind=parts[1])
        if len(parts) == 3 and parts[0] in ("down", "up"):
            direction: Literal["down", "up"] = "down" if parts[0] == "down" else "up"
            return Address(direction=direction, client_id=check_client_id(parts[1]), kind=parts[2])
        raise ProtocolError(f"topic {topic!r:.120} is not one of {self._root}")
