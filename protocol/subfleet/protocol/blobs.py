"""Blobs: anything larger than a control message, named by its SHA-256 and moved in chunks that the receiver pulls.

`BlobFetch` is the receiver's half as a pure state machine: it names the ranges it lacks, keeps at most a window of them
outstanding, asks again for what did not come, and knows when it is complete. It touches no file and no socket.
"""

import hashlib
import re
import struct
from dataclasses import dataclass

from subfleet.protocol.errors import ProtocolError, TooLargeError

__all__ = ["CHUNK_BYTES", "BlobFetch", "BlobRef", "ByteRange", "Chunk", "decode_chunk", "encode_chunk"]

CHUNK_BYTES = 128 * 1024
"""Bytes of content in one chunk: small enough for hosted brokers."""
WINDOW_CHUNKS = 8
_LEAST_WINDOW_CHUNKS = 2
_LONGEST_BACKOFF = 4
_LONGEST_PATIENCE_S = 60.0  # one long stall must not teach it to wait for ever
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_HEADER = struct.Struct("<4s32sQ")
_CHUNK_MAGIC = b"SFC1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """The name and size of a blob.

    Attributes:
        sha256: 64 hexadecimal digits of the content's SHA-256.
        size_bytes: length of the content, 1 or more.
    """

    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        if _DIGEST.fullmatch(self.sha256) is None:
            raise ProtocolError(f"a blob's sha256 is {self.sha256!r:.80}, but must be 64 hexadecimal digits")
        if self.size_bytes < 1:
            raise ProtocolError(f"a blob's size is {self.size_bytes} bytes, but must be 1 or more")

    @staticmethod
    def of(content: bytes | memoryview) -> "BlobRef":
        """The reference of some content."""
        return BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """A range of a blob: `length` bytes from `offset` on."""

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError(f"a byte range is ({self.offset}, {self.length}), but must be (0 or more, 1 or more)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some bytes of a blob and where they belong."""

    sha256: str
    offset: int
    data: bytes | memoryview


def encode_chunk(chunk: Chunk) -> bytes:
    """Magic, blob digest and offset, then the bytes: 44 bytes of overhead."""
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
    """The receiver's half of one transfer. Times are seconds of the caller's monotonic clock.

    It adapts to the link, as a chunk takes a second at 1 Mbit/s and asking twice would only make that worse: it starts
    with two outstanding chunks, dares one more for each that comes and half as many when one is late, and calls a chunk
    late after three times what the last one took.

    Args:
        blob: what to fetch.
        have: offsets of chunks that were received before, so that a transfer resumes.
        max_bytes: a larger blob is refused here, before anything is allocated.
        retry_s: a range is never asked for again before this long.
        window_chunks: how many chunks may be outstanding.

    Raises:
        TooLargeError: the blob is larger than max_bytes.
    """

    def __init__(
        self,
        blob: BlobRef,
        *,
        have: frozenset[int] = frozenset(),
        max_bytes: int = 2**31,
        retry_s: float = 2.0,
        window_chunks: int = WINDOW_CHUNKS,
    ) -> None:
        if blob.size_bytes > max_bytes:
            raise TooLargeError(f"a blob is {blob.size_bytes} bytes, but may be {max_bytes} bytes at most")
        self.blob = blob
        self._retry_s = retry_s
        self._window = window_chunks
        self._dared = min(_LEAST_WINDOW_CHUNKS, window_chunks)  # how much of the window is in use
        self._patience_s = retry_s
        self._took_s: float | None = None  # from asking for a chunk to having it
        self._answered: list[tuple[float, bool]] = []  # of what came since requests(): first asked at, asked once
        self._first_asked_s: dict[int, float] = {}
        self._lacking = dict.fromkeys(offset for offset in range(0, blob.size_bytes, CHUNK_BYTES) if offset not in have)
        self._asked_at: dict[int, float] = {}

    @property
    def complete(self) -> bool:
        """Whether every chunk has come."""
        return not self._lacking

    def length_at(self, offset: int) -> int:
        """How many bytes the chunk at `offset` has."""
        return min(CHUNK_BYTES, self.blob.size_bytes - offset)

    def requests(self, now_s: float) -> tuple[ByteRange, ...]:
        """The ranges to ask for now: new ones while the window has room, and old ones that did not come."""
        self._learn(now_s)
        late = [at for at, asked_s in self._asked_at.items() if now_s - asked_s >= self._patience_s]
        for offset in late:
            del self._asked_at[offset]
        if late:
            self._dared = max(self._dared // 2, min(_LEAST_WINDOW_CHUNKS, self._window))
            backoff_s = min(2 * self._patience_s, _LONGEST_BACKOFF * self._usual_patience_s(), _LONGEST_PATIENCE_S)
            self._patience_s = max(backoff_s, self._retry_s)
        room = self._dared - len(self._asked_at)
        wanted = [offset for offset in self._lacking if offset not in self._asked_at][: max(room, 0)]
        self._asked_at.update(dict.fromkeys(wanted, now_s))
        for offset in wanted:
            self._first_asked_s.setdefault(offset, now_s)
        return tuple(ByteRange(offset=offset, length=self.length_at(offset)) for offset in wanted)

    def accept(self, chunk: Chunk) -> bool:
        """Take a chunk; False where it is not of this blob, not a whole range, or was here before."""
        if chunk.sha256 != self.blob.sha256 or chunk.offset not in self._lacking:
            return False
        if len(chunk.data) != self.length_at(chunk.offset):
            return False
        del self._lacking[chunk.offset]
        asked_s = self._asked_at.pop(chunk.offset, None)
        self._dared = min(self._dared + 1, self._window)
        first_asked_s = self._first_asked_s.pop(chunk.offset, None)
        if first_asked_s is not None:
            self._answered.append((first_asked_s, first_asked_s == asked_s))
        return True

    def ask_again(self) -> None:
        """Forget what is outstanding: the link was lost, and with it every answer."""
        self._asked_at.clear()
        self._first_asked_s.clear()
        self._patience_s = self._usual_patience_s()

    def restart(self) -> None:
        """Fetch everything anew: the whole did not have the digest that was promised."""
        self._lacking = dict.fromkeys(range(0, self.blob.size_bytes, CHUNK_BYTES))
        self.ask_again()

    def _usual_patience_s(self) -> float:
        return max(self._retry_s, min(3 * (self._took_s or 0.0), _LONGEST_PATIENCE_S))

    def _learn(self, now_s: float) -> None:
        for first_asked_s, asked_once in self._answered:
            # A chunk that was asked for twice may answer either question: that is only a bound, but on a link that is
            # slower than our first guess there is nothing better to learn from.
            if asked_once or self._took_s is None:
                self._took_s = now_s - first_asked_s
                self._patience_s = self._usual_patience_s()
        self._answered.clear()
