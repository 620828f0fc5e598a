"""Two processes with the same lock: the first one stays, the second one ends, and both report it."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from transport.rigs import FAULTS

from subfleet.protocol.errors import TakenError
from subfleet.protocol.messages import Claim, encode
from subfleet.protocol.topics import Topics
from subfleet.transport.address import mqtt_client_id, parse_url
from subfleet.transport.base import Delivery, Transport
from subfleet.transport.in_memory import Faults, MemoryBroker
from subfleet.transport.locking import Lock, LockingTransport, make_device_lock, make_server_lock
from subfleet.transport.mqtt import MqttTransport

TOPICS = Topics("main")
CAM = make_device_lock(TOPICS, "cam")


@dataclass
class ManualClock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Holder:
    """A process that needs a lock."""

    transport: LockingTransport
    messages: list[str]
    deliveries: list[Delivery] = field(default_factory=list)
    ended: str = ""

    def step(self) -> None:
        if self.ended:
            return
        try:
            while (event := self.transport.poll(0)) is not None:
                if isinstance(event, Delivery):
                    self.deliveries.append(event)
        except TakenError as error:
            self.ended = str(error)
            self.transport.close()


class LockRig:
    """A broker and the processes that claim locks at it, with a manual clock."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(faults, clock=self.clock)
        self.holders: list[Holder] = []

    def join(self, client_id: str, lock: Lock = CAM, *, since_s: float, subscriptions: tuple[str, ...] = ()) -> Holder:
        messages: list[str] = []
        inner = self.broker.client(client_id)
        transport = LockingTransport(
            inner, lock, tell=messages.append, clock=self.clock, unix_time=lambda: since_s
        )  # fmt: skip
        transport.open(subscriptions)
        self.holders.append(Holder(transport, messages))
        return self.holders[-1]

    def run(self, seconds: float = 10.0) -> None:
        for _ in range(int(seconds / 0.25)):
            self.clock.now_s += 0.25
            for holder in self.holders:
                holder.step()


@pytest.mark.parametrize("faults", [None, FAULTS], ids=["calm", "faulty"])
def test_the_one_that_came_later_leaves_and_both_are_told(faults: Faults | None) -> None:
    rig = LockRig(faults)
    first = rig.join("a", since_s=10.0)
    rig.run(40.0)
    later = rig.join("b", since_s=20.0)
    rig.run(120.0)
    assert later.ended == (
        "another device with the id 'cam' joined this fleet first; choose another --id, or stop that device"
    )
    assert not first.ended
    assert first.messages == [
        "another device with the id 'cam' joined this fleet later; give it another id, or stop it"
    ]
    assert not later.messages


def test_the_start_time_decides_and_not_the_order_of_connections() -> None:
    rig = LockRig()
    later = rig.join("b", since_s=20.0)
    rig.run()
    first = rig.join("a", since_s=10.0)
    rig.run()
    assert later.ended
    assert (first.ended, len(first.messages)) == ("", 1)


def test_of_two_that_came_at_once_one_stays() -> None:
    rig = LockRig()
    holders = [rig.join("a", since_s=10.0), rig.join("b", since_s=10.0)]
    rig.run()
    assert sorted(bool(holder.ended) for holder in holders) == [False, True]


def test_two_processes_with_one_client_id_detect_each_other() -> None:
    rig = LockRig()
    first = rig.join("cam", since_s=10.0)
    rig.run()
    later = rig.join("cam", since_s=20.0)
    for _ in range(6):  # the broker accepts each new connection, and ends the other
        rig.run(2.0)
        if first.ended or later.ended:
            break
        for holder in (first, later):
            holder.transport.open(())
            rig.run(2.0)
    assert later.ended
    assert not first.ended
    assert len(first.messages) == 1


def test_a_restarted_process_takes_over_its_own_lock() -> None:
    rig = LockRig()
    killed = rig.join("cam", since_s=10.0)
    rig.run()
    rig.holders.remove(killed)  # killed: its retained claim stays at the broker
    restarted = rig.join("cam", since_s=20.0)
    rig.run(90.0)
    assert (restarted.ended, restarted.messages) == ("", [])


def test_an_old_retained_claim_ends_no_process() -> None:
    rig = LockRig()
    holder = rig.join("cam", since_s=20.0)
    rig.run()
    restored = rig.broker.client("restored")
    restored.open(())
    old = encode(Claim(session_id="old", holder="cam", since_s=1.0))
    for _ in range(3):  # after each connect
        restored.publish(CAM.topic, old, retain=True)
        rig.run()
    assert (holder.ended, holder.messages) == ("", [])


def test_a_process_without_its_own_claims_reports_it_once() -> None:
    clock, messages = ManualClock(), [""]
    broker = MemoryBroker(clock=clock)
    # Without a subscription, nothing is delivered.
    inner = broker.client("cam")
    transport = LockingTransport(inner, CAM, tell=messages.append, clock=clock)
    inner.open(())
    for _ in range(200):
        clock.now_s += 0.25
        transport.poll(0)
    assert len(messages) == 2
    assert messages[1].startswith(f"our own claims on {CAM.topic} are not received")


def test_damaged_claims_end_no_session() -> None:
    rig = LockRig()
    holder = rig.join("cam", since_s=20.0)
    rig.run()
    stranger = rig.broker.client("stranger")
    stranger.open(())
    good = encode(Claim(session_id="s", holder="cam", since_s=1.0))
    for payload in (b"{", good.replace(b"1.0", b"-1"), good.replace(b'"cam"', b'"[/]"'), b"", b"\xff" * 1000):
        stranger.publish(CAM.topic, payload)
    rig.run()
    assert (holder.ended, holder.messages) == ("", [])


def test_a_lock_is_released() -> None:
    rig = LockRig()
    holder = rig.join("cam", since_s=10.0)
    rig.run()
    holder.transport.close()
    watcher = rig.broker.client("watcher")
    watcher.open((CAM.topic,))
    assert not [event for event in iter(lambda: watcher.poll(0), None) if isinstance(event, Delivery)]


def test_a_second_server_publishes_nothing_before_the_first_could_answer() -> None:
    rig = LockRig()
    device = rig.broker.client("device")
    device.open((TOPICS.all("round"),))
    first = rig.join("main:server:long", make_server_lock(TOPICS, "long"), since_s=10.0)
    rig.run()
    later = rig.join("main:server:short", make_server_lock(TOPICS, "short"), since_s=20.0)
    for _ in range(40):
        rig.run(0.25)
        later.transport.publish(TOPICS.all("round"), b"mine")
    assert later.ended == "run 'long' already serves this fleet on this broker; choose another fleet, or stop that run"
    assert first.messages == [
        "another server, of run 'short', joined this fleet later; give it another fleet, or stop it"
    ]  # fmt: skip
    assert not [event for event in iter(lambda: device.poll(0), None) if isinstance(event, Delivery)]


def test_a_restarted_server_publishes_again_after_a_while() -> None:
    rig = LockRig()
    rig.join("main:server:run", make_server_lock(TOPICS, "run"), since_s=10.0)
    rig.run()
    rig.holders.clear()
    device = rig.broker.client("device")
    device.open((TOPICS.all("round"),))
    restarted = rig.join("main:server:run", make_server_lock(TOPICS, "run"), since_s=20.0)
    for _ in range(20):
        rig.run(0.25)
        restarted.transport.publish(TOPICS.all("round"), b"mine")
    assert [event for event in iter(lambda: device.poll(0), None) if isinstance(event, Delivery)]


def test_fleets_and_roles_and_names_share_no_client_id() -> None:
    ids = {
        mqtt_client_id(fleet, role, name)
        for fleet in ("main", "other", "main:device", "main-device")
        for role in ("server", "device", "doctor")
        for name in ("server", "cam", "device-cam")
        if ":" not in fleet
    }
    assert len({client_id.rpartition(":")[0] for client_id in ids}) == 3 * 3 * 3


def test_nobody_can_guess_a_client_id() -> None:
    ids = [mqtt_client_id("main", "server", "run") for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(re.fullmatch("main:server:run:[0-9a-f]{16}", client_id) for client_id in ids)


def _await_end(transports: dict[str, tuple[Transport, list[str]]], limit: int = 600) -> dict[str, str]:
    """Poll until a transport ends and the others have reported it; the error by name."""
    ended: dict[str, str] = {}
    for _ in range(limit):
        for name, (transport, _) in transports.items():
            if name in ended:
                continue
            try:
                transport.poll(0.05)
            except TakenError as error:
                ended[name] = str(error)
                transport.close()
        if ended and all(messages for name, (_, messages) in transports.items() if name not in ended):
            return ended
    raise AssertionError("no transport ended")


def _claim(url: str, client_id: str, lock: Lock, since_s: float) -> tuple[Transport, list[str]]:
    messages: list[str] = []
    inner = MqttTransport(parse_url(url), client_id)
    transport = LockingTransport(inner, lock, repeat_s=0.5, tell=messages.append, unix_time=lambda: since_s)
    transport.open(())
    return transport, messages


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest) -> Callable[[str], str]:
    return lambda kind: str(request.getfixturevalue(f"{kind}_url"))


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("kind", ["embedded", "mosquitto"])
def test_of_two_devices_with_one_id_the_second_ends(
    urls: Callable[[str], str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def join(since_s: float) -> tuple[Transport, list[str]]:
        lock = make_device_lock(TOPICS, f"cam-{kind}")
        return _claim(urls(kind), mqtt_client_id("main", "device", f"cam-{kind}"), lock, since_s)

    transports = {"first": join(10.0)}
    transports["first"][0].poll(0.5)
    transports["later"] = join(20.0)
    caplog.set_level(logging.CRITICAL)
    try:
        ended = _await_end(transports)
    finally:
        for transport, _ in transports.values():
            transport.close()
    assert list(ended) == ["later"]
    assert len(transports["first"][1]) == 1


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("kind", ["embedded", "mosquitto"])
def test_of_two_servers_of_one_fleet_the_second_ends_and_other_fleets_are_unaffected(
    urls: Callable[[str], str], kind: str
) -> None:
    url, fleet = urls(kind), f"fleet-{kind}"

    def serve(fleet: str, run: str, since_s: float) -> tuple[Transport, list[str]]:
        lock = make_server_lock(Topics(fleet), run)
        return _claim(url, mqtt_client_id(fleet, "server", run), lock, since_s)

    transports = {"first": serve(fleet, "long", 10.0)}
    other = serve(f"{fleet}-2", "long", 20.0)
    transports["first"][0].poll(0.5)
    transports["later"] = serve(fleet, "short", 30.0)
    try:
        ended = _await_end(transports)
        assert list(ended) == ["later"]
        assert len(transports["first"][1]) == 1
        for _ in range(20):
            other[0].poll(0.05)
        assert not other[1]
    finally:
        for transport, _ in (*transports.values(), other):
            transport.close()
