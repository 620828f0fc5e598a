"""The Transport seam over MQTT 3.1.1. The only file that knows paho-mqtt."""

import logging
import queue
import random
import socket
import threading
from typing import Any

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from subfleet.protocol.errors import TooLargeError, TransportError
from subfleet.transport.address import BrokerAddress, parse_url
from subfleet.transport.base import MAX_PAYLOAD_BYTES, Connected, Delivery, Disconnected, Event, Will
from subfleet.transport.topic_filter import matches

__all__ = ["MqttTransport"]

_LOG = logging.getLogger(__name__)

_MAX_INFLIGHT = 64  # of 128 KiB chunks: 8 MiB on the way, enough for a slow link with a long round trip
_MAX_QUEUED = 1024  # more than every window of chunks that a server has open at once
_MAX_WAITING_EVENTS = 8192
_MAX_WAITING_BYTES = 64 * MAX_PAYLOAD_BYTES  # a peer that floods us must not take our memory
_LONGEST_RECONNECT_DELAY_S = 30
_CLOSE_TIMEOUT_S = 2.0


class MqttTransport:
    """One MQTT client, with paho's own thread behind a queue of events.

    Args:
        url: `mqtt://[user:password@]host[:port]`.
        client_id: used where the address names no user; a user name is always the client id too, so that a broker's
            access list can bind topics to it.
        require_at_open: False lets `open` return while the broker is still away; `Connected` comes when it is there.
        open_timeout_s: how long `open` waits for the first connection.
        keepalive_s: silence after which broker and client give each other up.

    Raises:
        ConfigError: the address cannot be read.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        *,
        require_at_open: bool = True,
        open_timeout_s: float = 10.0,
        keepalive_s: int = 30,
    ) -> None:
        self._address = parse_url(url)
        self._require_at_open = require_at_open
        self._open_timeout_s = open_timeout_s
        self._keepalive_s = keepalive_s
        # Not SimpleQueue: CPython 3.11's waits for ever where a signal handler outlasts the time-out of its get().
        self._events: queue.Queue[Event] = queue.Queue()
        self._waiting_bytes = 0
        self._waiting_lock = threading.Lock()
        self._subscriptions: tuple[str, ...] = ()
        self._up = False
        self._settled = threading.Event()  # the first attempt has ended, well or not
        self._refusal = ""
        self._closing = threading.Event()
        name = self._address.username or client_id
        # Seeded with the client's name: the members of a fleet differ, and one client is the same every time.
        self._jitter = random.Random(name)  # noqa: S311 (it spreads reconnects, it keeps no secret)
        self._client = self._make_client(name)

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._subscriptions = subscriptions
        if will is not None:
            self._client.will_set(will.topic, will.payload, qos=1, retain=True)
        host, port = self._address.host, self._address.port
        if not self._require_at_open:
            self._client.connect_async(host, port, keepalive=self._keepalive_s)
            self._client.loop_start()
            return
        self._client.connect_timeout = self._open_timeout_s
        try:
            self._client.connect(host, port, keepalive=self._keepalive_s)
        except OSError as error:
            raise TransportError(_unreachable(self._address, error)) from error
        self._client.loop_start()
        settled = self._settled.wait(self._open_timeout_s)
        if not settled or self._refusal:
            self.close()
            silence = f"does not answer as an MQTT broker within {self._open_timeout_s:g} seconds; check the address"
            raise TransportError(f"the broker at {host}:{port} {self._refusal or silence}")

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`. Without a link the message is dropped: after `Connected` the caller sends anew."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLargeError(f"a payload is {len(payload)} bytes, but may be {MAX_PAYLOAD_BYTES} bytes at most")
        if not self._up:
            _LOG.debug("dropped a message on %s: there is no link", topic)
            return
        if self._client.publish(topic, payload, qos=1, retain=retain).rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
            _LOG.warning("dropped a message on %s: %d messages wait for the link", topic, _MAX_QUEUED)

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`."""
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, Delivery):
            with self._waiting_lock:
                self._waiting_bytes -= len(event.payload)
        return event

    def close(self) -> None:
        """See `Transport.close`."""
        if self._closing.is_set():
            return
        connected = self._client.is_connected()
        self._settled.clear()
        self._closing.set()
        self._client.disconnect()
        if connected and not self._settled.wait(_CLOSE_TIMEOUT_S):
            # paho's thread is a daemon; to wait for it would be to wait for a broker that does not answer.
            _LOG.warning("the broker at %s did not take our goodbye", self._address.host)
            return
        self._client.loop_stop()

    def _make_client(self, name: str) -> Client:
        client = Client(
            CallbackAPIVersion.VERSION2, client_id=name, clean_session=True, protocol=MQTTProtocolVersion.MQTTv311
        )
        if self._address.username is not None:
            client.username_pw_set(self._address.username, self._address.password)
        client.max_inflight_messages_set(_MAX_INFLIGHT)
        client.max_queued_messages_set(_MAX_QUEUED)
        client.reconnect_delay_set(min_delay=1, max_delay=_LONGEST_RECONNECT_DELAY_S)
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        return client

    # What follows runs in paho's thread.

    def _on_connect(self, client: Client, _: Any, __: ConnectFlags, reason: ReasonCode, ___: Properties | None) -> None:
        if reason.is_failure:
            self._refuse(f"refuses us ({reason}); check the user name and password in its address")
        elif self._subscriptions:
            client.subscribe([(topic, 1) for topic in self._subscriptions])
        else:
            self._link_is_up()

    def _on_subscribe(self, _: Client, __: Any, ___: int, reasons: list[ReasonCode], ____: Properties | None) -> None:
        refused = [topic for topic, reason in zip(self._subscriptions, reasons, strict=False) if reason.is_failure]
        if refused:
            self._refuse(f"lets us not subscribe to {refused[0]!r}; correct its access list")
        else:
            self._link_is_up()

    def _on_connect_fail(self, _: Client, __: Any) -> None:
        _LOG.warning("the broker at %s:%d cannot be reached", self._address.host, self._address.port)
        self._closing.wait(self._jitter.random())

    def _on_disconnect(
        self, _: Client, __: Any, ___: DisconnectFlags, reason: ReasonCode, ____: Properties | None
    ) -> None:
        if self._up:
            self._up = False
            self._events.put(Disconnected(reason=str(reason)))
        # paho doubles its delay, but equally for everyone; a fleet must not come back in one moment.
        if self._closing.wait(self._jitter.random()):
            self._settled.set()

    def _on_message(self, _: Client, __: Any, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:  # an exception that left this callback would end paho's thread
            _LOG.warning("dropped a message: its topic is not UTF-8")
            return
        if len(message.payload) > MAX_PAYLOAD_BYTES:
            _LOG.warning("dropped %d bytes on %s: too large", len(message.payload), topic)
        elif not any(matches(wanted, topic) for wanted in self._subscriptions):
            # Some brokers send retained messages to clients that subscribed to nothing.
            _LOG.debug("dropped a message on %s: not subscribed", topic)
        elif self._events.qsize() >= _MAX_WAITING_EVENTS or self._waiting_bytes >= _MAX_WAITING_BYTES:
            _LOG.warning("dropped a message on %s: %d events wait", topic, self._events.qsize())
        else:
            with self._waiting_lock:
                self._waiting_bytes += len(message.payload)
            self._events.put(Delivery(topic=topic, payload=bytes(message.payload), retained=message.retain))

    def _refuse(self, refusal: str) -> None:
        _LOG.warning("the broker at %s:%d %s", self._address.host, self._address.port, refusal)
        self._refusal = refusal
        self._settled.set()

    def _link_is_up(self) -> None:
        self._refusal = ""
        self._up = True
        self._events.put(Connected())
        self._settled.set()


def _unreachable(address: BrokerAddress, error: OSError) -> str:
    where = f"{address.host}:{address.port}"
    if isinstance(error, socket.gaierror):
        return f"the host name {address.host!r} is unknown; check the broker's address"
    if isinstance(error, ConnectionRefusedError):
        return f"no broker listens at {where}; start it, or check the address"
    if isinstance(error, TimeoutError):
        return f"the broker at {where} does not answer; check the address and the network"
    return f"the broker at {where} cannot be reached ({error.strerror or error}); check the network"
