"""Queries a broker's limits with MQTT 5, where CONNACK lists them; with MQTT 3.1.1 a broker only closes the link.

Sessions use 3.1.1, which every broker supports. Only this module and `mqtt.py` import paho-mqtt.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from subfleet.protocol.blobs import MESSAGE_BYTES
from subfleet.transport.address import BrokerAddress
from subfleet.transport.base import Will
from subfleet.transport.tls import make_tls_context

_SLICE_S = 0.1
_SETTLED_S = 0.2  # some brokers lose the will of a client that vanishes before its last message is acknowledged
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds: a close resets the connection, as a crash would


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTerms:
    """The features and limits of a broker; the defaults apply until they are known.

    Attributes:
        retains: whether it supports retained messages; a broker without them hangs up on a client that sends one.
        qos: the highest quality of service, 0 or 1; more than 1 is never used.
        keepalive_s: the longest keepalive that it allows; None means no limit.
        message_bytes: the largest message including MQTT's headers; None means unknown.
    """

    retains: bool = True
    qos: int = 1
    keepalive_s: int | None = None
    message_bytes: int | None = None


def describe_shortcomings(terms: BrokerTerms) -> Iterator[str]:
    """Describe the consequences of narrow terms, one sentence each, to follow "the broker"."""
    if not terms.retains:
        yield "does not support retained messages; the fleet works, but joining devices learn of a round 2 s later"
    if terms.qos == 0:
        yield "supports only quality of service 0; lost messages are sent again after seconds, so allow 1 if you can"
    if terms.message_bytes is not None and terms.message_bytes < MESSAGE_BYTES:
        yield f"accepts at most {terms.message_bytes} bytes per message; chunks are smaller, so allow {MESSAGE_BYTES}"


def make_client(
    address: BrokerAddress, client_id: str, *, connect_timeout_s: float, version: MQTTProtocolVersion
) -> Client:
    """Make a paho client with the credentials of an address; it is not connected yet.

    Raises:
        FileError: a TLS file cannot be read.
        ConfigError: a TLS file has the wrong content.
    """
    # With MQTT 5, paho's first connection starts a clean session; no client here connects twice.
    clean = None if version is MQTTProtocolVersion.MQTTv5 else True
    client = Client(CallbackAPIVersion.VERSION2, client_id=client_id, clean_session=clean, protocol=version)
    if address.username is not None:
        client.username_pw_set(address.username, address.password)
    if address.tls is not None:
        client.tls_set_context(make_tls_context(address.tls))
    client.connect_timeout = connect_timeout_s
    return client


def query_terms(address: BrokerAddress, client_id: str, *, timeout_s: float = 2.0) -> BrokerTerms | None:
    """Connect once in MQTT 5 and leave; None if the broker does not support it, refuses the client or is unreachable.

    Raises:
        FileError: a TLS file cannot be read.
        ConfigError: a TLS file has the wrong content.
    """
    client = make_client(address, client_id, connect_timeout_s=timeout_s, version=MQTTProtocolVersion.MQTTv5)
    answers: list[BrokerTerms] = []
    over = False

    def on_connect(_: Client, __: Any, ___: ConnectFlags, reason: ReasonCode, properties: Properties | None) -> None:
        nonlocal over
        over = True
        if not reason.is_failure and properties is not None:
            answers.append(_read_terms(properties))

    client.on_connect = on_connect
    try:
        client.connect(address.host, address.port)
        _serve(client, lambda: over, timeout_s)
        link = client.socket()
        client.disconnect()
        if link is not None:
            link.close()
    except (OSError, ValueError):
        return None
    return answers[0] if answers else None


def _read_terms(properties: Properties) -> BrokerTerms:
    return BrokerTerms(
        retains=bool(getattr(properties, "RetainAvailable", 1)),
        qos=min(int(getattr(properties, "MaximumQoS", 2)), 1),
        keepalive_s=getattr(properties, "ServerKeepAlive", None),
        message_bytes=getattr(properties, "MaximumPacketSize", None),
    )


def die_in_sight(
    address: BrokerAddress, client_id: str, *, will: Will, topic: str, terms: BrokerTerms, timeout_s: float
) -> bool:
    """Connect with a will, look for a retained message on `topic`, and let the link break, as a crash would.

    Returns:
        Whether the broker delivered a retained message there.

    Raises:
        FileError: a TLS file cannot be read.
        ConfigError: a TLS file has the wrong content.
    """
    client = make_client(address, client_id, connect_timeout_s=timeout_s, version=MQTTProtocolVersion.MQTTv311)
    client.will_set(will.topic, will.payload, qos=terms.qos, retain=False)
    shown: list[bool] = []
    subscribed = False

    def on_connect(_: Client, __: Any, ___: ConnectFlags, reason: ReasonCode, ____: Properties | None) -> None:
        if not reason.is_failure:
            client.subscribe(topic, terms.qos)

    def on_subscribe(*_: object) -> None:
        nonlocal subscribed
        subscribed = True

    def on_message(_: Client, __: Any, message: MQTTMessage) -> None:
        if message.payload:
            shown.append(message.retain)

    client.on_connect, client.on_subscribe, client.on_message = on_connect, on_subscribe, on_message
    try:
        client.connect(address.host, address.port, keepalive=terms.keepalive_s or 30)
        _serve(client, lambda: subscribed if not terms.retains else any(shown), timeout_s)
        _serve(client, lambda: False, _SETTLED_S)
        if isinstance(link := client.socket(), socket.socket):
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            link.close()
    except (OSError, ValueError):
        return False
    return any(shown)


def _serve(client: Client, done: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline_s:
        if client.loop(timeout=_SLICE_S) != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return
