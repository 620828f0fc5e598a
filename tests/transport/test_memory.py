import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.sides import ManualClock

from subfleet.transport.base import Connected, Delivery, Disconnected, Event, Will
from subfleet.transport.in_memory import Faults, MemoryBroker, MemoryTransport
from subfleet.transport.topic_filter import matches


def _drain(transport: MemoryTransport) -> list[Event]:
    events = []
    while (event := transport.poll(0)) is not None:
        events.append(event)
    return events


def _receive_numbers(transport: MemoryTransport) -> list[int]:
    return [int(event.payload) for event in _drain(transport) if isinstance(event, Delivery)]


def _receive_traffic(faults: Faults, *, second_sender: bool) -> list[int]:
    """The messages of 200 from one sender that a receiver gets, after all are due."""
    clock = ManualClock()
    broker = MemoryBroker(faults, clock)
    receiver, sender, second_client = broker.client("receiver"), broker.client("sender"), broker.client("other")
    receiver.open(("n",))
    sender.open(())
    second_client.open(())
    for number in range(200):
        sender.publish("n", b"%d" % number)
        if second_sender:
            second_client.publish("elsewhere", b"1000")
    clock.now_s = 1000.0
    return _receive_numbers(receiver)


def test_without_faults_everything_arrives_once_and_in_order() -> None:
    assert _receive_traffic(Faults(), second_sender=True) == list(range(200))


def test_equal_seeds_give_equal_faults_whatever_others_send() -> None:
    faults = Faults(seed=3, loss=0.2, double=0.2, delay_s=5.0)
    assert _receive_traffic(faults, second_sender=False) == _receive_traffic(faults, second_sender=True)
    assert _receive_traffic(faults, second_sender=False) != _receive_traffic(
        Faults(seed=4, loss=0.2, double=0.2, delay_s=5.0), second_sender=False
    )


def test_each_fault_has_its_effect() -> None:
    lost = _receive_traffic(Faults(loss=0.2), second_sender=False)
    assert lost == sorted(set(lost))
    assert 90 <= len(lost) <= 165  # 0.8 twice: about 128 of 200
    doubled = _receive_traffic(Faults(double=1.0), second_sender=False)
    assert doubled == [number for number in range(200) for _ in range(2)]
    late = _receive_traffic(Faults(delay_s=3.0), second_sender=False)
    assert sorted(late) == list(range(200)) != late


def test_a_delayed_message_arrives_at_its_time() -> None:
    clock = ManualClock()
    broker = MemoryBroker(Faults(seed=1, delay_s=10.0), clock)
    receiver = broker.client("a")
    receiver.open(("n",))
    receiver.publish("n", b"0")
    assert _drain(receiver) == [Connected()]
    clock.now_s = 10.0
    assert _receive_numbers(receiver) == [0]


@pytest.mark.parametrize("wrong", [{"loss": 1.0}, {"loss": -0.1}, {"double": 1.1}, {"delay_s": -1.0}])
def test_invalid_faults_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"(loss|double|delay_s) is"):
        Faults(**wrong)  # type: ignore[arg-type]  # seed is the one field that is no float


def test_a_cut_loses_what_was_on_its_way_and_mends_after_its_time() -> None:
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    watcher, mortal = broker.client("watcher"), broker.client("mortal")
    watcher.open(("presence", "up"))
    mortal.open(("down",), Will(topic="presence", payload=b"gone"))
    broker.cut("mortal", mend_after_s=5.0)
    broker.cut("mortal")
    watcher.publish("down", b"lost")
    mortal.publish("up", b"lost too")
    assert _drain(mortal) == [Connected(), Disconnected(reason="the link was cut")]
    assert _drain(watcher) == [Connected(), Delivery(topic="presence", payload=b"gone")]
    clock.now_s = 5.0
    assert _drain(mortal) == [Connected()]
    watcher.publish("down", b"found")
    assert _drain(mortal) == [Delivery(topic="down", payload=b"found")]


def test_a_dropped_link_is_found_again_only_when_it_is_mended() -> None:
    broker = MemoryBroker(clock=ManualClock())
    client = broker.client("a")
    client.open(())
    client.drop_link()
    assert [type(event) for event in _drain(client)] == [Connected, Disconnected]
    broker.mend("a")
    assert _drain(client) == [Connected()]
    broker.mend("nobody")
    broker.cut("nobody")


def test_a_second_client_of_the_same_id_takes_the_place_of_the_first() -> None:
    broker = MemoryBroker(clock=ManualClock())
    first, second = broker.client("a"), broker.client("a")
    first.open(("n",))
    second.open(("n",))
    first.publish("n", b"1")
    second.publish("n", b"2")
    first.close()
    second.publish("n", b"3")
    assert _receive_numbers(second) == [2, 3]
    assert [type(event) for event in _drain(first)] == [Connected, Disconnected]


def test_before_open_nothing_happens() -> None:
    client = MemoryBroker().client("a")
    client.publish("n", b"1")
    client.close()
    assert client.poll(0) is None


@pytest.mark.parametrize(
    ("topic_filter", "topic", "covered"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/b", "a", False),
        ("a/+", "a/b", True),
        ("a/+", "a", False),
        ("a/+", "a/b/c", False),
        ("+/+", "/b", True),
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("a/#", "ab", False),
        ("#", "a/b", True),
        ("#", "$SYS/load", False),
        ("+/load", "$SYS/load", False),
        ("$SYS/#", "$SYS/load", True),
        ("a/+/c/#", "a/b/c", True),
        ("a/+/c/#", "a/b", False),
    ],
)
def test_filters_cover_what_mqtt_says(topic_filter: str, topic: str, covered: bool) -> None:
    assert matches(topic_filter, topic) is covered


_LEVELS = st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=4)


@pytest.mark.slow
@given(levels=_LEVELS, data=st.data())
def test_a_topic_is_covered_by_every_generalisation_of_itself(levels: list[str], data: st.DataObject) -> None:
    general = [data.draw(st.sampled_from([level, "+"])) for level in levels]
    level_count = data.draw(st.integers(0, len(levels)))
    assert matches("/".join(general), "/".join(levels))
    assert matches("/".join(itertools.chain(general[:level_count], ["#"])), "/".join(levels))
