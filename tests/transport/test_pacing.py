import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.sides import ManualClock

from subfleet.transport.base import Connected, Delivery, Disconnected, Event, Transport
from subfleet.transport.counting import CountingTransport, Direction
from subfleet.transport.in_memory import MemoryBroker
from subfleet.transport.pacing import Lane, LinkConditions, PacedTransport

_OVERHEAD_BYTES = 64 + len("n")  # of a message on topic "n"


def _drain(transport: PacedTransport) -> list[Event]:
    events = []
    while (event := transport.poll(0)) is not None:
        events.append(event)
    return events


@pytest.mark.slow
@given(
    sizes_bytes=st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    rate_bps=st.floats(1e3, 1e8),
    steps_s=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=50),
)
def test_a_lane_is_never_faster_than_its_rate_and_never_idle(
    sizes_bytes: list[int], rate_bps: float, steps_s: list[float]
) -> None:
    lane: Lane[int] = Lane()
    lane.set_rate(0.0, rate_bps)
    for index, size_bytes in enumerate(sizes_bytes):
        lane.put(0.0, size_bytes, index)
    now_s, count = 0.0, 0
    for step_s in steps_s:
        now_s += step_s
        while (passed := lane.take(now_s)) is not None:
            assert passed == count, "the order stays"
            count += 1
        passed_bits = 8 * sum(sizes_bytes[:count])
        assert passed_bits <= now_s * rate_bps * (1 + 1e-9) + 1e-3
        if count < len(sizes_bytes):
            assert passed_bits + 8 * sizes_bytes[count] >= now_s * rate_bps * (1 - 1e-9) - 1e-3


def test_a_lane_saves_no_credit_while_it_is_idle() -> None:
    lane: Lane[str] = Lane()
    lane.set_rate(0.0, 8000.0)
    lane.put(100.0, 1000, "a")
    assert lane.take(100.5) is None
    assert lane.due_s(100.5) == pytest.approx(0.5)
    assert lane.take(101.0) == "a"
    assert lane.due_s(101.0) == math.inf


def test_a_new_rate_counts_from_when_it_was_set() -> None:
    lane: Lane[str] = Lane()
    lane.set_rate(0.0, 8000.0)
    lane.put(0.0, 1000, "a")
    lane.set_rate(0.5, 0.0)
    assert lane.due_s(100.0) == math.inf
    lane.set_rate(100.0, 4000.0)
    assert lane.take(100.9) is None
    assert lane.take(101.0) == "a"
    lane.put(101.0, 10**9, "b")
    lane.set_rate(101.0, None)
    assert lane.due_s(101.0) == 0.0
    assert lane.take(101.0) == "b"


@pytest.mark.parametrize("rate_bps", [-1.0, math.nan])
def test_a_rate_below_zero_is_refused(rate_bps: float) -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        Lane[int]().set_rate(0.0, rate_bps)


class ChangingLink:
    """A link whose conditions change at times of the clock, which are given in order."""

    def __init__(self, *changes: tuple[float, LinkConditions]) -> None:
        self._changes = changes

    def __call__(self, now_s: float) -> LinkConditions:
        later = [at_s for at_s, _ in self._changes if at_s > now_s]
        current = [conditions for at_s, conditions in self._changes if at_s <= now_s][-1]
        return replace(current, until_s=min(later, default=math.inf))


def both_ways(bps: float | None, latency_s: float = 0.0) -> LinkConditions:
    return LinkConditions(downlink_bps=bps, uplink_bps=bps, latency_s=latency_s)


def connect(*changes: tuple[float, LinkConditions]) -> tuple[ManualClock, Transport, PacedTransport]:
    """A side without limits and one behind a link, which both have connected."""
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    far, near = broker.client("far"), PacedTransport(broker.client("near"), ChangingLink(*changes), clock)
    far.open(("n",))
    near.open(("n",))
    assert far.poll(0) == Connected()
    return clock, far, near


@pytest.mark.parametrize("looks_s", [(), (3.0,), (0.5, 4.0, 4.5, 7.9)])
def test_a_message_passes_at_the_rates_that_hold_while_it_passes(looks_s: tuple[float, ...]) -> None:
    """However seldom anybody looks: 4 s at 1,000 bits a second, 3 s at none, and then 2,000."""
    clock, far, near = connect((0.0, both_ways(1000.0)), (4.0, both_ways(0.0)), (7.0, both_ways(2000.0)))
    near.publish("n", bytes(750 - _OVERHEAD_BYTES))
    for look_s in looks_s:
        clock.now_s = look_s
        near.poll(0)
    clock.now_s = 8.0 - 1e-6
    near.poll(0)
    assert far.poll(0) is None
    clock.now_s = 8.0
    near.poll(0)
    assert isinstance(far.poll(0), Delivery)


@given(
    rates_bps=st.lists(st.sampled_from([0.0, 500.0, 1000.0, 8000.0]), min_size=1, max_size=6),
    sizes_bytes=st.lists(st.integers(0, 2000), min_size=1, max_size=4),
)
def test_what_passes_a_changing_link_is_what_its_rates_add_up_to(
    rates_bps: list[float], sizes_bytes: list[int]
) -> None:
    rates_bps += [1000.0]  # for ever
    clock, far, near = connect(*((float(number), both_ways(bps)) for number, bps in enumerate(rates_bps)))
    for size_bytes in sizes_bytes:
        near.publish("n", bytes(size_bytes))
    clock.now_s = len(rates_bps) + 1.25
    passed_bits = sum(rates_bps) + 1.25 * rates_bps[-1]
    near.poll(0)
    arrived = 0
    while far.poll(0) is not None:
        arrived += 1
    needed_bits = [8 * sum(size + _OVERHEAD_BYTES for size in sizes_bytes[: count + 1]) for count in range(arrived + 1)]
    assert all(bits <= passed_bits + 1e-3 for bits in needed_bits[:arrived])
    assert arrived == len(sizes_bytes) or needed_bits[arrived] >= passed_bits - 1e-3


def test_a_message_travels_half_a_round_trip_after_it_has_passed_and_overtakes_none() -> None:
    clock, far, near = connect((0.0, both_ways(8000.0, latency_s=4.0)), (1.5, both_ways(8000.0)))
    near.publish("n", bytes(1000 - _OVERHEAD_BYTES))  # passes within 1 s, and arrives after 3 s
    clock.now_s = 1.5
    near.publish("n", b"")
    clock.now_s = 2.9
    near.poll(0)
    assert far.poll(0) is None
    clock.now_s = 3.0
    near.poll(0)
    assert isinstance(far.poll(0), Delivery)
    assert far.poll(0) == Delivery(topic="n", payload=b"")


def test_both_directions_take_their_time_and_keep_their_order() -> None:
    clock, far, near = connect((0.0, LinkConditions(downlink_bps=8000.0, uplink_bps=4000.0)))
    assert near.poll(0) == Connected()
    payload = bytes(1000 - _OVERHEAD_BYTES)
    near.publish("n", payload)  # 2 s up, then 1 s down to itself
    near.publish("n", b"")
    assert _drain(near) == []
    assert far.poll(0) is None
    clock.now_s = 2.0
    assert _drain(near) == []
    assert far.poll(0) == Delivery(topic="n", payload=payload)
    assert far.poll(0) is None
    clock.now_s = 3.0
    assert _drain(near) == [Delivery(topic="n", payload=payload)]
    assert far.poll(0) == Delivery(topic="n", payload=b"")


def test_waiting_messages_are_lost_when_the_link_breaks() -> None:
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    link = ChangingLink((0.0, both_ways(8.0, latency_s=2.0)), (900.0, both_ways(None)))
    far, near = broker.client("far"), PacedTransport(broker.client("near"), link, clock)
    far.open(("n",))
    near.open(("n",))
    far.publish("n", b"down")
    near.publish("n", b"up")
    assert _drain(near) == []
    clock.now_s = 1.0
    assert _drain(near) == [Connected()]
    broker.cut("near")
    assert _drain(near) == [], "even that takes its way"
    clock.now_s = 2.0
    assert [type(event) for event in _drain(near)] == [Disconnected, Connected]
    clock.now_s = 1000.0
    assert _drain(near) == []
    assert far.poll(0) == Connected()
    assert far.poll(0) == Delivery(topic="n", payload=b"down")
    assert far.poll(0) is None


def test_messages_published_before_close_are_sent() -> None:
    broker = MemoryBroker()
    far, near = broker.client("far"), PacedTransport(broker.client("near"), lambda _: both_ways(1.0, latency_s=9.0))
    far.open(("n",))
    near.open(())
    near.publish("n", b"goodbye")
    near.close()
    assert far.poll(0) == Connected()
    assert far.poll(0) == Delivery(topic="n", payload=b"goodbye")


def test_bytes_counted_are_bytes_that_passed() -> None:
    broker, payloads = MemoryBroker(), list[tuple[Direction, str, int]]()
    far = broker.client("far")
    near = CountingTransport(broker.client("near"), on_payload=lambda *account: payloads.append(account))
    far.open(("up",))
    near.open(("down",))
    near.publish("up", b"12345")
    far.publish("down", b"123")
    far.publish("elsewhere", b"1")
    while near.poll(0) is not None:
        pass
    assert (near.sent_bytes, near.received_bytes) == (5, 3)
    assert payloads == [("sent", "up", 5), ("received", "down", 3)]
    near.close()
    assert far.poll(0) == Connected()
