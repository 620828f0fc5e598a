import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.blobs import (
    CHUNK_BYTES,
    LEAST_CHUNK_BYTES,
    MESSAGE_BYTES,
    WINDOW_CHUNKS,
    BlobFetch,
    BlobRef,
    ByteRange,
    Chunk,
    chunk_bytes_within,
    decode_chunk,
    encode_chunk,
)
from subfleet.protocol.errors import InvalidError, ProtocolError, TooLargeError
from subfleet.protocol.topics import CHUNK, Topics

_DIGEST = "ab" * 32
_SIZES = st.one_of(st.integers(1, 8 * CHUNK_BYTES), st.integers(1, 8).map(lambda count: count * CHUNK_BYTES))


def _chunk(fetch: BlobFetch, offset: int, length: int = CHUNK_BYTES) -> Chunk:
    data = bytes(min(length, fetch.blob.size_bytes - offset))
    return Chunk(sha256=fetch.blob.sha256, offset=offset, data=data)


@given(size_bytes=_SIZES, seed=st.integers(0, 2**32))
def test_a_fetch_asks_for_exactly_the_blob_and_never_beyond_its_window(size_bytes: int, seed: int) -> None:
    rng, pieces = random.Random(seed), range(0, size_bytes, LEAST_CHUNK_BYTES)
    have = frozenset(rng.sample(pieces, rng.randint(0, len(pieces))))
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=size_bytes), have=have, retry_s=2.0)
    outstanding: dict[int, int] = {}
    received = set(have)
    now_s = 0.0
    while not fetch.complete:
        for requested in fetch.requests(now_s):
            assert (
                set(range(requested.offset, requested.offset + requested.length, LEAST_CHUNK_BYTES))
                <= set(pieces) - received
            )
            assert requested.length % LEAST_CHUNK_BYTES == 0 or requested.offset + requested.length == size_bytes
            assert requested.length <= fetch.chunk_bytes
            outstanding[requested.offset] = requested.length
        assert sum(outstanding.values()) <= WINDOW_CHUNKS * CHUNK_BYTES
        assert outstanding, "a fetch that is not complete always waits for something"
        if rng.random() < 0.25:  # everything outstanding is lost
            outstanding.clear()
            now_s += 1e6
            continue
        offset = rng.choice(sorted(outstanding))
        length = outstanding.pop(offset)
        part = min(length, LEAST_CHUNK_BYTES * rng.randint(1, 32))  # how much of it the sender sends at once
        assert fetch.accept(_chunk(fetch, offset, part))
        assert not fetch.accept(_chunk(fetch, offset, part)), "a second copy is not accepted"
        received.update(range(offset, offset + part, LEAST_CHUNK_BYTES))
        if part < length:
            outstanding[offset + part] = length - part
        now_s += 0.1
    assert received == set(pieces)
    assert fetch.requests(now_s) == ()


def test_on_a_slow_link_requests_are_not_repeated_again_and_again() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=12 * CHUNK_BYTES), retry_s=2.0)
    queue: list[ByteRange] = []  # the link carries one chunk in 10 seconds, in the order of the requests
    requested_bytes = carried_bytes = 0
    for now_s in range(100_000):
        ranges = fetch.requests(float(now_s))
        requested_bytes += sum(requested.length for requested in ranges)
        queue += ranges
        carried_bytes += CHUNK_BYTES // 10 if queue else 0
        if queue and carried_bytes >= queue[0].length:
            carried_bytes -= queue[0].length
            fetch.accept(_chunk(fetch, queue[0].offset, queue.pop(0).length))
        if fetch.complete:
            break
    assert fetch.complete
    assert fetch.chunk_bytes == CHUNK_BYTES, "chunks that were only late prove their size"
    assert requested_bytes <= (12 + 10) * CHUNK_BYTES, "requests are repeated only before the first chunk arrives"


def _requested_sizes(fetch: BlobFetch, seconds: int, **proven: int) -> list[int]:
    """The lengths of successive requests while nothing arrives, without repetitions."""
    lengths = [requested.length for now_s in range(seconds) for requested in fetch.requests(float(now_s), **proven)]
    return [length for length, _ in itertools.groupby(lengths)]


def test_while_nothing_arrives_requests_shrink_to_a_minimum() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=4 * CHUNK_BYTES))
    assert _requested_sizes(fetch, 25) == [61_440, 30_720, 15_360, 7_680, 3_840]
    assert fetch.chunk_bytes == LEAST_CHUNK_BYTES
    (requested, *_) = fetch.requests(1000.0)
    assert requested.length == LEAST_CHUNK_BYTES
    assert fetch.accept(_chunk(fetch, requested.offset, requested.length))


def test_a_link_that_always_breaks_shrinks_requests_too() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=4 * CHUNK_BYTES))
    for now_s in (0.0, 1.0):
        fetch.requests(now_s)
        fetch.ask_again()
    fetch.requests(2.0)
    assert {requested.length for requested in fetch.requests(4.0)} == {CHUNK_BYTES // 2}


def test_after_a_lost_link_requests_are_no_larger_than_the_proven_size() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=4 * CHUNK_BYTES))
    assert {requested.length for requested in fetch.requests(0.0)} == {CHUNK_BYTES}
    fetch.ask_again(LEAST_CHUNK_BYTES)
    assert {requested.length for requested in fetch.requests(0.0)} == {LEAST_CHUNK_BYTES}
    assert fetch.accept(_chunk(fetch, 0, LEAST_CHUNK_BYTES))


@pytest.mark.parametrize("proven_bytes", [CHUNK_BYTES, CHUNK_BYTES // 2])
def test_requests_are_no_smaller_than_the_proven_size(proven_bytes: int) -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=4 * CHUNK_BYTES))
    assert _requested_sizes(fetch, 1000, proven_bytes=proven_bytes)[-1] == proven_bytes


def test_a_short_blob_is_halved_below_its_own_length_at_once() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=20_000))
    assert _requested_sizes(fetch, 12)[:2] == [20_000, 15_360]


def test_one_chunk_of_several_that_is_lost_changes_nothing() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=40 * CHUNK_BYTES))
    for number in range(20):  # of several outstanding chunks, the first is always lost
        ranges = fetch.requests(1000.0 * number)
        assert {requested.length for requested in ranges} == {CHUNK_BYTES}
        fetch.accept(_chunk(fetch, ranges[-1].offset))


def test_late_chunks_are_requested_again_and_after_lost_links_at_once() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=CHUNK_BYTES), retry_s=2.0)
    (first,) = fetch.requests(0.0)
    assert fetch.requests(1.9) == ()
    assert fetch.requests(2.0) == (first,)
    assert fetch.requests(2.1) == ()
    fetch.ask_again()
    assert fetch.requests(2.2) == (first,)


def test_a_restarted_fetch_requests_everything_again() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=2 * CHUNK_BYTES))
    assert len(fetch.requests(0.0)) == 2
    assert fetch.accept(_chunk(fetch, 0))
    assert fetch.accept(_chunk(fetch, CHUNK_BYTES))
    fetch.restart()
    assert not fetch.complete
    assert {requested.offset for requested in fetch.requests(0.0)} == {0, CHUNK_BYTES}


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(sha256="cd" * 32, offset=0, data=bytes(CHUNK_BYTES)),
        Chunk(sha256=_DIGEST, offset=1, data=bytes(CHUNK_BYTES)),
        Chunk(sha256=_DIGEST, offset=0, data=b"short"),
        Chunk(sha256=_DIGEST, offset=CHUNK_BYTES, data=bytes(CHUNK_BYTES)),
        Chunk(sha256=_DIGEST, offset=2**60, data=b"x"),
    ],
)
def test_chunks_that_were_not_requested_are_not_accepted(chunk: Chunk) -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=CHUNK_BYTES + 1))
    fetch.requests(0.0)
    assert not fetch.accept(chunk)
    assert not fetch.complete


def test_a_blob_above_the_limit_is_refused() -> None:
    with pytest.raises(TooLargeError, match="11 bytes; the limit is 10"):
        BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=11), max_bytes=10)
    assert not BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=10), max_bytes=10).complete, "the limit itself is allowed"


@given(digest=st.binary(min_size=32, max_size=32), offset=st.integers(0, 2**64 - 1), data=st.binary(min_size=1))
def test_a_chunk_comes_back_as_it_was(digest: bytes, offset: int, data: bytes) -> None:
    chunk = decode_chunk(encode_chunk(Chunk(sha256=digest.hex(), offset=offset, data=data)))
    assert (chunk.sha256, chunk.offset, bytes(chunk.data)) == (digest.hex(), offset, data)


@given(payload=st.one_of(st.binary(max_size=100), st.binary(max_size=60).map(lambda rest: b"SFC1" + rest)))
def test_arbitrary_bytes_are_a_chunk_or_a_protocol_error(payload: bytes) -> None:
    try:
        chunk = decode_chunk(payload)
    except ProtocolError:
        return
    assert encode_chunk(chunk) == payload


def test_a_chunk_above_the_limit_is_refused() -> None:
    with pytest.raises(TooLargeError):
        decode_chunk(encode_chunk(Chunk(sha256=_DIGEST, offset=0, data=bytes(CHUNK_BYTES + 1))))


@pytest.mark.parametrize(
    ("sha256", "size_bytes"), [("", 1), ("AB" * 32, 1), (_DIGEST + "\n", 1), (_DIGEST, 0), (_DIGEST, -1)]
)
def test_invalid_references_are_refused(sha256: str, size_bytes: int) -> None:
    with pytest.raises(InvalidError, match=r"sha256 is .*, but must be 64 hex|size_bytes is .*, but must be 1 or more"):
        BlobRef(sha256=sha256, size_bytes=size_bytes)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (0, -1)])
def test_invalid_ranges_are_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match=r"offset is .*, but must be 0 or more|length is .*, but must be 1 or more"):
        ByteRange(offset=offset, length=length)


def test_waiting_times_are_bounded() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=1), retry_s=2.0)
    times = [now_s for now_s in range(200) if fetch.requests(float(now_s))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:2] == [2, 4]
    assert max(gaps) == 8 < math.inf


@pytest.mark.parametrize("halvings", range(5))
def test_a_chunk_leaves_room_for_all_that_mqtt_adds(halvings: int) -> None:
    size = CHUNK_BYTES >> halvings
    longest = Topics("f" * 64).downlink("d" * 64, CHUNK)
    fixed_header = 1 + 3  # with the length of any message below 2 MiB
    message_bytes = (
        fixed_header + 2 + len(longest) + 2 + len(encode_chunk(Chunk(sha256=_DIGEST, offset=0, data=bytes(size))))
    )
    assert message_bytes <= MESSAGE_BYTES >> halvings
    assert chunk_bytes_within(MESSAGE_BYTES >> halvings) == size
    assert chunk_bytes_within(message_bytes - 1) <= size


def test_limits_between_and_below_the_sizes_of_chunks() -> None:
    assert [chunk_bytes_within(limit) for limit in (2**30, 65_536, 61_695, 20_000, 4096, 100)] == [
        *(CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES // 2, 15_360, LEAST_CHUNK_BYTES, LEAST_CHUNK_BYTES)
    ]
