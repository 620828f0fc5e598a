import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matrices import examples
from transport.sides import ManualClock

from subfleet.transport.base import Connected, Delivery
from subfleet.transport.in_memory import Faults, MemoryBroker
from subfleet.transport.outbox import Outbox, Outgoing


def test_a_message_is_repeated_at_growing_intervals_until_its_ack() -> None:
    outbox = Outbox(retry_s=2.0)
    outbox.put("m", "t", b"x", retain=True)
    sent_s = [now_s for now_s in range(100) if outbox.list_due(float(now_s))]
    assert sent_s == [0, 2, 6, 14, 30, 46, 62, 78, 94]
    assert outbox.settle("m")
    assert not outbox.settle("m")
    assert outbox.list_due(1000.0) == ()
    assert outbox.pending == 0


def test_everything_is_due_after_a_reconnect_in_the_order_of_putting() -> None:
    outbox = Outbox()
    outbox.put("b", "t/b", b"1")
    outbox.put("a", "t/a", b"2")
    first = outbox.list_due(0.0)
    assert outbox.list_due(0.1) == ()
    outbox.resend_all()
    assert outbox.list_due(0.2) == first == (Outgoing(topic="t/b", payload=b"1"), Outgoing(topic="t/a", payload=b"2"))


def test_the_same_id_replaces_what_was_there() -> None:
    outbox = Outbox()
    outbox.put("m", "t", b"old")
    outbox.list_due(0.0)
    outbox.put("m", "t", b"new")
    assert [outgoing.payload for outgoing in outbox.list_due(0.1)] == [b"new"]
    assert outbox.pending == 1


@pytest.mark.parametrize("retry_s", [0.0, -1.0])
def test_a_wait_must_be_above_zero(retry_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Outbox(retry_s)


def disturb(broker: MemoryBroker, now_s: float, generator: random.Random, seed: int) -> None:
    """Cut a link now and then, and remove all faults after 2,900 s.

    On the faulty link a message and its ack get through once in forty times, which bounds no time. On a good link the
    longest wait is 16 s, and no message is under way for longer than the delay.
    """
    if now_s >= 2900:
        broker.faults = Faults(seed=seed)
    elif generator.random() < 0.002:
        broker.cut(generator.choice("sr"), mend_after_s=1.0)


@pytest.mark.slow
@examples(15)
@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.3, 0.6]), delay_s=st.sampled_from([0.0, 5.0]))
@example(seed=4264175, loss=0.6, delay_s=5.0)
def test_everything_arrives_with_acks_over_a_bad_link(seed: int, loss: float, delay_s: float) -> None:
    clock = ManualClock()
    broker = MemoryBroker(Faults(seed=seed, loss=loss, double=0.3, delay_s=delay_s), clock)
    sender, receiver = broker.client("s"), broker.client("r")
    sender.open(("ack",))
    receiver.open(("data",))
    outbox, generator, stored = Outbox(), random.Random(seed), set()
    for number in range(20):
        outbox.put(str(number), "data", str(number).encode())
    while outbox.pending:
        assert clock.now_s < 3000
        disturb(broker, clock.now_s, generator, seed)
        for outgoing in outbox.list_due(clock.now_s):
            sender.publish(outgoing.topic, outgoing.payload, retain=outgoing.retain)
        while (event := receiver.poll(0)) is not None:
            if isinstance(event, Delivery):
                stored.add(event.payload)
                receiver.publish("ack", event.payload)
        while (event := sender.poll(0)) is not None:
            if isinstance(event, Delivery):
                outbox.settle(event.payload.decode())
            elif isinstance(event, Connected):
                outbox.resend_all()
        clock.now_s += 0.1
    assert stored == {str(number).encode() for number in range(20)}
