"""Names of clients and messages."""

import re
import uuid

from subfleet.protocol.errors import ProtocolError

__all__ = ["check_client_id", "new_message_id"]

_CLIENT_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # it stands in topics and paths: neither ".." nor "-x"


def check_client_id(client_id: str) -> str:
    """Return the id, or raise ProtocolError: 1 to 64 letters, digits, '_', '.' and '-', not '.' or '-' first."""
    if _CLIENT_ID.fullmatch(client_id) is None:
        raise ProtocolError(
            f"client id {client_id!r:.80} must be 1 to 64 letters, digits, '_', '.' or '-', not '.' or '-' first"
        )
    return client_id


def new_message_id() -> str:
    """A fresh id for a message."""
    return uuid.uuid4().hex
