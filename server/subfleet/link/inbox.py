"""From a delivery to what it means: the only place of the server that reads what devices send."""

from collections.abc import Callable
from typing import cast, get_args

from subfleet.protocol.blobs import Chunk, decode_chunk
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Ack, BlobMissing, ChunkRequest, Claim, decode
from subfleet.protocol.plausible import plausible
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.rounds.events import FromDevice
from subfleet.transport.base import Delivery

__all__ = ["Incoming", "read_delivery"]

Incoming = FromDevice | Ack | ChunkRequest | BlobMissing | Chunk

_KINDS = frozenset(message.KIND for message in get_args(FromDevice | Ack | ChunkRequest | BlobMissing))
"""Of the control messages that a device may send."""
_NOBODY = "a sender without an id"


def read_delivery(
    topics: Topics, delivery: Delivery, complain: Callable[[str, str], None]
) -> tuple[str, Incoming] | None:
    """The sender and what it says; None, with a complaint of that sender, for anything that is not valid.

    A device can only speak for itself: the id in a message must be the one in its topic, which a broker's access list
    guards. And it must speak now: what a broker has kept for us tells of a time before, maybe of a device that is gone
    for ever. Who is there says so again with its next heartbeat.
    """
    if delivery.retained or not delivery.payload:  # an empty one clears what was kept
        return None
    try:
        return _read(topics, delivery)
    except ProtocolError as error:
        complain(_sender(topics, delivery), f"dropped a message on {delivery.topic[:120]}: {error}")
        return None


def _sender(topics: Topics, delivery: Delivery) -> str:
    try:
        address = topics.parse(delivery.topic)
    except ProtocolError:
        return _NOBODY
    return address.client_id or _NOBODY


def _read(topics: Topics, delivery: Delivery) -> tuple[str, Incoming] | None:
    address = topics.parse(delivery.topic)
    if address.direction != "up":
        raise ProtocolError(f"topic {delivery.topic!r:.120} is not one of the devices'")
    if address.kind == Claim.KIND:
        return None  # devices of one id settle that among themselves
    if address.kind == CHUNK:
        return address.client_id, decode_chunk(delivery.payload)
    if address.kind not in _KINDS:
        raise ProtocolError(f"a device sends no message of kind {address.kind!r:.80}")
    message = cast("FromDevice | Ack | ChunkRequest | BlobMissing", decode(delivery.payload, expected=address.kind))
    speaker = getattr(message, "client_id", address.client_id)
    if speaker != address.client_id:
        raise ProtocolError(f"client {address.client_id} speaks for client {speaker!r:.80}")
    return address.client_id, plausible(message)
