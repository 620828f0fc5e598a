"""The guarantees of the `Transport` interface, which are weak, for every transport."""

import os
import threading

import pytest
from transport.rigs import Rig, await_event, deliver, drain

from subfleet.protocol.errors import TooLargeError
from subfleet.transport.base import MAX_PAYLOAD_BYTES, Connected, Delivery, Disconnected, Will

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size_bytes", [0, 1, 131_116, MAX_PAYLOAD_BYTES])
def test_what_arrives_is_what_was_sent(rig: Rig, size_bytes: int) -> None:
    receiver, sender = rig.connect("receiver", "a/+"), rig.connect("sender")
    payload = os.urandom(size_bytes)
    arrived = deliver(sender, receiver, rig.topic("a/b"), payload)
    assert arrived.payload == payload
    assert not arrived.retained


def test_a_retained_message_reaches_later_subscribers(rig: Rig) -> None:
    watcher, sender = rig.connect("watcher", "#"), rig.connect("sender")
    deliver(sender, watcher, rig.topic("state"), b"old", retain=True)
    deliver(sender, watcher, rig.topic("state"), b"new", retain=True)
    deliveries: list[Delivery] = []
    for attempt in range(20):  # the message may be lost in each attempt
        late = rig.connect(f"late-{attempt}", "state")
        deliveries += [event for event in drain(late, 0.1) if isinstance(event, Delivery)]
        if any(event.payload == b"new" for event in deliveries):
            break
    assert deliveries[-1].payload == b"new" or not rig.lossless
    assert any(event.payload == b"new" and event.retained for event in deliveries)


def test_an_empty_retained_message_clears_the_topic(rig: Rig) -> None:
    watcher, sender = rig.connect("watcher", "#"), rig.connect("sender")
    deliver(sender, watcher, rig.topic("state"), b"old", retain=True)
    deliver(sender, watcher, rig.topic("state"), b"", retain=True)
    late = rig.connect("late", "state")
    drained = [event for event in drain(late) if isinstance(event, Delivery)]
    assert all(event.payload != b"old" for event in drained) or not rig.lossless


def test_only_subscribed_topics_are_delivered(rig: Rig) -> None:
    watcher, sender = rig.connect("watcher", "#"), rig.connect("sender")
    deliver(sender, watcher, rig.topic("retained"), b"before", retain=True)
    narrow, silent = rig.connect("narrow", "up/+/task"), rig.connect("silent")
    for rest in ("up/x/other", "up/x/task/deeper", "up/task", "down/x/task"):
        deliver(sender, watcher, rig.topic(rest), b"not this")
    deliver(sender, narrow, rig.topic("up/x/task"), b"this")
    deliveries = [event for event in drain(narrow) if isinstance(event, Delivery)]
    assert {event.topic for event in deliveries} <= {rig.topic("up/x/task")}
    assert not [event for event in drain(silent) if isinstance(event, Delivery)]


def test_a_payload_above_the_limit_is_refused(rig: Rig) -> None:
    sender = rig.connect("sender")
    with pytest.raises(TooLargeError, match="1048577 bytes"):
        sender.publish(rig.topic("a"), bytes(MAX_PAYLOAD_BYTES + 1))


def test_poll_without_events_is_none(rig: Rig) -> None:
    lonely = rig.connect("lonely", "nothing")
    assert lonely.poll(0) is None
    assert lonely.poll(0.01) is None


def test_after_a_cut_the_subscriptions_are_restored(rig: Rig) -> None:
    receiver, sender = rig.connect("receiver", "a"), rig.connect("sender")
    for number in range(2):
        rig.cut(rig.name("receiver"))
        assert isinstance(await_event(receiver, Disconnected), Disconnected)
        receiver.publish(rig.topic("lost"), b"publish neither waits nor raises while there is no link")
        await_event(receiver, Connected)
        deliver(sender, receiver, rig.topic("a"), b"after cut %d" % number)


def test_a_client_whose_link_breaks_leaves_its_will(rig: Rig) -> None:
    watcher = rig.connect("watcher", "presence/#")
    topic = rig.topic("presence/mortal")
    wills: list[Delivery] = []
    for attempt in range(20):  # the will may be lost
        mortal = rig.client(f"mortal-{attempt}")
        mortal.open((), Will(topic=topic, payload=b"gone"))
        await_event(mortal, Connected)
        rig.cut(rig.name(f"mortal-{attempt}"))
        wills = [event for event in drain(watcher, 0.5) if isinstance(event, Delivery)]
        if wills:
            break
    assert {(will.topic, will.payload) for will in wills} == {(topic, b"gone")}


def test_a_client_that_closes_leaves_no_will(rig: Rig) -> None:
    watcher, polite = rig.connect("watcher", "presence/#"), rig.client("polite")
    polite.open((), Will(topic=rig.topic("presence/polite"), payload=b"gone"))
    await_event(polite, Connected)
    polite.close()
    polite.close()
    polite.publish(rig.topic("presence/polite"), b"too late, and harmless")
    assert not [event for event in drain(watcher) if isinstance(event, Delivery) and event.payload == b"gone"]


def test_any_thread_may_publish(rig: Rig) -> None:
    receiver, sender = rig.connect("receiver", "n/+"), rig.connect("sender")

    def publish(number: int) -> None:
        for repetition in range(25):
            sender.publish(rig.topic(f"n/{number}"), b"%d" % repetition)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    drain(sender, 0.1)  # a paced sender sends while it polls
    arrived = [(event.topic, event.payload) for event in drain(receiver, 0.4) if isinstance(event, Delivery)]
    published = {(rig.topic(f"n/{number}"), b"%d" % repetition) for number in range(4) for repetition in range(25)}
    assert set(arrived) <= published
    if rig.lossless:
        assert set(arrived) == published
