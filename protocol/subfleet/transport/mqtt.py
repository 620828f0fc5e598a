"""The Transport seam over MQTT 3.1.1. The only file that knows paho-mqtt."""

import logging
import queue
import random
import sys
import threading
from typing import Any

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from subfleet.protocol.errors import TooLargeError, TransportError
from subfleet.transport.address import BrokerAddress
from subfleet.transport.base import MAX_PAYLOAD_BYTES, Connected, Delivery, Disconnected, Event, Will
from subfleet.transport.complaints import Complaints
from subfleet.transport.reaching import shake_hands, unanswered, unreachable
from subfleet.transport.tls import context_of
from subfleet.transport.topic_filter import matches

__all__ = ["MqttTransport"]

_LOG = logging.getLogger(__name__)

_MAX_INFLIGHT = 64  # of 128 KiB chunks: 8 MiB on the way, enough for a slow link with a long round trip
_MAX_QUEUED = 1024  # more than every window of chunks that a server has open at once
_MAX_WAITING_EVENTS = 8192
_MAX_WAITING_BYTES = 64 * MAX_PAYLOAD_BYTES  # a peer that floods us must not take our memory
_LONGEST_RECONNECT_DELAY_S = 30
_CLOSE_TIMEOUT_S = 2.0
_INVALID_CLIENT_ID = 133  # paho's number for return code 2 of MQTT 3.1.1


class MqttTransport:
    """One MQTT client, with paho's own thread behind a queue of events.

    Args:
        address: of the broker.
        client_id: see `mqtt_client_id`. A broker lets one client of an id in; a second one takes the first one's place.
        open_timeout_s: how long `open` waits for the first connection.
        keepalive_s: silence after which broker and client give each other up.

    Raises:
        FileError: a file for TLS cannot be read.
        ConfigError: a file for TLS does not hold what it should.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        *,
        open_timeout_s: float = 10.0,
        keepalive_s: int = 30,
    ) -> None:
        self._address = address
        self._open_timeout_s = open_timeout_s
        self._keepalive_s = keepalive_s
        # Not SimpleQueue: CPython 3.11's waits for ever where a signal handler outlasts the time-out of its get().
        self._events: queue.Queue[Event] = queue.Queue()
        self._waiting_bytes = 0
        self._waiting_lock = threading.Lock()
        self._complaints = Complaints(_LOG)  # used in paho's thread alone
        self._subscriptions: tuple[str, ...] = ()
        self._up = False
        self._settled = threading.Event()  # an attempt has ended, well or not
        self._answered = False
        self._refusal = ""
        self._complaint = ""
        self._closing = threading.Event()
        self._client_id = client_id
        # Seeded with the client's name: the members of a fleet differ, and one client is the same every time.
        self._jitter = random.Random(client_id)  # noqa: S311 (it spreads reconnects, it keeps no secret)
        self._client = self._make_client()

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._subscriptions = subscriptions
        if will is not None:
            self._client.will_set(will.topic, will.payload, qos=1, retain=True)
        self._settled.clear()
        self._answered, self._refusal = False, ""
        try:
            shake_hands(self._address, self._open_timeout_s)  # paho leaves the socket open where that fails
            self._client.connect(self._address.host, self._address.port, keepalive=self._keepalive_s)
        except (OSError, UnicodeError) as error:
            raise unreachable(self._address, error) from error
        self._client.loop_start()
        self._settled.wait(self._open_timeout_s)
        if self._answered:
            return
        refusal = self._refusal
        self.close()
        self._closing.clear()  # another attempt may be made
        if refusal:
            raise TransportError(f"the broker at {self._address.where} {refusal}")
        raise unanswered(self._address, self._open_timeout_s)

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

    def _make_client(self) -> Client:
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            clean_session=True,
            protocol=MQTTProtocolVersion.MQTTv311,
        )
        if self._address.username is not None:
            client.username_pw_set(self._address.username, self._address.password)
        if self._address.tls is not None:
            client.tls_set_context(context_of(self._address.tls))
        client.connect_timeout = self._open_timeout_s
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
        if reason.value == _INVALID_CLIENT_ID:
            self._refuse(f"does not take the client id {self._client_id!r}; choose a shorter name, or another broker")
        elif reason.is_failure:
            self._refuse(f"refuses us ({reason}); check the user name and password")
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
        error = sys.exc_info()[1]
        if isinstance(error, (OSError, UnicodeError)):  # paho calls this while it handles it
            self._complain(str(unreachable(self._address, error)))
        self._closing.wait(self._jitter.random())

    def _on_disconnect(
        self, _: Client, __: Any, ___: DisconnectFlags, reason: ReasonCode, ____: Properties | None
    ) -> None:
        if self._up:
            self._up = False
            self._events.put(Disconnected(reason=str(reason)))
        elif not self._answered:
            # The first connection ended before the broker had said anything: `open` waits for one or the other.
            self._settled.set()
        # paho doubles its delay, but equally for everyone; a fleet must not come back in one moment.
        if self._closing.wait(self._jitter.random()):
            self._settled.set()

    def _on_message(self, _: Client, __: Any, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:  # an exception that left this callback would end paho's thread
            self._complaints.note("the broker", "dropped a message: its topic is not UTF-8")
            return
        if len(message.payload) > MAX_PAYLOAD_BYTES:
            self._complaints.note(_sender(topic), f"dropped {len(message.payload)} bytes on {topic}: too large")
        elif not any(matches(wanted, topic) for wanted in self._subscriptions):
            # Some brokers send retained messages to clients that subscribed to nothing.
            _LOG.debug("dropped a message on %s: not subscribed", topic)
        elif self._events.qsize() >= _MAX_WAITING_EVENTS or self._waiting_bytes >= _MAX_WAITING_BYTES:
            self._complaints.note(_sender(topic), f"dropped a message on {topic}: {self._events.qsize()} events wait")
        else:
            with self._waiting_lock:
                self._waiting_bytes += len(message.payload)
            self._events.put(Delivery(topic=topic, payload=bytes(message.payload), retained=message.retain))

    def _refuse(self, refusal: str) -> None:
        self._refusal = refusal
        if self._answered:
            self._complain(f"the broker at {self._address.where} {refusal}")
        self._settled.set()

    def _complain(self, sentence: str) -> None:
        """Attempts are made again and again; what keeps them from succeeding is said once."""
        if sentence != self._complaint:
            _LOG.warning("%s", sentence)
        self._complaint = sentence

    def _link_is_up(self) -> None:
        self._refusal = self._complaint = ""
        self._up = self._answered = True
        self._events.put(Connected())
        self._settled.set()


def _sender(topic: str) -> str:
    """Whose message it is: a client writes all its kinds below one topic."""
    return topic.rpartition("/")[0][:128]
