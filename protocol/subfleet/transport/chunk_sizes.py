"""The chunk size that a broker accepts, learned while blobs are fetched, and remembered per broker."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from subfleet.protocol.blobs import CHUNK_BYTES, LEAST_CHUNK_BYTES, chunk_bytes_within
from subfleet.protocol.disks import write_atomically

_LOG = logging.getLogger(__name__)
KNOWN_BROKERS = "brokers.json"
"""Name of the file in a device's or a server's folder."""
_REMEMBERED_S = 7 * 24 * 3600.0  # limits are raised, and a link may just have been slow
_MAX_FILE_BYTES = 64 * 1024
_MAX_BROKERS = 64
_SIZES = frozenset(CHUNK_BYTES >> halvings for halvings in range(5))


class KnownBroker:
    """The remembered chunk size of one broker, in a file with all brokers.

    The file only saves time: an unreadable file counts as empty, and a failed write is not an error.

    Args:
        path: the file.
        broker: host and port.
        unix_time: seconds since 1970.
    """

    def __init__(self, path: Path, broker: str, unix_time: Callable[[], float] = time.time) -> None:
        self._path = path
        self._broker = broker
        self._unix_time = unix_time

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk that passed; CHUNK_BYTES if unknown or older than a week."""
        known = self._read().get(self._broker)
        size, since_s = (known.get("chunk_bytes"), known.get("since_s")) if isinstance(known, dict) else (None, None)
        if not isinstance(size, int) or size not in _SIZES or not isinstance(since_s, (int, float)):
            return CHUNK_BYTES
        return size if abs(self._unix_time() - since_s) < _REMEMBERED_S else CHUNK_BYTES

    def remember(self, chunk_bytes: int) -> None:
        """Remember the size of the chunks that pass."""
        known = dict(list(self._read().items())[-_MAX_BROKERS + 1 :])
        known.pop(self._broker, None)
        known[self._broker] = {"chunk_bytes": chunk_bytes, "since_s": round(self._unix_time())}
        try:
            write_atomically(self._path, [json.dumps(known).encode()])
        except OSError as error:
            _LOG.debug("the broker's chunk size cannot be saved: %s", error)

    def _read(self) -> dict[str, object]:
        try:
            with self._path.open("rb") as file:
                known = json.loads(file.read(_MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}


class ChunkSizes:
    """The size of the chunks that one side requests and sends. Not thread-safe.

    Args:
        begin_bytes: the first size: CHUNK_BYTES, or a half, quarter ... of it.
        remember: called with each new size.
        say: called with a message if chunks become smaller.
    """

    def __init__(
        self,
        begin_bytes: int = CHUNK_BYTES,
        *,
        remember: Callable[[int], None] = lambda _: None,
        say: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self.chunk_bytes = begin_bytes
        self.proven_bytes = 0
        self._limit_bytes = CHUNK_BYTES
        self._remember = remember
        self._say = say

    @classmethod
    def from_broker(cls, broker: KnownBroker) -> "ChunkSizes":
        """Start with the remembered size of a broker, and remember changes."""
        return cls(broker.chunk_bytes, remember=broker.remember)

    def set_proven(self, chunk_bytes: int) -> None:
        """Set the largest chunk that passed a test."""
        self.proven_bytes = chunk_bytes
        if chunk_bytes != self.chunk_bytes:
            self.chunk_bytes = min(chunk_bytes, self._limit_bytes)
            self._remember(self.chunk_bytes)

    def limit(self, message_bytes: int | None) -> None:
        """Set the broker's limit on a whole message; None means no known limit."""
        self._limit_bytes = CHUNK_BYTES if message_bytes is None else chunk_bytes_within(message_bytes)
        self.chunk_bytes = min(self.chunk_bytes, self._limit_bytes)

    def learn(self, length: int, asked_bytes: int) -> None:
        """Learn from a received chunk.

        Args:
            length: bytes of its content.
            asked_bytes: the size that its transfer requests; below `chunk_bytes` if larger ones did not pass.
        """
        if length < LEAST_CHUNK_BYTES:
            return  # such a chunk passes every broker
        size = _find_largest(length)
        self.proven_bytes = max(self.proven_bytes, size)
        if length != asked_bytes and size <= self.chunk_bytes:
            return  # the last chunk of a blob is shorter anyway
        size_bytes = min(self.proven_bytes, self._limit_bytes)
        if size_bytes > self.chunk_bytes or asked_bytes < self.chunk_bytes:
            self._change(size_bytes)

    def _change(self, size: int) -> None:
        if size == self.chunk_bytes:
            return
        if size < self.chunk_bytes:
            self._say(
                f"this broker delivers no chunks of {self.chunk_bytes} bytes; chunks of {size} bytes are sent from now "
                "on, which is slower; raise its message limit to at least 64 KiB"
            )
        self.chunk_bytes = size
        self._remember(size)


def _find_largest(length: int) -> int:
    """Find the largest chunk size up to a length."""
    return max(size for size in _SIZES if size <= length)
