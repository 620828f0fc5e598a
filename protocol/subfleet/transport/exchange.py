"""Transfers blobs over an unreliable transport: the receiver requests chunks, the sender serves them.

One exchange does both, on a server for all devices and on a device for its server. It sends nothing itself: the caller
publishes what `tick` returns, and calls `tick` after every event and at least about every second.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from subfleet.protocol.blobs import CHUNK_BYTES, BlobFetch, BlobRef, ByteRange, Chunk, encode_chunk
from subfleet.protocol.errors import FileError, TooLargeError
from subfleet.protocol.messages import BlobMissing, ChunkRequest, encode
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.chunk_sizes import ChunkSizes
from subfleet.transport.outbox import Outgoing
from subfleet.transport.partial_blob import PartialBlob

_LOG = logging.getLogger(__name__)

_CHUNKS_PER_TICK = 128  # 8 MB are read from disk before the caller gets its next event
_MAX_WAITING_CHUNKS = 128  # per peer: several of its windows; more would delay the other peers
_MAX_DIGEST_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A blob is complete in the store, and its digest is right."""

    peer: str
    ref: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """A fetch failed; the caller may fetch the blob again.

    Attributes:
        reason: "missing" (the peer does not have it), "digest" (wrong several times), "stalled" (no chunk for too
            long), "too_large", or "storage" (our disk).
        detail: one sentence for people.
    """

    peer: str
    ref: BlobRef
    reason: Literal["missing", "digest", "stalled", "too_large", "storage"]
    detail: str


@dataclass(slots=True, kw_only=True)
class _Transfer:
    peers: list[str]  # that have the blob; the first one is asked
    fetch: BlobFetch
    partial: PartialBlob
    digest_failures: int = 0
    progress_at_s: float | None = None  # None: `tick` has not run since the last chunk


def _complain(peer: str, text: str) -> None:
    _LOG.warning("%s: %s", peer, text)


class BlobExchange:
    """Both halves of every transfer of one side. Not thread-safe: it belongs to the thread that polls.

    Args:
        store: the blobs.
        request_topic: returns a peer's topic for our requests.
        chunk_topic: returns a peer's topic for our chunks.
        missing_topic: returns a peer's topic for reports that we lack a blob.
        sizes: the chunk sizes that the broker accepts.
        complain: called with a peer and its mistake.
        retry_s: a chunk that has not arrived after this time is requested again, later on slow links.
        give_up_s: a transfer without a chunk for this long has failed.
    """

    def __init__(  # noqa: PLR0913 - each says one thing of the other side
        self,
        store: BlobStore,
        *,
        request_topic: Callable[[str], str],
        chunk_topic: Callable[[str], str],
        missing_topic: Callable[[str], str],
        sizes: ChunkSizes | None = None,
        complain: Callable[[str, str], None] = _complain,
        retry_s: float = 2.0,
        give_up_s: float = 600.0,
    ) -> None:
        self._store = store
        self._request_topic = request_topic
        self._chunk_topic = chunk_topic
        self._missing_topic = missing_topic
        self._sizes = ChunkSizes() if sizes is None else sizes
        self._complain = complain
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._transfers: dict[str, _Transfer] = {}
        self._requested: dict[
            tuple[str, BlobRef, ByteRange], None
        ] = {}  # the chunks that peers requested, as an ordered set
        self._waiting: Counter[str] = Counter()  # number of requested chunks by peer
        self._absent: dict[tuple[str, str], None] = {}  # the blobs to report to peers as missing, as an ordered set
        self._results: deque[Fetched | FetchFailed] = deque()

    @property
    def active(self) -> int:
        """Number of blobs that are being fetched."""
        return len(self._transfers)

    def fetch(self, peer: str, ref: BlobRef) -> None:
        """Fetch a blob from a peer; `take_results` returns the result, immediately if the blob is already in the store.

        Two peers that offer the same blob are asked one after the other, and each has its own result.
        """
        transfer = self._transfers.get(ref.sha256)
        if transfer is not None:
            if peer not in transfer.peers:
                transfer.peers.append(peer)
            return
        if self._store.has(ref):
            self._results.append(Fetched(peer=peer, ref=ref))
            return
        try:
            partial = self._store.partial(ref)
            fetch = BlobFetch(
                ref,
                have=partial.received_offsets,
                chunk_bytes=self._sizes.chunk_bytes,
                max_bytes=ref.size_bytes,
                retry_s=self._retry_s,
            )
        except TooLargeError as error:
            self._results.append(FetchFailed(peer=peer, ref=ref, reason="too_large", detail=str(error)))
            return
        except FileError as error:
            self._results.append(FetchFailed(peer=peer, ref=ref, reason="storage", detail=str(error)))
            return
        transfer = _Transfer(peers=[peer], fetch=fetch, partial=partial)
        self._transfers[ref.sha256] = transfer
        if fetch.complete:  # a crash between the last chunk and its check
            self._complete(transfer)

    def cancel(self, ref: BlobRef, *, peer: str | None = None) -> None:
        """Cancel a fetch: no more requests, no result, and its chunks are deleted.

        Args:
            ref: the blob.
            peer: cancel for this peer only; others that offered the blob are still asked. None cancels for all peers.
        """
        transfer = self._transfers.get(ref.sha256)
        if transfer is None or peer not in (None, *transfer.peers):
            return
        if peer is None or transfer.peers == [peer]:
            self._abandon(transfer)
        else:
            transfer.peers.remove(peer)
            transfer.fetch.ask_again()

    def handle_request(self, peer: str, request: ChunkRequest) -> None:
        """Note a peer's request for chunks; `tick` sends them."""
        if not self._store.has(request.blob):
            self._absent[peer, request.blob.sha256] = None
            return
        for span in request.ranges:
            if span.length > CHUNK_BYTES:
                self._complain(peer, f"requests {span.length} bytes at once, but the limit is {CHUNK_BYTES}; update it")
            elif span.offset + span.length > request.blob.size_bytes:
                self._complain(peer, f"requests {span} of blob {request.blob.sha256[:12]}, which is shorter")
            elif (peer, request.blob, span) in self._requested:
                continue
            elif self._waiting[peer] >= _MAX_WAITING_CHUNKS:
                self._complain(peer, f"must ask again: {_MAX_WAITING_CHUNKS} chunks wait to be sent to it")
                return
            else:
                self._requested[peer, request.blob, span] = None
                self._waiting[peer] += 1

    def handle_chunk(self, peer: str, chunk: Chunk) -> None:
        """Store a chunk; one that was not requested from this peer is ignored."""
        transfer = self._transfers.get(chunk.sha256)
        if transfer is None or transfer.peers[0] != peer:
            return
        asked_bytes = transfer.fetch.chunk_bytes
        if not transfer.fetch.accept(chunk):
            return
        self._sizes.learn(len(chunk.data), asked_bytes)
        transfer.progress_at_s = None
        try:
            transfer.partial.write(chunk.offset, chunk.data)
        except FileError as error:
            self._fail(transfer, "storage", str(error))
            return
        if transfer.fetch.complete:
            self._complete(transfer)

    def handle_missing(self, peer: str, missing: BlobMissing) -> None:
        """Note that a peer lacks a blob, and ask the next peer that offered it, if any."""
        transfer = self._transfers.get(missing.sha256)
        if transfer is not None and peer in transfer.peers:
            self._give_up_peer(transfer, peer, "missing", f"{peer} does not have the blob any more")

    def resume(self, message_bytes: int | None = None) -> None:
        """Resume after the link was down: the next `tick` requests outstanding chunks again.

        Args:
            message_bytes: see `Connected.message_bytes`.
        """
        self._sizes.limit(message_bytes)
        self._requested.clear()
        self._waiting.clear()
        self._absent.clear()
        for transfer in self._transfers.values():
            transfer.fetch.ask_again(self._sizes.chunk_bytes)
            transfer.progress_at_s = None

    def tick(self, now_s: float) -> tuple[Outgoing, ...]:
        """List the messages to publish now: our requests, and the chunks that peers requested."""
        outgoing = [self._make_missing(peer, sha256) for peer, sha256 in self._absent]
        self._absent.clear()
        for transfer in list(self._transfers.values()):
            outgoing.extend(self._make_requests(transfer, now_s))
        for key in list(self._requested)[:_CHUNKS_PER_TICK]:
            del self._requested[key]
            self._waiting[key[0]] -= 1
            outgoing.extend(self._serve(*key))
        self._waiting = +self._waiting
        return tuple(outgoing)

    def take_results(self) -> tuple[Fetched | FetchFailed, ...]:
        """Return the results since the last call, each once."""
        results = tuple(self._results)
        self._results.clear()
        return results

    def _make_requests(self, transfer: _Transfer, now_s: float) -> list[Outgoing]:
        if transfer.progress_at_s is None:
            transfer.progress_at_s = now_s
        peer = transfer.peers[0]
        if now_s - transfer.progress_at_s >= self._give_up_s:
            transfer.progress_at_s = None
            self._give_up_peer(transfer, peer, "stalled", f"nothing came from {peer} for {self._give_up_s:g} seconds")
            return []
        ranges = transfer.fetch.requests(now_s, proven_bytes=self._sizes.proven_bytes)
        if not ranges:
            return []
        request = ChunkRequest(blob=transfer.fetch.blob, ranges=ranges)
        return [Outgoing(topic=self._request_topic(peer), payload=encode(request))]

    def _serve(self, peer: str, ref: BlobRef, span: ByteRange) -> list[Outgoing]:
        """Make the chunks of a range, in sizes that the broker accepts: the peer may not know its limit."""
        try:
            data = self._store.read_range(ref, span)
        except FileError as error:
            self._complain(peer, f"it cannot be served: {error}")
            return [self._make_missing(peer, ref.sha256)]
        size, topic = self._sizes.chunk_bytes, self._chunk_topic(peer)
        chunks = (
            Chunk(sha256=ref.sha256, offset=span.offset + at, data=data[at : at + size])
            for at in range(0, len(data), size)
        )
        return [Outgoing(topic=topic, payload=encode_chunk(chunk)) for chunk in chunks]

    def _make_missing(self, peer: str, sha256: str) -> Outgoing:
        return Outgoing(topic=self._missing_topic(peer), payload=encode(BlobMissing(sha256=sha256)))

    def _complete(self, transfer: _Transfer) -> None:
        try:
            whole = transfer.partial.commit()
        except FileError as error:
            self._fail(transfer, "storage", str(error))
            return
        ref = transfer.fetch.blob
        if whole:
            del self._transfers[ref.sha256]
            self._results.extend(Fetched(peer=peer, ref=ref) for peer in transfer.peers)
            return
        transfer.digest_failures += 1
        self._complain(transfer.peers[0], f"its blob {ref.sha256[:12]} has a wrong digest")
        transfer.fetch.restart()
        if transfer.digest_failures >= _MAX_DIGEST_FAILURES:
            transfer.digest_failures = 0
            detail = f"what {transfer.peers[0]} sent had a wrong digest {_MAX_DIGEST_FAILURES} times"
            self._give_up_peer(transfer, transfer.peers[0], "digest", detail)

    def _give_up_peer(
        self, transfer: _Transfer, peer: str, reason: Literal["missing", "digest", "stalled"], detail: str
    ) -> None:
        transfer.peers.remove(peer)
        self._results.append(FetchFailed(peer=peer, ref=transfer.fetch.blob, reason=reason, detail=detail))
        if transfer.peers:
            transfer.fetch.ask_again()
        else:
            self._abandon(transfer)

    def _abandon(self, transfer: _Transfer) -> None:
        """End a transfer and delete its chunks, so that a peer with many offers cannot fill the disk."""
        del self._transfers[transfer.fetch.blob.sha256]
        try:
            transfer.partial.remove()
        except FileError as error:
            _LOG.warning("the received chunks cannot be deleted: %s", error)

    def _fail(self, transfer: _Transfer, reason: Literal["storage"], detail: str) -> None:
        ref = transfer.fetch.blob
        self._abandon(transfer)
        self._results.extend(FetchFailed(peer=peer, ref=ref, reason=reason, detail=detail) for peer in transfer.peers)
