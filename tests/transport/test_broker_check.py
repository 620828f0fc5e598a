"""The examination of a broker before a run, with a Mosquitto for each limit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transport.mosquitto import free_port, mosquitto, password_line
from transport.rigs import await_event, deliver, drain

from subfleet.protocol.blobs import CHUNK_BYTES
from subfleet.protocol.errors import TransportError
from subfleet.protocol.topics import Topics
from subfleet.transport.address import BrokerAddress, parse_url
from subfleet.transport.base import Connected, Delivery, Disconnected, Will
from subfleet.transport.broker_check import BrokerReport, examine_broker
from subfleet.transport.broker_terms import BrokerTerms, query_terms
from subfleet.transport.mqtt import MqttTransport

pytestmark = [pytest.mark.slow, pytest.mark.broker]

TOPICS = Topics("main")


@contextlib.contextmanager
def _broker(folder: Path, *settings: str, anonymous: bool = True) -> Iterator[BrokerAddress]:
    port = free_port()
    access = ("allow_anonymous true",) if anonymous else ()
    with mosquitto(folder, (f"listener {port} 127.0.0.1", *access, *settings), port):
        yield parse_url(f"mqtt://127.0.0.1:{port}")


def _examine(address: BrokerAddress) -> BrokerReport:
    return examine_broker(address, TOPICS, name="pi", client_id="main:doctor:pi", open_timeout_s=5.0)


@pytest.mark.parametrize(
    ("setting", "terms", "chunk_bytes", "short"),
    [
        ("", BrokerTerms(), CHUNK_BYTES, {}),
        ("message_size_limit 65536", BrokerTerms(), CHUNK_BYTES, {}),
        ("message_size_limit 20000", BrokerTerms(), 15_360, {"chunks": "only sizes up to 15360 bytes are delivered"}),
        ("message_size_limit 1000", BrokerTerms(), None, {"chunks": "not even the smallest, of 3840 bytes"}),
        ("max_packet_size 65536", BrokerTerms(message_bytes=65536), CHUNK_BYTES, {}),
        ("max_packet_size 20000", BrokerTerms(message_bytes=20000), 15_360, {"chunks": "only sizes up to 15360 bytes"}),
        ("retain_available false", BrokerTerms(retains=False), CHUNK_BYTES, {"retained messages": "not supported"}),
        ("max_qos 0", BrokerTerms(qos=0), CHUNK_BYTES, {"quality of service": "supports only 0"}),
        ("max_keepalive 10", BrokerTerms(keepalive_s=10), CHUNK_BYTES, {}),
        ("max_inflight_messages 1", BrokerTerms(), CHUNK_BYTES, {}),
        ("max_queued_messages 1", BrokerTerms(), CHUNK_BYTES, {}),
        ("persistence false", BrokerTerms(), CHUNK_BYTES, {}),
    ],
)
def test_each_limit_is_one_finding(
    tmp_path: Path, setting: str, terms: BrokerTerms, chunk_bytes: int | None, short: dict[str, str]
) -> None:
    with _broker(tmp_path, setting) as address:
        report = _examine(address)
    assert (report.terms, report.chunk_bytes) == (terms, chunk_bytes)
    assert {finding.check for finding in report.shortcomings} == set(short)
    assert all(words in finding.text for finding in report.shortcomings for words in (short[finding.check],))
    assert all(finding.serves == (chunk_bytes is not None) for finding in report.shortcomings)
    assert [finding.check for finding in report.findings[:4]] == ["broker", "chunks", "retained messages", "will"]
    assert "the round trip of a message takes" in report.findings[0].text


def test_a_running_fleet_gets_no_messages_of_the_check_and_none_are_retained(tmp_path: Path) -> None:
    with _broker(tmp_path) as address, contextlib.ExitStack() as stack:
        listeners = [MqttTransport(address, name) for name in ("server", "device", "everything")]
        subscriptions = (TOPICS.uplink("+", "+"),), (TOPICS.all("+"), TOPICS.downlink("pi", "+")), ("#",)
        for listener, topics in zip(listeners, subscriptions, strict=True):
            listener.open(topics)
            stack.callback(listener.close)
        _examine(address)
        deliveries = [[event for event in drain(listener) if isinstance(event, Delivery)] for listener in listeners]
        later = MqttTransport(address, "later")
        later.open(("#",))
        stack.callback(later.close)
        retained = [event for event in drain(later) if isinstance(event, Delivery)]
    assert deliveries[0] == deliveries[1] == retained == []
    assert deliveries[2]
    assert all(event.topic.startswith("subfleet/1/main/up/pi/check/") for event in deliveries[2])


def _write_access_rules(folder: Path, *rules: str) -> tuple[str, ...]:
    (folder / "users").write_text(password_line("pi", "secret") + "\n", encoding="utf-8")
    (folder / "access").write_text("\n".join(("user pi", *rules, "")), encoding="utf-8")
    return (f"password_file {folder / 'users'}", f"acl_file {folder / 'access'}", "allow_anonymous false")


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        (("topic readwrite subfleet/1/main/up/pi/#",), True),
        (("topic readwrite subfleet/1/main/up/pi/+",), False),
        (("topic write subfleet/1/main/up/pi/#",), False),
        (("topic read subfleet/1/main/up/pi/#",), False),
    ],
)
def test_a_broker_that_forbids_the_trial_is_reported_and_used(
    tmp_path: Path, rules: tuple[str, ...], allowed: bool
) -> None:
    with _broker(tmp_path, *_write_access_rules(tmp_path, *rules), anonymous=False) as address:
        known = BrokerAddress(host=address.host, port=address.port, username="pi", password="secret")  # noqa: S106
        report = _examine(known)
        with pytest.raises(TransportError, match="check the user name and password"):
            _examine(address)
    assert [finding.text for finding in report.shortcomings if "cannot be tested" in finding.text] == (
        [] if allowed else [report.shortcomings[0].text]
    )
    assert (report.chunk_bytes == CHUNK_BYTES) == allowed
    assert all(finding.serves for finding in report.findings)


def test_a_broker_with_only_mqtt_3_is_examined_as_well(embedded_url: str) -> None:
    report = _examine(parse_url(embedded_url))
    assert report.findings[0].text.startswith(
        "connected; the broker supports MQTT 3.1.1; the round trip of a message takes"
    )
    assert (report.shortcomings, report.chunk_bytes, report.terms) == ((), CHUNK_BYTES, BrokerTerms())
    assert query_terms(parse_url("mqtt://127.0.0.1:1"), "a") is None


def test_a_session_learns_which_messages_end_its_connection(tmp_path: Path) -> None:
    with _broker(tmp_path, "retain_available false") as address:
        device, server = MqttTransport(address, "device"), MqttTransport(address, "server")
        try:
            device.open(("n", "gone"), Will(topic="gone", payload=b"gone"))
            server.open(("n",))
            assert deliver(device, server, "n", b"1", retain=True).payload == b"1"
            # The server has no will, so it can connect, and is disconnected for retained messages until it asks.
            assert deliver(server, device, "n", b"2", retain=True).payload == b"2"
            drain(server, 2.0)
            server.publish("n", b"3", retain=True)
            events = drain(server, 0.5)
            assert not [event for event in events if isinstance(event, Disconnected)], "it is no longer disconnected"
            assert any(isinstance(event, Delivery) and event.payload == b"3" for event in events)
        finally:
            device.close()
            server.close()


def test_a_message_above_the_brokers_limit_is_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _broker(tmp_path, "max_packet_size 20000") as address:
        transport = MqttTransport(address, "a")
        transport.expect(BrokerTerms(message_bytes=20000))
        transport.open(("n",))
        try:
            assert await_event(transport, Connected) == Connected(message_bytes=20000)
            transport.publish("n", bytes(20000))
            deliver(transport, transport, "n", bytes(20000 - 12))
        finally:
            transport.close()
    assert [
        text for text in caplog.messages if "accepts at most 20000 bytes; raise its limit" in text
    ] == caplog.messages
