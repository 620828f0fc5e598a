import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.sides import ManualClock

from subfleet.transport.base import Connected, Delivery, Disconnected, Event
from subfleet.transport.counting import CountingTransport, Direction
from subfleet.transport.in_memory import MemoryBroker
from subfleet.transport.pacing import Lane, PacedTransport

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
        PacedTransport(MemoryBroker().client("a")).set_rates(None, rate_bps)


def test_both_directions_take_their_time_and_keep_their_order() -> None:
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    far, near = broker.client("far"), PacedTransport(broker.client("near"), clock)
    far.open(("n",))
    near.open(("n",))
    assert far.poll(0) == Connected()
    assert near.poll(0) == Connected()
    near.set_rates(8000.0, 4000.0)
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
    far, near = broker.client("far"), PacedTransport(broker.client("near"), clock)
    far.open(("n",))
    near.open(("n",))
    near.set_rates(8.0, 8.0)
    far.publish("n", b"down")
    near.publish("n", b"up")
    assert _drain(near) == [Connected()]
    broker.cut("near")
    assert [type(event) for event in _drain(near)] == [Disconnected, Connected]
    near.set_rates(None, None)
    assert _drain(near) == []
    assert far.poll(0) == Connected()
    assert far.poll(0) == Delivery(topic="n", payload=b"down")
    assert far.poll(0) is None


def test_messages_published_before_close_are_sent() -> None:
    broker = MemoryBroker()
    far, near = broker.client("far"), PacedTransport(broker.client("near"))
    far.open(("n",))
    near.open(())
    near.set_rates(1.0, 1.0)
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
