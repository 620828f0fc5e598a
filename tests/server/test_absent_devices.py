"""Devices of an earlier run that only the broker still knows: they open no round, and no round waits for them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.fake_device import Behaviour, Device
from server.server_rig import FakeExports, Notes, World, config
from transport.mosquitto import open_mosquitto

from subfleet.link.broker import EmbeddedBroker
from subfleet.link.device_link import connect_devices
from subfleet.protocol.messages import Presence, encode
from subfleet.protocol.topics import Topics
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.sections import Deadlines
from subfleet.transport.address import parse_url
from subfleet.transport.base import Connected, Delivery, Transport
from subfleet.transport.mqtt import MqttTransport

pytestmark = pytest.mark.slow

LONG_S = 1e4
LIMIT_S = 60.0
TOPICS = Topics("main")
ABSENT = {"dead": True, "left": False}
"""The presence that the broker retains: one device vanished without notice, the other said goodbye."""


def settings() -> Run:
    """Two clients make a round, and every deadline is longer than any test takes."""
    deadlines = Deadlines(join_s=LONG_S, measure_s=LONG_S, round_s=LONG_S, lease_s=LONG_S, linger_s=0.0)
    return config(rounds=1, min_clients=2, deploy_targets=(), deadlines=deadlines)


def leave_traces(name: str, link: Transport, folder: Path, *, online: bool) -> None:
    """Publish a device's retained messages and leave without a will; return when the broker has them."""
    ghost = Device(name, link, folder, time.monotonic, Behaviour())
    traces = (Presence(client_id=name, session_id=ghost.session_id, online=online), ghost.profile())
    link.open((TOPICS.uplink(name, "+"),))
    while not isinstance(link.poll(LIMIT_S), Connected):
        pass
    for message in traces:
        ghost.send(message, retain=True)
    awaited = {encode(message) for message in traces}
    while awaited:
        event = link.poll(LIMIT_S)
        assert isinstance(event, Delivery), "the broker has not received the messages"
        awaited.discard(event.payload)
    link.close()


def list_statuses(server: Server) -> list[dict[str, str]]:
    return [{row.client_id: row.status for row in record.clients} for record in server.result().rounds]


def test_devices_that_are_gone_open_no_round_and_delay_none(tmp_path: Path) -> None:
    world = World(tmp_path, settings(), {})
    world.server.close()
    for name, online in ABSENT.items():
        leave_traces(name, world.broker.client(name), tmp_path, online=online)
    world.server = world.new_server()
    world.server.open()
    for name in ("ada", "bob"):
        for _ in range(40):
            world.turn()
        assert world.server.state.phase == "waiting"
        world.devices[name] = world.new_device(name, Behaviour())
        world.devices[name].open()
    world.run(turns=100)
    assert list_statuses(world.server) == [{"ada": "aggregated", "bob": "aggregated"}]
    assert not [message for message in world.notes.messages if any(name in message for name in ABSENT)]


@pytest.fixture(params=["embedded", "mosquitto"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "mosquitto":
        with open_mosquitto() as url:
            yield url
    else:
        with EmbeddedBroker() as broker:
            yield broker.url


@pytest.mark.broker
def test_retained_messages_of_a_real_broker_count_for_nothing(tmp_path: Path, url: str) -> None:
    for name, online in ABSENT.items():
        leave_traces(name, MqttTransport(parse_url(url), name), tmp_path, online=online)
    exports = FakeExports(tmp_path / "exports")
    server = Server(
        settings(),
        connect_devices("main", MqttTransport(parse_url(url), "server")),
        Notes(),
        state_folder=tmp_path / "state",
        exports=exports,
    )
    devices = [
        Device(name, MqttTransport(parse_url(url), name), tmp_path / "new", time.monotonic, Behaviour())
        for name in ("ada", "bob")
    ]
    server.open()
    until_s = time.monotonic() + LIMIT_S
    try:
        for device in devices:
            device.open()
        while not server.finished and time.monotonic() < until_s:
            for device in devices:
                device.step()
            server.step(0.01)
    finally:
        for device in devices:
            device.transport.close()
        server.close()
    assert server.state.phase == "finished"
    assert set(server.state.live.members) == {"ada", "bob"}
