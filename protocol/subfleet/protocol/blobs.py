"""Blobs: anything larger than a control message, named by its SHA-256 and moved in chunks that the receiver pulls.

`BlobFetch` is the receiver's half as a pure state machine: it names the ranges it lacks, keeps at most a window of them
outstanding, asks again for what did not come, for less where nothing comes, and knows when it is complete. It touches
no file and no socket.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from subfleet.protocol.bounds import checked
from subfleet.protocol.errors import ProtocolError, TooLargeError
from subfleet.protocol.identifiers import Digest
from subfleet.protocol.limits import Count, Positive

MESSAGE_BYTES = 64 * 1024
"""Largest message including MQTT's headers: the smallest known limit of hosted brokers."""
CHUNK_BYTES = 60 * 1024
"""Content of a chunk, if the broker accepts messages of 64 KiB."""
LEAST_CHUNK_BYTES = CHUNK_BYTES // 16
"""Least content of a chunk: chunks are halved down to this if larger ones do not arrive. Received parts of a blob are
tracked in pieces of this size."""
_FRAME_BYTES = 256
"""Upper bound of a chunk's header, the longest topic (151) and MQTT's fields (8)."""
WINDOW_CHUNKS = 16
_LEAST_WINDOW_CHUNKS = 2
_MOST_WINDOW_CHUNKS = 64  # that one request may name
_BARREN = 2  # after this many requests in a row without an answer, smaller chunks are requested
_LONGEST_BACKOFF = 4
_LONGEST_PATIENCE_S = 60.0  # one long stall must not lead to endless waits
_CHUNK_HEADER = struct.Struct("<4s32sQ")
_CHUNK_MAGIC = b"SFC1"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class BlobRef:
    """The name and size of a blob.

    Attributes:
        sha256: 64 hexadecimal digits of the content's SHA-256.
        size_bytes: length of the content, 1 or more.
    """

    sha256: Digest
    size_bytes: Positive

    @staticmethod
    def of(content: bytes | memoryview) -> "BlobRef":
        """Make the reference of some content."""
        return BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ByteRange:
    """A range of a blob: `length` bytes from `offset` on."""

    offset: Count
    length: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some bytes of a blob and their offset."""

    sha256: str
    offset: int
    data: bytes | memoryview


def chunk_bytes_within(message_bytes: int) -> int:
    """Compute the largest chunk that fits a message of a given size, at least LEAST_CHUNK_BYTES."""
    size = CHUNK_BYTES
    while size > LEAST_CHUNK_BYTES and size + _FRAME_BYTES > message_bytes:
        size //= 2
    return size


def encode_chunk(chunk: Chunk) -> bytes:
    """Encode a chunk: magic, blob digest and offset, then the bytes; 44 bytes of overhead."""
    return _CHUNK_HEADER.pack(_CHUNK_MAGIC, bytes.fromhex(chunk.sha256), chunk.offset) + bytes(chunk.data)


def decode_chunk(payload: bytes | memoryview) -> Chunk:
    """Read a chunk.

    Raises:
        ProtocolError: the payload is no chunk, or an empty one.
        TooLargeError: it holds more than CHUNK_BYTES.
    """
    view = memoryview(payload)
    if len(view) <= _CHUNK_HEADER.size:
        raise ProtocolError(f"a chunk has {len(view)} bytes, but must have more than {_CHUNK_HEADER.size}")
    if len(view) > _CHUNK_HEADER.size + CHUNK_BYTES:
        raise TooLargeError(f"a chunk has {len(view)} bytes, but may have {_CHUNK_HEADER.size + CHUNK_BYTES} at most")
    magic, digest, offset = _CHUNK_HEADER.unpack(view[: _CHUNK_HEADER.size])
    if magic != _CHUNK_MAGIC:
        raise ProtocolError(f"a chunk starts with {magic!r}, but must start with {_CHUNK_MAGIC!r}")
    return Chunk(sha256=digest.hex(), offset=offset, data=view[_CHUNK_HEADER.size :])


class BlobFetch:
    """The receiver's side of one transfer. Times are seconds of the caller's monotonic clock.

    It adapts to the link, as a chunk takes half a second at 1 Mbit/s and requesting it twice would make that worse: it
    starts with two outstanding chunks, adds one for each that arrives and halves them if one is late, that is after
    three times the duration of the last one.

    It also adapts to the broker: if nothing arrives it requests half as much at once, down to LEAST_CHUNK_BYTES, and
    more again as soon as a larger chunk arrives late.

    Args:
        blob: what to fetch.
        have: offsets of pieces of LEAST_CHUNK_BYTES that were received before, so that a transfer resumes.
        chunk_bytes: size of a request: CHUNK_BYTES, or a half, a quarter and so on.
        max_bytes: a larger blob is refused here, before anything is allocated.
        retry_s: least time before a range is requested again.
        window_chunks: how many chunks of CHUNK_BYTES may be outstanding, or as many bytes in smaller ones.

    Raises:
        TooLargeError: the blob is larger than max_bytes.
    """

    def __init__(
        self,
        blob: BlobRef,
        *,
        have: frozenset[int] = frozenset(),
        chunk_bytes: int = CHUNK_BYTES,
        max_bytes: int = 2**31,
        retry_s: float = 2.0,
        window_chunks: int = WINDOW_CHUNKS,
    ) -> None:
        if blob.size_bytes > max_bytes:
            raise TooLargeError(f"a blob is {blob.size_bytes} bytes; the limit is {max_bytes} bytes")
        self.blob = blob
        self.chunk_bytes = chunk_bytes
        self._retry_s = retry_s
        self._full_window = window_chunks
        self._dared = min(_LEAST_WINDOW_CHUNKS, window_chunks)  # how much of the window is in use
        self._barren = 0  # how often in a row nothing came of what was asked for
        self._patience_s = retry_s
        self._took_s: float | None = None  # from asking for a chunk to having it
        self._answered: list[
            tuple[float, bool]
        ] = []  # chunks since requests(): time of the first request, and whether it was the only one
        self._first_asked_s: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}
        pieces = (at for at in range(0, blob.size_bytes, LEAST_CHUNK_BYTES) if at not in have)
        self._lacking: dict[int, int] = {}  # lengths of the missing ranges by offset
        self._divide((at, min(at + LEAST_CHUNK_BYTES, blob.size_bytes)) for at in pieces)

    @property
    def complete(self) -> bool:
        """Whether every chunk was received."""
        return not self._lacking

    def requests(self, now_s: float, *, proven_bytes: int = 0) -> tuple[ByteRange, ...]:
        """Return the ranges to request now: new ones within the window, and old ones that did not arrive.

        Args:
            now_s: the time.
            proven_bytes: the largest chunk that has come through this broker: no less is asked for at once.
        """
        self._learn(now_s)
        late = [at for at, asked_s in self._asked_at.items() if now_s - asked_s >= self._patience_s]
        if late:
            self._barren += 1
            self._dared = max(self._dared // 2, min(_LEAST_WINDOW_CHUNKS, self._window))
            backoff_s = min(2 * self._patience_s, _LONGEST_BACKOFF * self._usual_patience_s(), _LONGEST_PATIENCE_S)
            self._patience_s = max(backoff_s, self._retry_s)
            self._ask_for_less(proven_bytes)
        for offset in late:
            self._asked_at.pop(offset, None)
        room = self._dared - len(self._asked_at)
        offsets = [offset for offset in self._lacking if offset not in self._asked_at][: max(room, 0)]
        self._asked_at.update(dict.fromkeys(offsets, now_s))
        for offset in offsets:
            self._first_asked_s.setdefault(offset, now_s)
        return tuple(ByteRange(offset=offset, length=self._lacking[offset]) for offset in offsets)

    def accept(self, chunk: Chunk) -> bool:
        """Accept a chunk; False if it is not of this blob, not whole pieces, or was received before.

        It may be a part of a requested range, or span several: the sender may know the broker's limit.
        """
        begin, length = chunk.offset, len(chunk.data)
        end = begin + length
        whole = end == self.blob.size_bytes or (end < self.blob.size_bytes and length % LEAST_CHUNK_BYTES == 0)
        if chunk.sha256 != self.blob.sha256 or begin % LEAST_CHUNK_BYTES or not whole or not 0 < length <= CHUNK_BYTES:
            return False
        near = range(max(0, begin + LEAST_CHUNK_BYTES - CHUNK_BYTES), end, LEAST_CHUNK_BYTES)
        touched = [at for at in near if at in self._lacking and at + self._lacking[at] > begin]
        for at in touched:
            self._mark_received(at, begin, end)
        if not touched:
            return False
        self._barren = 0
        self._dared = min(self._dared + 1, self._window)
        if length > self.chunk_bytes:
            self._ask_for_more(length)
        return True

    def ask_again(self, most_bytes: int = CHUNK_BYTES) -> None:
        """Forget outstanding requests: the link was lost, and with it every answer.

        Args:
            most_bytes: to ask for at once from now on, as for `chunk_bytes`.
        """
        if self._asked_at:
            self._barren += 1  # a broker may have cut somebody off for a chunk that is too large for it
        self._asked_at.clear()
        self._first_asked_s.clear()
        self._patience_s = self._usual_patience_s()
        if self.chunk_bytes > most_bytes:
            self.chunk_bytes = most_bytes
            self._divide(())

    def restart(self) -> None:
        """Fetch everything again: the digest of the whole was wrong."""
        self._lacking = {}
        self.ask_again()
        self._barren = 0
        self._divide([(0, self.blob.size_bytes)])

    @property
    def _window(self) -> int:
        return min(self._full_window * CHUNK_BYTES // self.chunk_bytes, _MOST_WINDOW_CHUNKS)

    def _mark_received(self, at: int, begin: int, end: int) -> None:
        """Note the received bytes from `begin` to `end`; the rest of a requested range stays outstanding."""
        length, asked_s = self._lacking.pop(at), self._asked_at.pop(at, None)
        first_asked_s = self._first_asked_s.pop(at, None)
        left = [(start, stop) for start, stop in ((at, begin), (end, at + length)) if start < stop]
        for start, stop in left:
            self._lacking[start] = stop - start
            if asked_s is not None:
                self._asked_at[start] = asked_s
            if first_asked_s is not None:
                self._first_asked_s[start] = first_asked_s
        if first_asked_s is not None and not left:
            self._answered.append((first_asked_s, first_asked_s == asked_s))

    def _ask_for_less(self, proven_bytes: int) -> None:
        largest = max(self._lacking[at] for at in self._asked_at)
        if self._barren < _BARREN or largest <= max(proven_bytes, LEAST_CHUNK_BYTES):
            return
        while self.chunk_bytes >= largest:
            self.chunk_bytes //= 2
        self._barren = 0
        self._asked_at.clear()
        self._first_asked_s.clear()
        self._patience_s = self._usual_patience_s()
        self._divide(())

    def _ask_for_more(self, length: int) -> None:
        while 2 * self.chunk_bytes <= length:
            self.chunk_bytes *= 2
        self._divide(())

    def _divide(self, more: Iterable[tuple[int, int]]) -> None:
        """Split the missing bytes that are not outstanding into ranges to request."""
        waiting = ((at, at + length) for at, length in self._lacking.items() if at not in self._asked_at)
        spans = list(_join_ranges(sorted((*waiting, *more))))
        self._lacking = {at: length for at, length in self._lacking.items() if at in self._asked_at}
        for begin, end in spans:
            for at in range(begin, end, self.chunk_bytes):
                self._lacking[at] = min(self.chunk_bytes, end - at)

    def _usual_patience_s(self) -> float:
        return max(self._retry_s, min(3 * (self._took_s or 0.0), _LONGEST_PATIENCE_S))

    def _learn(self, now_s: float) -> None:
        for first_asked_s, asked_once in self._answered:
            # A chunk that was requested twice may answer either request, so its duration is only a bound. On a link
            # slower than the first guess there is nothing better.
            if asked_once or self._took_s is None:
                self._took_s = now_s - first_asked_s
                self._patience_s = self._usual_patience_s()
        self._answered.clear()


def _join_ranges(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sort spans and join touching ones."""
    begin = end = 0
    for start, stop in spans:
        if start != end:
            if begin < end:
                yield begin, end
            begin = start
        end = stop
    if begin < end:
        yield begin, end
