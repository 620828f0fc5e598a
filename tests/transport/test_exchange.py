"""Blobs arrive complete over every transport, whatever it loses, duplicates, delays or cuts."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from transport.rigs import Rig
from transport.sides import ManualClock, Side, chunk_offsets, make_exchange, run_until, run_with_clock

from subfleet.protocol.blobs import CHUNK_BYTES, WINDOW_CHUNKS, BlobRef, ByteRange, Chunk
from subfleet.protocol.errors import FileError
from subfleet.protocol.messages import BlobMissing, ChunkRequest, decode
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.exchange import Fetched, FetchFailed
from subfleet.transport.in_memory import Faults, MemoryBroker
from subfleet.transport.partial_blob import PartialBlob


def _pair(broker: MemoryBroker, folder: Path, clock: ManualClock) -> tuple[Side, Side]:
    return (
        Side(broker.client("a"), folder / "a", "r", "a", clock),
        Side(broker.client("b"), folder / "b", "r", "b", clock),
    )


@pytest.mark.slow
def test_several_megabytes_arrive_over_every_transport(rig: Rig, tmp_path: Path) -> None:
    sender = Side(rig.client("a"), tmp_path / "a", rig.root, "a")
    receiver = Side(rig.client("b"), tmp_path / "b", rig.root, "b")
    content = os.urandom(3 * 2**20 + 17)
    ref = sender.store.add(content)
    receiver.exchange.fetch("a", ref)
    run_until(lambda: bool(receiver.results), sender, receiver)
    assert receiver.results == [Fetched(peer="a", ref=ref)]
    assert receiver.store.path(ref).read_bytes() == content
    # If messages are lost, chunks may be halved for a while.
    assert set(receiver.requested) == chunk_offsets(ref) or (
        not rig.lossless and set(receiver.requested) > chunk_offsets(ref)
    )
    assert receiver.most_outstanding <= WINDOW_CHUNKS


@pytest.mark.slow
def test_a_blob_arrives_although_both_links_are_cut(rig: Rig, tmp_path: Path) -> None:
    sender = Side(rig.client("a"), tmp_path / "a", rig.root, "a")
    receiver = Side(rig.client("b"), tmp_path / "b", rig.root, "b")
    ref = sender.store.add(os.urandom(4 * 2**20))
    receiver.exchange.fetch("a", ref)
    cuts = [(24, "a"), (8, "b")]  # when this many chunks are missing, cut this client's link

    def cut() -> None:
        lacking = len(chunk_offsets(ref)) - len(receiver.store.partial(ref).received_offsets)
        if cuts and not receiver.results and lacking <= cuts[0][0]:
            rig.cut(rig.name(cuts.pop(0)[1]))

    run_until(lambda: bool(receiver.results), sender, receiver, after_step=cut)
    assert not cuts
    assert receiver.results == [Fetched(peer="a", ref=ref)]
    assert BlobRef.of(receiver.store.path(ref).read_bytes()) == ref


@pytest.mark.slow
@examples(8)
@given(
    size_bytes=st.one_of(
        st.integers(1, 3 * CHUNK_BYTES), st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 1_500_000])
    ),
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.1, 0.25]),
    double=st.sampled_from([0.0, 0.5]),
    delay_s=st.sampled_from([0.0, 0.2, 3.0]),
)
def test_any_size_arrives_under_any_faults(
    tmp_path_factory: pytest.TempPathFactory, size_bytes: int, seed: int, loss: float, double: float, delay_s: float
) -> None:
    clock = ManualClock()
    broker = MemoryBroker(Faults(seed=seed, loss=loss, double=double, delay_s=delay_s), clock)
    sender, receiver = _pair(broker, tmp_path_factory.mktemp("pair"), clock)
    content = random.Random(seed).randbytes(size_bytes)
    ref = sender.store.add(content)
    receiver.exchange.fetch("a", ref)
    run_with_clock(lambda: bool(receiver.results), clock, sender, receiver)
    assert receiver.results == [Fetched(peer="a", ref=ref)]
    assert receiver.store.path(ref).read_bytes() == content
    assert receiver.exchange.active == 0


def test_a_receiver_that_crashed_asks_only_for_what_it_lacks(tmp_path: Path) -> None:
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    sender, receiver = _pair(broker, tmp_path, clock)
    ref = sender.store.add(os.urandom(20 * CHUNK_BYTES))
    receiver.exchange.fetch("a", ref)
    run_with_clock(lambda: len(receiver.store.partial(ref).received_offsets) >= 11, clock, sender, receiver)
    received = receiver.store.partial(ref).received_offsets
    restarted = Side(broker.client("b"), tmp_path / "b", "r", "b", clock)
    restarted.exchange.fetch("a", ref)
    run_with_clock(lambda: bool(restarted.results), clock, sender, restarted)
    assert restarted.results == [Fetched(peer="a", ref=ref)]
    assert restarted.requested
    assert not received & set(restarted.requested)


def test_a_crash_before_the_last_check_needs_no_chunk_at_all(tmp_path: Path) -> None:
    store, content = BlobStore(tmp_path), os.urandom(CHUNK_BYTES + 1)
    ref = BlobRef.of(content)
    partial = store.partial(ref)
    partial.write(0, content[:CHUNK_BYTES])
    partial.write(CHUNK_BYTES, content[CHUNK_BYTES:])
    exchange = make_exchange(store, "r")
    exchange.fetch("a", ref)
    assert exchange.take_results() == (Fetched(peer="a", ref=ref),)
    assert exchange.take_results() == ()


def _flip(chunk: Chunk) -> Chunk:
    return Chunk(sha256=chunk.sha256, offset=chunk.offset, data=bytes(byte ^ 1 for byte in chunk.data))


def test_a_spoilt_chunk_is_found_and_fetched_again(tmp_path: Path) -> None:
    clock = ManualClock()
    sender, receiver = _pair(MemoryBroker(clock=clock), tmp_path, clock)
    ref = sender.store.add(os.urandom(3 * CHUNK_BYTES))
    damaged: list[int] = []

    def spoil_once(chunk: Chunk) -> Chunk:
        if damaged:
            return chunk
        damaged.append(chunk.offset)
        return _flip(chunk)

    receiver.spoil = spoil_once
    receiver.exchange.fetch("a", ref)
    run_with_clock(lambda: bool(receiver.results), clock, sender, receiver)
    assert receiver.results == [Fetched(peer="a", ref=ref)]
    assert sorted(receiver.requested) == sorted(2 * list(chunk_offsets(ref)))


def test_a_blob_that_is_always_spoilt_fails(tmp_path: Path) -> None:
    clock = ManualClock()
    sender, receiver = _pair(MemoryBroker(clock=clock), tmp_path, clock)
    ref = sender.store.add(os.urandom(2 * CHUNK_BYTES))
    receiver.spoil = _flip
    receiver.exchange.fetch("a", ref)
    run_with_clock(lambda: bool(receiver.results), clock, sender, receiver)
    (failed,) = receiver.results
    assert isinstance(failed, FetchFailed)
    assert (failed.reason, failed.peer, failed.ref) == ("digest", "a", ref)
    assert not receiver.store.has(ref)
    assert len(receiver.requested) == 3 * len(chunk_offsets(ref))
    assert receiver.exchange.active == 0


def test_a_peer_without_the_blob_answers_that_it_is_missing(tmp_path: Path) -> None:
    clock = ManualClock()
    sender, receiver = _pair(MemoryBroker(clock=clock), tmp_path, clock)
    receiver.exchange.fetch("a", BlobRef.of(b"nobody has this"))
    run_with_clock(lambda: bool(receiver.results), clock, sender, receiver)
    (failed,) = receiver.results
    assert isinstance(failed, FetchFailed)
    assert failed.reason == "missing"


def test_a_peer_that_never_answers_is_given_up(tmp_path: Path) -> None:
    exchange = make_exchange(BlobStore(tmp_path), "r", give_up_s=300.0)
    exchange.fetch("a", BlobRef.of(b"x"))
    request_count = 0
    for now_s in range(400):
        request_count += len(exchange.tick(float(now_s)))
        if exchange.active == 0:
            break
    (failed,) = exchange.take_results()
    assert isinstance(failed, FetchFailed)
    assert failed.reason == "stalled"
    assert now_s == 300
    assert 30 <= request_count <= 50, "it repeats requests, after a while at most every 8 seconds"


def test_a_blob_above_the_limit_is_refused(tmp_path: Path) -> None:
    exchange = make_exchange(BlobStore(tmp_path, max_blob_bytes=10), "r")
    exchange.fetch("a", BlobRef.of(b"12345678901"))
    (failed,) = exchange.take_results()
    assert isinstance(failed, FetchFailed)
    assert failed.reason == "too_large"
    assert exchange.tick(0.0) == ()


def test_the_same_blob_from_two_peers_has_two_results(tmp_path: Path) -> None:
    exchange, content = make_exchange(BlobStore(tmp_path), "r"), b"equal updates have equal digests"
    ref = BlobRef.of(content)
    exchange.fetch("a", ref)
    for _ in range(2):
        exchange.fetch("b", ref)
    assert [outgoing.topic for outgoing in exchange.tick(0.0)] == ["r/a/from/request"]
    exchange.handle_missing("a", BlobMissing(sha256=ref.sha256))
    assert [outgoing.topic for outgoing in exchange.tick(0.0)] == ["r/b/from/request"]
    exchange.handle_chunk("a", Chunk(sha256=ref.sha256, offset=0, data=bytes(len(content))))
    exchange.handle_chunk("b", Chunk(sha256=ref.sha256, offset=0, data=content))
    failed, fetched = exchange.take_results()
    assert isinstance(failed, FetchFailed)
    assert failed.peer == "a"
    assert fetched == Fetched(peer="b", ref=ref)


def test_after_a_reconnect_outstanding_ranges_are_requested_at_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    stored = store.add(b"what a peer asked for before the link broke; it will ask again")
    exchange = make_exchange(store, "r")
    exchange.fetch("a", BlobRef.of(b"x"))
    (first,) = exchange.tick(0.0)
    assert exchange.tick(0.1) == ()
    whole = ByteRange(offset=0, length=stored.size_bytes)
    exchange.handle_request("b", ChunkRequest(blob=stored, ranges=(whole,)))
    exchange.handle_request("b", ChunkRequest(blob=BlobRef.of(b"y"), ranges=(ByteRange(offset=0, length=1),)))
    exchange.resume()
    (second,) = exchange.tick(0.2)
    assert second.topic == first.topic == "r/a/from/request"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_cancelled_blob_has_no_result_asks_for_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    exchange, ref = make_exchange(BlobStore(tmp_path), "r"), BlobRef.of(b"x")
    exchange.fetch("a", ref)
    assert _files(tmp_path)
    exchange.cancel(ref)
    assert _files(tmp_path) == []
    exchange.cancel(ref)
    exchange.handle_chunk("a", Chunk(sha256=ref.sha256, offset=0, data=b"x"))
    assert exchange.tick(0.0) == ()
    assert exchange.take_results() == ()
    assert _files(tmp_path) == []


@pytest.mark.parametrize("end", ["missing", "stalled", "storage"])
def test_a_transfer_that_failed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    content = os.urandom(2 * CHUNK_BYTES)
    exchange, ref = make_exchange(BlobStore(tmp_path), "r", give_up_s=10.0), BlobRef.of(content)
    exchange.fetch("a", ref)
    exchange.tick(0.0)
    exchange.handle_chunk("a", Chunk(sha256=ref.sha256, offset=0, data=content[:CHUNK_BYTES]))
    assert _files(tmp_path)
    if end == "missing":
        exchange.handle_missing("a", BlobMissing(sha256=ref.sha256))
    elif end == "storage":
        monkeypatch.setattr(PartialBlob, "write", _full_disk)
        exchange.handle_chunk("a", Chunk(sha256=ref.sha256, offset=CHUNK_BYTES, data=content[CHUNK_BYTES:]))
    else:
        exchange.tick(1.0)
        exchange.tick(20.0)
    (failed,) = exchange.take_results()
    assert isinstance(failed, FetchFailed)
    assert failed.reason == end
    assert _files(tmp_path) == []


def _full_disk(partial: PartialBlob, offset: int, data: bytes) -> None:
    raise FileError("the disk is full")


def test_a_request_beyond_the_blob_is_not_served(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.add(b"abc")
    exchange = make_exchange(store, "r")
    for byte_range in (ByteRange(offset=0, length=4), ByteRange(offset=3, length=1), ByteRange(offset=0, length=2**30)):
        exchange.handle_request("b", ChunkRequest(blob=ref, ranges=(byte_range,)))
    assert exchange.tick(0.0) == ()


def test_a_blob_removed_between_question_and_answer_is_missing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.add(b"abc")
    exchange = make_exchange(store, "r")
    exchange.handle_request("b", ChunkRequest(blob=ref, ranges=(ByteRange(offset=0, length=3),)))
    store.prune(set())
    (outgoing,) = exchange.tick(0.0)
    assert outgoing.topic == "r/b/from/missing"
    missing = decode(outgoing.payload)
    assert isinstance(missing, BlobMissing)
    assert missing.sha256 == ref.sha256


def test_a_repeated_request_is_answered_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.add(b"abc")
    exchange = make_exchange(store, "r")
    request = ChunkRequest(blob=ref, ranges=(ByteRange(offset=0, length=3),))
    exchange.handle_request("b", request)
    exchange.handle_request("b", request)
    assert len(exchange.tick(0.0)) == 1


def test_a_disk_that_cannot_be_written_fails_the_transfer(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    exchange, ref = make_exchange(store, "r"), BlobRef.of(b"x")
    exchange.fetch("a", ref)
    store.prune(set())  # removes the partial file, as a broken disk might
    exchange.handle_chunk("a", Chunk(sha256=ref.sha256, offset=0, data=b"x"))
    (failed,) = exchange.take_results()
    assert isinstance(failed, FetchFailed)
    assert failed.reason == "storage"


def test_a_peer_that_asks_for_everything_does_not_keep_others_waiting(tmp_path: Path) -> None:
    exchange = make_exchange(BlobStore(tmp_path), "r", retry_s=0.25, give_up_s=60.0)
    blobs = BlobStore(tmp_path)
    ref = blobs.add(os.urandom(4096))
    for number in range(1000):
        exchange.handle_request("greedy", ChunkRequest(blob=ref, ranges=(ByteRange(offset=number, length=1),)))
    exchange.handle_request("modest", ChunkRequest(blob=ref, ranges=(ByteRange(offset=0, length=1),)))
    served = [*exchange.tick(0.0), *exchange.tick(1.0)]
    assert sum("modest" in outgoing.topic for outgoing in served) == 1
    assert len(served) == 129
    exchange.handle_request("greedy", ChunkRequest(blob=ref, ranges=(ByteRange(offset=0, length=1),)))
    assert len(exchange.tick(2.0)) == 1


def test_a_blob_cancelled_for_one_peer_is_fetched_from_the_other(tmp_path: Path) -> None:
    exchange = make_exchange(BlobStore(tmp_path), "r", retry_s=0.25, give_up_s=60.0)
    content = b"content"
    ref = BlobRef.of(content)
    exchange.fetch("a", ref)
    exchange.fetch("b", ref)
    exchange.cancel(ref, peer="nobody")
    exchange.cancel(ref, peer="a")
    exchange.handle_chunk("a", Chunk(sha256=ref.sha256, offset=0, data=content))
    assert exchange.active == 1
    exchange.handle_chunk("b", Chunk(sha256=ref.sha256, offset=0, data=content))
    assert exchange.take_results() == (Fetched(peer="b", ref=ref),)
    other = BlobRef.of(b"other")
    exchange.fetch("a", other)
    exchange.cancel(other, peer="a")
    assert exchange.active == 0
