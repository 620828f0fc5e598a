"""The transports with the same contract, each with a small interface for tests."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from transport.cuttable_proxy import CuttableProxy

from subfleet.transport.address import parse_url
from subfleet.transport.base import Connected, Delivery, Disconnected, Event, Transport
from subfleet.transport.in_memory import Faults, MemoryBroker
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.pacing import LinkConditions, PacedTransport

DEADLINE_S = 30.0
FAULTS = Faults(seed=7, loss=0.1, double=0.3, delay_s=0.02)
_NUMBERS = itertools.count()


@dataclass
class Rig:
    """Makes clients and breaks their links. `lossless`: all messages on an unbroken link arrive."""

    lossless: bool
    make: Callable[[str], Transport]
    cut: Callable[[str], None]
    opened: list[Transport | CuttableProxy] = field(default_factory=list)
    root: str = field(default_factory=lambda: f"t{next(_NUMBERS)}-{time.time_ns()}")

    def name(self, client: str) -> str:
        """A client id that no other test uses."""
        return f"{self.root}-{client}"

    def topic(self, rest: str) -> str:
        """A topic that no other test uses."""
        return f"{self.root}/{rest}"

    def client(self, name: str) -> Transport:
        transport = self.make(self.name(name))
        self.opened.append(transport)
        return transport

    def connect(self, name: str, *subscriptions: str) -> Transport:
        transport = self.client(name)
        transport.open(tuple(self.topic(subscription) for subscription in subscriptions))
        await_event(transport, Connected)
        return transport

    def close(self) -> None:
        for closeable in reversed(self.opened):
            closeable.close()


def await_event(transport: Transport, kind: type[Event]) -> Event:
    """The next event of a kind; earlier events are dropped."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        event = transport.poll(0.1)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} came within {DEADLINE_S} s")


def deliver(sender: Transport, receiver: Transport, topic: str, payload: bytes, *, retain: bool = False) -> Delivery:
    """Send a message repeatedly, as all our senders do, until it arrives."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        sender.publish(topic, payload, retain=retain)
        retry_at_s = time.monotonic() + 0.25
        while time.monotonic() < retry_at_s:
            sender.poll(0)
            event = receiver.poll(0.05)
            if isinstance(event, Delivery) and event.topic == topic and event.payload == payload:
                return event
    raise AssertionError(f"nothing arrived on {topic} within {DEADLINE_S} s")


def drain(transport: Transport, quiet_s: float = 0.2) -> list[Event]:
    """All events until none arrives for a while."""
    events = []
    while (event := transport.poll(quiet_s)) is not None:
        events.append(event)
    return events


def memory_rig(faults: Faults | None = None) -> Rig:
    broker = MemoryBroker(faults)
    return Rig(lossless=faults is None, make=broker.client, cut=broker.cut)


def paced_rig() -> Rig:
    broker = MemoryBroker()

    def make(client_id: str) -> Transport:
        link = LinkConditions(downlink_bps=200e6, uplink_bps=100e6, latency_s=0.002)
        return PacedTransport(broker.client(client_id), lambda _: link)

    return Rig(lossless=True, make=make, cut=broker.cut)


def mqtt_rig(url: str) -> Rig:
    """Each client has its own proxy, so that links can be cut separately."""
    proxies: dict[str, CuttableProxy] = {}

    def make(client_id: str) -> Transport:
        proxies[client_id] = proxy = CuttableProxy(urlsplit(url).port or 1883)
        rig.opened.append(proxy)
        return MqttTransport(parse_url(proxy.url), client_id, open_timeout_s=DEADLINE_S)

    rig = Rig(lossless=True, make=make, cut=lambda client_id: proxies[client_id].cut())
    return rig


__all__ = [
    "FAULTS",
    "Connected",
    "Disconnected",
    "Rig",
    "await_event",
    "deliver",
    "drain",
    "memory_rig",
    "mqtt_rig",
    "paced_rig",
]
