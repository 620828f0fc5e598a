"""Names of clients and messages, and bounds of names."""

import re
import uuid
from typing import Annotated

from subfleet.protocol.bounds import Condition
from subfleet.protocol.errors import ProtocolError

_CLIENT_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # it stands in topics and paths: neither ".." nor "-x"
_DIGEST = re.compile(r"[0-9a-f]{64}")

_FORM = "1 to 64 letters, digits, '_', '.' or '-', not '.' or '-' first"
ClientId = Annotated[str, Condition(accepts=lambda name: _CLIENT_ID.fullmatch(name) is not None, words=_FORM)]
NetworkId = Annotated[
    str, Condition(accepts=lambda name: not name or _CLIENT_ID.fullmatch(name) is not None, words=f"empty, or {_FORM}")
]
"""Empty for the run's first network."""
Digest = Annotated[
    str, Condition(accepts=lambda digest: _DIGEST.fullmatch(digest) is not None, words="64 hexadecimal digits")
]
"""A SHA-256."""
Printable = Condition(accepts=str.isprintable, words="made of printable characters")
"""For texts shown in terminals, which interpret control characters."""
Shown = Condition(accepts=lambda name: bool(name) and name.isprintable(), words="1 or more printable characters")


def check_client_id(client_id: str) -> str:
    """Return the id, or raise ProtocolError: 1 to 64 letters, digits, '_', '.' and '-', not '.' or '-' first."""
    if _CLIENT_ID.fullmatch(client_id) is None:
        raise ProtocolError(f"client id {client_id!r:.80} must be {_FORM}")
    return client_id


def make_message_id() -> str:
    """Make an id for a new message."""
    return uuid.uuid4().hex
