"""The messages of each device are limited to a rate; other devices and transfers are not affected."""

import gzip

import pytest

from subfleet.protocol.messages import Presence, encode
from subfleet.protocol.topics import Topics
from subfleet.transport.base import Delivery, Transport
from subfleet.transport.in_memory import MemoryBroker
from subfleet.transport.rating import RatedTransport

TOPICS = Topics("main")


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    def __init__(self) -> None:
        self.clock, self.complaints = Clock(), list[tuple[str, str]]()
        broker = MemoryBroker(clock=self.clock)
        self.server = RatedTransport(
            broker.client("server"),
            TOPICS,
            lambda sender, text: self.complaints.append((sender, text)),
            units_per_s=2.0,
            burst_units=40.0,
            clock=self.clock,
        )
        self.server.open((TOPICS.uplink("+", "+"),))
        self.eve, self.ada = broker.client("eve"), broker.client("ada")
        for client in (self.eve, self.ada):
            client.open(())

    def list_senders(self) -> list[str]:
        """The senders of the messages that are delivered, from their topics."""
        senders = []
        for _ in range(10_000):
            event = self.server.poll(0.0)
            if isinstance(event, Delivery):
                senders.append(TOPICS.parse(event.topic).client_id)
            elif event is None:
                break
        return senders


def say(transport: Transport, name: str, kind: str = "presence", payload: bytes = b"{}") -> None:
    transport.publish(TOPICS.uplink(name, kind), payload)


def test_messages_above_the_rate_are_dropped_and_others_are_delivered() -> None:
    rig = Rig()
    for _ in range(500):
        say(rig.eve, "eve")
    say(rig.ada, "ada", payload=encode(Presence(client_id="ada", session_id="s", online=True)))
    assert rig.list_senders() == ["eve"] * 40 + ["ada"]
    assert {sender for sender, _ in rig.complaints} == {"eve"}
    rig.clock.now_s += 3.0
    for _ in range(500):
        say(rig.eve, "eve")
    assert rig.list_senders() == ["eve"] * 6, "as many as its rate permits"
    rig.clock.now_s += 1000.0
    for _ in range(500):
        say(rig.eve, "eve")
    assert rig.list_senders() == ["eve"] * 40, "silence saves up one burst at most"


def test_long_messages_count_as_many() -> None:
    """A profile of 65,536 class counts takes as long to decode as twenty short messages."""
    rig = Rig()
    for _ in range(10):
        say(rig.eve, "eve", "profile", b"1" * 150 * 1024)
        say(rig.ada, "ada", "profile", gzip.compress(b"1" * 150 * 1024))
    assert sorted(rig.list_senders()) == ["ada", "eve"], "also if they are compressed"


def test_transfers_have_windows_and_no_rate() -> None:
    rig = Rig()
    for _ in range(500):
        say(rig.eve, "eve", "chunk", b"1" * 60_000)
        say(rig.eve, "eve", "request", b"{}")
    assert len(rig.list_senders()) == 1000


def test_long_messages_of_transfers_count_by_their_length() -> None:
    rig = Rig()
    for kind in ("request", "missing"):
        for _ in range(500):
            say(rig.eve, "eve", kind, b"1" * 100_000)
    assert rig.list_senders() == ["eve"]


def test_two_messages_a_second_are_within_the_rate() -> None:
    rig = Rig()
    for _ in range(1000):
        for kind in ("presence", "telemetry"):
            say(rig.ada, "ada", kind)
        assert rig.list_senders() == ["ada", "ada"]
        rig.clock.now_s += 1.0
    assert not rig.complaints


@pytest.mark.slow
def test_ever_new_names_share_an_account() -> None:
    rig = Rig()
    for number in range(2**16 + 500):
        say(rig.eve, f"n{number}")
        if number % 1000 == 999:
            rig.list_senders()
    assert len(rig.complaints) > 400
    rig.list_senders()
    rig.clock.now_s += 61.0
    say(rig.ada, "ada")
    for _ in range(100):
        say(rig.eve, "n0")
    assert rig.list_senders() == ["ada", *["n0"] * 40], "silent senders are forgotten"
