import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.blobs import (
    CHUNK_BYTES,
    WINDOW_CHUNKS,
    BlobFetch,
    BlobRef,
    ByteRange,
    Chunk,
    decode_chunk,
    encode_chunk,
)
from subfleet.protocol.errors import ProtocolError, TooLargeError

_DIGEST = "ab" * 32
_SIZES = st.one_of(st.integers(1, 30 * CHUNK_BYTES), st.integers(1, 30).map(lambda count: count * CHUNK_BYTES))


def _chunk(fetch: BlobFetch, offset: int) -> Chunk:
    return Chunk(sha256=fetch.blob.sha256, offset=offset, data=bytes(fetch.length_at(offset)))


@given(size_bytes=_SIZES, seed=st.integers(0, 2**32))
def test_a_fetch_asks_for_exactly_the_blob_and_never_beyond_its_window(size_bytes: int, seed: int) -> None:
    chance, offsets = random.Random(seed), range(0, size_bytes, CHUNK_BYTES)
    have = frozenset(chance.sample(offsets, chance.randint(0, len(offsets))))
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=size_bytes), have=have, retry_s=2.0)
    outstanding: set[int] = set()
    received = set(have)
    now_s = 0.0
    while not fetch.complete:
        for wanted in fetch.requests(now_s):
            assert wanted.offset in set(offsets) - received
            assert wanted.length == min(CHUNK_BYTES, size_bytes - wanted.offset)
            outstanding.add(wanted.offset)
        assert len(outstanding) <= WINDOW_CHUNKS
        assert outstanding, "a fetch that is not complete always waits for something"
        if chance.random() < 0.25:  # everything outstanding is lost
            outstanding.clear()
            now_s += 1e6
        else:
            offset = chance.choice(sorted(outstanding))
            assert fetch.accept(_chunk(fetch, offset))
            assert not fetch.accept(_chunk(fetch, offset)), "a second copy is not taken"
            outstanding.discard(offset)
            received.add(offset)
            now_s += 0.1
    assert received == set(offsets)
    assert fetch.requests(now_s) == ()


def test_on_a_link_slower_than_the_first_guess_it_does_not_keep_asking_twice() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=12 * CHUNK_BYTES), retry_s=2.0)
    queue: list[int] = []  # the link carries one chunk every 10 seconds, in the order of asking
    asked = 0
    for now_s in range(100_000):
        ranges = fetch.requests(float(now_s))
        asked += len(ranges)
        queue += [wanted.offset for wanted in ranges]
        if now_s % 10 == 9 and queue:
            fetch.accept(_chunk(fetch, queue.pop(0)))
        if fetch.complete:
            break
    assert fetch.complete
    assert asked <= 12 + 8, "only before the first chunk came could it not know"


def test_late_chunks_are_asked_for_again_and_lost_links_at_once() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=CHUNK_BYTES), retry_s=2.0)
    (first,) = fetch.requests(0.0)
    assert fetch.requests(1.9) == ()
    assert fetch.requests(2.0) == (first,)
    assert fetch.requests(2.1) == ()
    fetch.ask_again()
    assert fetch.requests(2.2) == (first,)


def test_a_restarted_fetch_wants_everything_again() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=2 * CHUNK_BYTES))
    assert len(fetch.requests(0.0)) == 2
    assert fetch.accept(_chunk(fetch, 0))
    assert fetch.accept(_chunk(fetch, CHUNK_BYTES))
    fetch.restart()
    assert not fetch.complete
    assert {wanted.offset for wanted in fetch.requests(0.0)} == {0, CHUNK_BYTES}


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
def test_what_is_no_whole_chunk_of_the_blob_is_not_taken(chunk: Chunk) -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=CHUNK_BYTES + 1))
    fetch.requests(0.0)
    assert not fetch.accept(chunk)
    assert not fetch.complete


def test_a_blob_above_the_limit_is_refused() -> None:
    with pytest.raises(TooLargeError, match="11 bytes, but may be 10"):
        BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=11), max_bytes=10)


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
def test_what_names_no_blob_is_refused(sha256: str, size_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        BlobRef(sha256=sha256, size_bytes=size_bytes)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (0, -1)])
def test_what_is_no_range_is_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="a byte range is"):
        ByteRange(offset=offset, length=length)


def test_patience_is_finite() -> None:
    fetch = BlobFetch(BlobRef(sha256=_DIGEST, size_bytes=1), retry_s=2.0)
    times = [now_s for now_s in range(200) if fetch.requests(float(now_s))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:2] == [2, 4]
    assert max(gaps) == 8 < math.inf
