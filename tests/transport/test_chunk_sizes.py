"""Chunks of the largest size that a broker accepts, declared or not, on both sides and after restarts."""

import os
from pathlib import Path

import pytest
from transport.sides import ManualClock, Side, run_with_clock

from subfleet.protocol.blobs import CHUNK_BYTES, LEAST_CHUNK_BYTES
from subfleet.transport.base import Event, Transport, Will
from subfleet.transport.chunk_sizes import ChunkSizes, KnownBroker
from subfleet.transport.exchange import Fetched
from subfleet.transport.in_memory import MemoryBroker


class LimitedTransport:
    """A link that silently drops payloads above a limit, as some brokers do."""

    def __init__(self, inner: Transport, limit_bytes: int) -> None:
        self._inner = inner
        self.limit_bytes = limit_bytes

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        self._inner.open(subscriptions, will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if len(payload) <= self.limit_bytes:
            self._inner.publish(topic, payload, retain=retain)

    def poll(self, timeout_s: float) -> Event | None:
        return self._inner.poll(timeout_s)

    def close(self) -> None:
        self._inner.close()


def _pair(folder: Path, limit_bytes: int, sizes: ChunkSizes) -> tuple[ManualClock, Side, Side]:
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    sender = Side(LimitedTransport(broker.client("a"), limit_bytes), folder / "a", "r", "a", clock)
    return clock, sender, Side(broker.client("b"), folder / "b", "r", "b", clock, sizes=sizes)


@pytest.mark.parametrize(
    ("limit_bytes", "expected"),
    [(131_072, CHUNK_BYTES), (65_536, CHUNK_BYTES), (61_483, 30_720), (20_000, 15_360), (5_000, LEAST_CHUNK_BYTES)],
)
def test_a_blob_comes_through_any_silent_limit_and_the_next_one_at_once(
    tmp_path: Path, limit_bytes: int, expected: int
) -> None:
    remembered: list[int] = []
    sizes = ChunkSizes(remember=remembered.append)
    clock, sender, receiver = _pair(tmp_path, limit_bytes, sizes)
    first, second = (sender.store.add(os.urandom(4 * CHUNK_BYTES + rest)) for rest in (17, 18))
    receiver.exchange.fetch("a", first)
    run_with_clock(lambda: len(receiver.results) == 1, clock, sender, receiver)
    assert sizes.chunk_bytes == expected
    assert remembered == ([] if expected == CHUNK_BYTES else [expected])
    receiver.requested.clear()
    receiver.exchange.fetch("a", second)
    run_with_clock(lambda: len(receiver.results) == 2, clock, sender, receiver)
    assert receiver.results == [Fetched(peer="a", ref=first), Fetched(peer="a", ref=second)]
    assert sorted(receiver.requested) == list(range(0, second.size_bytes, expected)), "the size is determined once"


def test_a_silent_peer_does_not_lower_the_chunk_size(tmp_path: Path) -> None:
    sizes = ChunkSizes()
    clock, sender, receiver = _pair(tmp_path, 65_536, sizes)
    ref = sender.store.add(os.urandom(4 * CHUNK_BYTES))
    receiver.exchange.fetch("nobody", sender.store.add(os.urandom(2 * CHUNK_BYTES)))
    for _ in range(2000):
        receiver.step()
        clock.now_s += 0.05
    receiver.exchange.fetch("a", ref)
    run_with_clock(lambda: bool(receiver.results), clock, sender, receiver)
    assert sizes.chunk_bytes == sizes.proven_bytes == CHUNK_BYTES


def test_a_sender_that_knows_the_limit_divides_requested_ranges(tmp_path: Path) -> None:
    clock, sender, receiver = _pair(tmp_path, 20_000, ChunkSizes())
    sender.exchange.resume(20_000)
    ref = sender.store.add(os.urandom(3 * CHUNK_BYTES + 5))
    receiver.exchange.fetch("a", ref)
    run_with_clock(lambda: bool(receiver.results), clock, sender, receiver, longest_s=2.0)
    assert receiver.results == [Fetched(peer="a", ref=ref)]
    assert len(receiver.requested) == 4, "no range was requested twice"


def test_a_larger_chunk_that_was_only_late_raises_the_size() -> None:
    remembered: list[int] = []
    sizes = ChunkSizes(remember=remembered.append)
    sizes.learn(30_720, 30_720)
    assert sizes.chunk_bytes == 30_720
    sizes.learn(CHUNK_BYTES, 30_720)
    assert (sizes.chunk_bytes, remembered) == (CHUNK_BYTES, [30_720, CHUNK_BYTES])


@pytest.mark.parametrize("length", [1, 3_839, 3_840, 40_000, 61_439])
def test_the_last_chunk_of_a_blob_does_not_lower_the_size(length: int) -> None:
    sizes = ChunkSizes()
    sizes.learn(length, CHUNK_BYTES)
    assert sizes.chunk_bytes == CHUNK_BYTES


def test_a_declared_limit_of_the_broker_is_never_exceeded() -> None:
    sizes = ChunkSizes()
    sizes.limit(32_768)
    assert sizes.chunk_bytes == 30_720
    sizes.learn(CHUNK_BYTES, 30_720)
    assert sizes.chunk_bytes == 30_720


def test_what_is_known_of_a_broker_outlives_the_process_for_a_week(tmp_path: Path) -> None:
    now_s = 1e9
    path = tmp_path / "brokers.json"
    first, second = (KnownBroker(path, where, lambda: now_s) for where in ("a:1883", "b:1883"))
    assert first.chunk_bytes == CHUNK_BYTES
    first.remember(15_360)
    second.remember(7_680)
    assert [known.chunk_bytes for known in (first, second)] == [15_360, 7_680]
    assert ChunkSizes.from_broker(first).chunk_bytes == 15_360
    now_s += 8 * 24 * 3600
    assert first.chunk_bytes == CHUNK_BYTES
    ChunkSizes.from_broker(first).learn(30_720, 30_720)
    assert first.chunk_bytes == 30_720


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a:1": 5}', b'{"a:1": {"chunk_bytes": 5, "since_s": 1}}'),
        *(b'{"a:1": {"chunk_bytes": 3840, "since_s": "x"}}', b'{"a:1": {"chunk_bytes": [], "since_s": 0}}'),
    ],
)
def test_an_invalid_file_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "brokers.json"
    path.write_bytes(content)
    known = KnownBroker(path, "a:1", lambda: 0.0)
    assert known.chunk_bytes == CHUNK_BYTES
    known.remember(3_840)
    assert known.chunk_bytes == 3_840


@pytest.mark.slow
def test_the_file_has_a_limited_number_of_brokers(tmp_path: Path) -> None:
    path = tmp_path / "brokers.json"
    for number in range(200):
        KnownBroker(path, f"b{number}:1", lambda: 0.0).remember(3_840)
    assert path.stat().st_size < 10_000
    assert KnownBroker(path, "b199:1", lambda: 0.0).chunk_bytes == 3_840


def test_a_folder_that_cannot_be_written_raises_no_error(tmp_path: Path) -> None:
    known = KnownBroker(tmp_path / "none" / "brokers.json", "a:1", lambda: 0.0)
    known.remember(3_840)
    assert known.chunk_bytes == CHUNK_BYTES
