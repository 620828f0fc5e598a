"""One side of a transfer of blobs: an exchange over a transport, which the test steps."""

import time
from collections.abc import Callable
from pathlib import Path

from subfleet.protocol.blobs import CHUNK_BYTES, BlobRef, Chunk, decode_chunk
from subfleet.protocol.messages import BlobMissing, ChunkRequest, decode
from subfleet.transport.base import Connected, Delivery, Transport
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.chunk_sizes import ChunkSizes
from subfleet.transport.exchange import BlobExchange, Fetched, FetchFailed

DEADLINE_S = 60.0  # real time
LONGEST_S = 5_000.0  # time of a manual clock


class ManualClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Side:
    def __init__(
        self,
        transport: Transport,
        folder: Path,
        root: str,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        sizes: ChunkSizes | None = None,
    ) -> None:
        self.name = name
        self.store = BlobStore(folder)
        self.exchange = make_exchange(
            self.store, root, retry_s=0.25, give_up_s=DEADLINE_S if clock is time.monotonic else LONGEST_S, sizes=sizes
        )
        self.results: list[Fetched | FetchFailed] = []
        self.requested: list[int] = []
        self.outstanding: set[int] = set()
        self.most_outstanding = 0
        self.spoil: Callable[[Chunk], Chunk] = lambda chunk: chunk
        self._transport = transport
        self._clock = clock
        transport.open((f"{root}/{name}/+/+",))

    def step(self, timeout_s: float = 0.0) -> None:
        event = self._transport.poll(timeout_s)
        if isinstance(event, Connected):
            self.exchange.resume(event.message_bytes)
            self.outstanding.clear()
        elif isinstance(event, Delivery):
            self._handle(event)
        for outgoing in self.exchange.tick(self._clock()):
            _, _, sender, kind = outgoing.topic.split("/")
            assert sender == "from", "the topic functions below name the other side as receiver"
            self._note(kind, outgoing.payload)
            self._transport.publish(outgoing.topic.replace("/from/", f"/{self.name}/"), outgoing.payload)
        self.results += self.exchange.take_results()

    def _handle(self, delivery: Delivery) -> None:
        _, _, peer, kind = delivery.topic.split("/")
        if kind == "chunk":
            chunk = self.spoil(decode_chunk(delivery.payload))
            self.outstanding.discard(chunk.offset)
            self.exchange.handle_chunk(peer, chunk)
            return
        message = decode(delivery.payload, expected=kind)
        if isinstance(message, ChunkRequest):
            self.exchange.handle_request(peer, message)
        elif isinstance(message, BlobMissing):
            self.exchange.handle_missing(peer, message)

    def _note(self, kind: str, payload: bytes) -> None:
        if kind != "request":
            return
        request = decode(payload)
        assert isinstance(request, ChunkRequest)
        offsets = [byte_range.offset for byte_range in request.ranges]
        self.requested += offsets
        self.outstanding.update(offsets)
        self.most_outstanding = max(self.most_outstanding, len(self.outstanding))


def make_exchange(
    store: BlobStore, root: str, *, retry_s: float = 2.0, give_up_s: float = 600.0, sizes: ChunkSizes | None = None
) -> BlobExchange:
    return BlobExchange(
        store,
        request_topic=lambda peer: f"{root}/{peer}/from/request",
        chunk_topic=lambda peer: f"{root}/{peer}/from/chunk",
        missing_topic=lambda peer: f"{root}/{peer}/from/missing",
        sizes=sizes,
        retry_s=retry_s,
        give_up_s=give_up_s,
    )


def run_until(is_done: Callable[[], bool], *sides: Side, after_step: Callable[[], None] = lambda: None) -> None:
    """Step both sides over a transport in real time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline_s, f"not done within {DEADLINE_S} s"
        for side in sides:
            side.step(0.001)
        after_step()


def run_with_clock(is_done: Callable[[], bool], clock: ManualClock, *sides: Side, longest_s: float = LONGEST_S) -> None:
    """Step both sides with a manual clock; deterministic."""
    while not is_done():
        assert clock.now_s < longest_s, f"not done within {longest_s} s of the clock"
        for side in sides:
            side.step()
        clock.now_s += 0.05


def chunk_offsets(ref: BlobRef) -> set[int]:
    return set(range(0, ref.size_bytes, CHUNK_BYTES))
