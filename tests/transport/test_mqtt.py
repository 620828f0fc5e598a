"""What is particular to MQTT: addresses, refusals in one sentence, brokers that come and go."""

import socket
import threading
import time

import pytest
from paho.mqtt.client import MQTTMessage
from transport.rigs import await_event, deliver

from subfleet.protocol.errors import ConfigError, TransportError
from subfleet.server.broker import EmbeddedBroker
from subfleet.transport.address import parse_url
from subfleet.transport.base import MAX_PAYLOAD_BYTES, Connected, Delivery, Disconnected
from subfleet.transport.mqtt import MqttTransport


def _fake_broker(answer: bytes) -> int:
    """A listener that answers every connection with the same bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            link, _ = listener.accept()
            with link:
                link.recv(1024)
                link.sendall(answer)
                time.sleep(1.0)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def test_an_address_is_read() -> None:
    address = parse_url("mqtt://us%20er:p%40ss@host:2000")
    assert (address.host, address.port, address.username, address.password) == ("host", 2000, "us er", "p@ss")
    assert parse_url("mqtt://host").port == 1883
    assert "p@ss" not in repr(address)


@pytest.mark.parametrize(
    "url", ["", "host:1883", "http://host", "mqtt://", "mqtt://host:0", "mqtt://h:99999", "mqtt://h:x", "mqtt://h/path"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt://host:"):
        MqttTransport(url, "a")


def test_an_error_never_holds_the_password() -> None:
    with pytest.raises(ConfigError) as caught:
        MqttTransport("mqtt://user:secret@host:port", "a")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mqtt://127.0.0.1:1", "no broker listens at 127.0.0.1:1; start it"),
        ("mqtt://user:secret@no-such-host.invalid", "host name 'no-such-host.invalid' is unknown"),
    ],
)
def test_a_broker_that_is_not_there_is_one_sentence(url: str, words: str) -> None:
    with pytest.raises(TransportError, match=words) as caught:
        MqttTransport(url, "a").open(())
    assert "secret" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (bytes([0x20, 2, 0, 4]), "refuses us .*; check the user name and password"),
        (bytes([0x20, 2, 0, 5]), "refuses us .*; check the user name and password"),
        (b"", "does not answer as an MQTT broker within 0.5 seconds"),
        (bytes([0x20, 2, 0, 0, 0x90, 3, 0, 1, 0x80]), "lets us not subscribe to 'n'"),
    ],
)
def test_a_broker_that_refuses_is_one_sentence(answer: bytes, words: str) -> None:
    transport = MqttTransport(f"mqtt://user:secret@127.0.0.1:{_fake_broker(answer)}", "a", open_timeout_s=0.5)
    with pytest.raises(TransportError, match=words) as caught:
        transport.open(("n",))
    assert "secret" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.broker
def test_a_server_may_start_before_its_broker_and_outlive_it() -> None:
    broker = EmbeddedBroker()
    with broker:
        pass  # only to have an address
    transport = MqttTransport(broker.url, "early", require_at_open=False)
    transport.open(("n",))
    try:
        transport.publish("n", b"to nobody")
        with broker:
            await_event(transport, Connected)
            deliver(transport, transport, "n", b"1")
            broker.kill()
            await_event(transport, Disconnected)
        with broker:
            await_event(transport, Connected)
            deliver(transport, transport, "n", b"2")
    finally:
        transport.close()


@pytest.mark.slow
@pytest.mark.broker
def test_what_a_broker_shows_unasked_is_not_delivered(embedded_url: str) -> None:
    sender, stranger = MqttTransport(embedded_url, "sender"), MqttTransport(embedded_url, "stranger")
    watcher = MqttTransport(embedded_url, "watcher")
    try:
        watcher.open(("private",))
        sender.open(())
        await_event(sender, Connected)
        deliver(sender, watcher, "private", b"state", retain=True)
        stranger.open(())
        await_event(stranger, Connected)
        event = stranger.poll(0.5)
        assert not isinstance(event, Delivery)
    finally:
        for transport in (sender, stranger, watcher):
            transport.close()


def test_a_flood_takes_no_more_memory_than_its_limit() -> None:
    transport = MqttTransport("mqtt://127.0.0.1:1", "flooded", require_at_open=False)
    transport._subscriptions = ("n",)
    message = MQTTMessage(topic=b"n")
    message.payload = bytes(MAX_PAYLOAD_BYTES)
    for _ in range(100):
        transport._on_message(transport._client, None, message)
    waiting = [event for event in iter(lambda: transport.poll(0), None) if isinstance(event, Delivery)]
    assert len(waiting) == 64
    transport._on_message(transport._client, None, message)
    assert isinstance(transport.poll(0), Delivery)
