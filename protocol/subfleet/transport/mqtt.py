"""The Transport seam over MQTT 3.1.1. Only this module and `broker_terms.py` import paho-mqtt."""

import logging
import queue
import random
import sys
import threading
import time
from typing import Any

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from subfleet.protocol.errors import TooLargeError, TransportError
from subfleet.transport.address import BrokerAddress
from subfleet.transport.base import MAX_PAYLOAD_BYTES, Connected, Delivery, Disconnected, Event, Will
from subfleet.transport.broker_terms import BrokerTerms, describe_shortcomings, make_client, query_terms
from subfleet.transport.complaints import Complaints
from subfleet.transport.reaching import explain_silence, explain_unreachable, shake_hands
from subfleet.transport.topic_filter import matches

_LOG = logging.getLogger(__name__)

_MAX_INFLIGHT = 64  # 4 MB of 60 KiB chunks in flight, enough for slow links; hosted brokers allow 100
_MAX_QUEUED = 1024  # more than all windows of chunks that a server has open at once
_MAX_WAITING_EVENTS = 8192
_MAX_WAITING_BYTES = 64 * MAX_PAYLOAD_BYTES  # a flooding peer must not fill the memory
_LONGEST_RECONNECT_DELAY_S = 30
_CLOSE_TIMEOUT_S = 2.0
_INVALID_CLIENT_ID = 133  # paho's number for return code 2 of MQTT 3.1.1
_FIELDS_BYTES = 9  # a message's type, length, topic length and packet id
_SHORT_S = 5.0  # a shorter link was probably closed because of a message
_CUTS = 2  # after this many short links in a row, the broker's terms are queried
_SELECT_LIMIT = 1024  # paho uses select(), which silently fails for larger file descriptors


class MqttTransport:
    """One MQTT client; paho's thread puts events into a queue.

    If a broker closes the connection at the start, or repeatedly, its limits are queried, and unsupported features are
    no longer used: retained messages, quality of service 1, messages above its limit.

    Args:
        address: the broker's address.
        client_id: see `mqtt_client_id`. A broker accepts one client per id; a second one replaces the first.
        open_timeout_s: how long `open` waits for the first connection.
        keepalive_s: seconds of silence after which broker and client consider the link broken.

    Raises:
        FileError: a TLS file cannot be read.
        ConfigError: a TLS file has the wrong content.
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
        # Not SimpleQueue: CPython 3.11's get() never returns if a signal handler outlasts its timeout.
        self._events: queue.Queue[Event] = queue.Queue()
        self._waiting_bytes = 0
        self._waiting_lock = threading.Lock()
        self._complaints = Complaints(_LOG)  # used only in paho's thread
        self._too_large = Complaints(_LOG)  # used only by `publish`
        self._subscriptions: tuple[str, ...] = ()
        self._up = False
        self._settled = threading.Event()  # an attempt succeeded or failed
        self._answered = False
        self._hung_up = False  # the broker closed the connection without a reason
        self._refusal = ""
        self._qos = 1
        self._complaint = ""
        self._closing = threading.Event()
        self._client_id = client_id
        # Seeded with the client's name: the members of a fleet differ, and each client is reproducible.
        self._jitter = random.Random(client_id)  # noqa: S311 (it spreads reconnects, it keeps no secret)
        self._will: Will | None = None
        self._terms = BrokerTerms()
        self._asked = False
        self._up_since_s = 0.0
        self._cuts = 0
        self._client = self._make_client()

    def expect(self, terms: BrokerTerms) -> None:
        """Use already known terms of the broker. Call it before `open`, which sends the will."""
        self._terms, self._asked = terms, True
        self._qos = min(self._qos, terms.qos)

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._subscriptions, self._will = subscriptions, will
        if self._attempt() or (self._hung_up and self._learn() and self._attempt()):
            return
        if self._refusal:
            raise TransportError(f"the broker at {self._address.host_and_port} {self._refusal}")
        raise explain_silence(self._address, self._open_timeout_s, hung_up=self._hung_up)

    def _attempt(self) -> bool:
        self._client = self._make_client()
        self._set_will(self._client)
        self._settled.clear()
        self._answered, self._hung_up, self._refusal = False, False, ""
        try:
            shake_hands(self._address, self._open_timeout_s)  # paho would leave the socket open if this fails
            keepalive_s = min(self._keepalive_s, self._terms.keepalive_s or self._keepalive_s)
            self._client.connect(self._address.host, self._address.port, keepalive=keepalive_s)
        except (OSError, UnicodeError) as error:
            raise explain_unreachable(self._address, error) from error
        self._client.loop_start()
        self._settled.wait(self._open_timeout_s)
        if self._answered:
            return True
        hung_up = self._hung_up
        self.close()
        self._closing.clear()  # allow another attempt
        self._hung_up = hung_up  # `close` itself sets it
        return False

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`. Without a link the message is dropped: the caller repeats it after `Connected`."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLargeError(f"a payload is {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES} bytes")
        if not self._up:
            _LOG.debug("dropped a message on %s: there is no link", topic)
            return
        size_bytes, terms = len(payload) + len(topic.encode()) + _FIELDS_BYTES, self._terms
        if terms.message_bytes is not None and size_bytes > terms.message_bytes:
            self._too_large.note(
                topic,
                f"dropped a message of {size_bytes} bytes: the broker at {self._address.host_and_port} accepts at "
                f"most {terms.message_bytes} bytes; raise its limit to at least 64 KiB",
            )
            return
        if (
            self._client.publish(topic, payload, qos=self._qos, retain=retain and terms.retains).rc
            == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE
        ):
            _LOG.warning("dropped a message on %s: the %d messages that may be queued are waiting", topic, _MAX_QUEUED)

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
            # paho's thread is a daemon; joining it would wait for a broker that does not answer.
            _LOG.warning("the broker at %s did not answer our disconnect", self._address.host)
            return
        self._client.loop_stop()

    def _make_client(self) -> Client:
        client = make_client(
            self._address,
            self._client_id,
            connect_timeout_s=self._open_timeout_s,
            version=MQTTProtocolVersion.MQTTv311,
        )
        client.max_inflight_messages_set(_MAX_INFLIGHT)
        client.max_queued_messages_set(_MAX_QUEUED)
        client.reconnect_delay_set(min_delay=1, max_delay=_LONGEST_RECONNECT_DELAY_S)
        client.on_socket_open = self._on_socket_open
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        return client

    def _set_will(self, client: Client) -> None:
        self._qos = self._terms.qos
        if self._will is not None:
            client.will_set(self._will.topic, self._will.payload, qos=self._qos, retain=self._terms.retains)

    def _learn(self) -> bool:
        """Query the broker's terms; False if they are unknown or unchanged. There must be no link."""
        self._asked = True
        terms = query_terms(self._address, self._client_id)
        if terms is None or terms == self._terms:
            return False
        self._terms = terms
        for sentence in describe_shortcomings(terms):
            self._complain(f"the broker at {self._address.host_and_port} {sentence}")
        return True

    # The methods below run in paho's thread.

    def _on_socket_open(self, _: Client, __: Any, link: Any) -> None:
        if link.fileno() >= _SELECT_LIMIT:
            self._refuse(f"cannot be used while this process has {_SELECT_LIMIT} files open; close some of them")

    def _on_connect(self, client: Client, _: Any, __: ConnectFlags, reason: ReasonCode, ___: Properties | None) -> None:
        if reason.value == _INVALID_CLIENT_ID:
            self._hung_up = True  # some brokers answer this to a too long keepalive
            self._refuse(f"rejects the client id {self._client_id!r}; choose a shorter name, or another broker")
        elif reason.is_failure:
            self._refuse(f"refuses the connection ({reason}); check the user name and password")
        elif self._subscriptions:
            client.subscribe([(topic, self._qos) for topic in self._subscriptions])
        else:
            self._handle_link_up()

    def _on_subscribe(self, _: Client, __: Any, ___: int, reasons: list[ReasonCode], ____: Properties | None) -> None:
        refused = [topic for topic, reason in zip(self._subscriptions, reasons, strict=False) if reason.is_failure]
        if refused:
            self._refuse(f"does not allow a subscription to {refused[0]!r}; correct its access list")
        else:
            # A broker may close the link at a message with a higher quality of service than it granted.
            self._qos = min([self._qos, *(reason.value for reason in reasons)])
            self._handle_link_up()

    def _on_connect_fail(self, _: Client, __: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, (OSError, UnicodeError)):  # paho calls this while it handles the error
            self._complain(str(explain_unreachable(self._address, error)))
        self._closing.wait(self._jitter.random())

    def _on_disconnect(
        self, _: Client, __: Any, ___: DisconnectFlags, reason: ReasonCode, ____: Properties | None
    ) -> None:
        if self._up:
            self._up = False
            self._events.put(Disconnected(reason=str(reason)))
            self._look_into_cuts()
        elif not self._answered:
            # The first connection ended before the broker answered: wake `open`, which waits for either.
            self._hung_up = self._hung_up or not self._refusal
            self._settled.set()
        # paho's growing delay is the same for all clients; a fleet must not reconnect at the same moment.
        if self._closing.wait(self._jitter.random()):
            self._settled.set()

    def _look_into_cuts(self) -> None:
        if time.monotonic() - self._up_since_s >= _SHORT_S:
            self._cuts = 0
            return
        self._cuts += 1
        _forget_sent(self._client)
        if self._cuts < _CUTS or self._asked or self._closing.is_set():
            return
        if self._learn():
            self._set_will(self._client)
        else:
            self._complain(
                f"the broker at {self._address.host_and_port} keeps closing the connection soon after accepting it; "
                "run `subfleet-edge doctor` with its address to find out why"
            )

    def _on_message(self, _: Client, __: Any, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:  # an exception in this callback would end paho's thread
            self._complaints.note("the broker", "dropped a message: its topic is not UTF-8")
            return
        if len(message.payload) > MAX_PAYLOAD_BYTES:
            self._complaints.note(_find_sender(topic), f"dropped {len(message.payload)} bytes on {topic}: too large")
        elif not any(matches(subscription, topic) for subscription in self._subscriptions):
            # Some brokers send retained messages to clients that subscribed to nothing.
            _LOG.debug("dropped a message on %s: not subscribed", topic)
        elif self._events.qsize() >= _MAX_WAITING_EVENTS or self._waiting_bytes >= _MAX_WAITING_BYTES:
            self._complaints.note(
                _find_sender(topic), f"dropped a message on {topic}: {self._events.qsize()} events are waiting"
            )
        else:
            with self._waiting_lock:
                self._waiting_bytes += len(message.payload)
            self._events.put(Delivery(topic=topic, payload=bytes(message.payload), retained=message.retain))

    def _refuse(self, refusal: str) -> None:
        self._refusal = refusal
        if self._answered:
            self._complain(f"the broker at {self._address.host_and_port} {refusal}")
        self._settled.set()

    def _complain(self, sentence: str) -> None:
        """Log why connecting fails, but not the same reason twice in a row."""
        if sentence != self._complaint:
            _LOG.warning("%s", sentence)
        self._complaint = sentence

    def _handle_link_up(self) -> None:
        self._refusal = self._complaint = ""
        self._up = self._answered = True
        self._up_since_s = time.monotonic()
        self._events.put(Connected(message_bytes=self._terms.message_bytes))
        self._settled.set()


def _forget_sent(client: Client) -> None:
    """Drop paho's unacknowledged messages: it would resend the one that breaks the link. The caller sends again."""
    with client._out_message_mutex:  # noqa: SLF001 (the only other way is a new client)
        client._out_messages.clear()  # noqa: SLF001
        client._inflight_messages = 0  # noqa: SLF001


def _find_sender(topic: str) -> str:
    """Find the sender of a message: a client publishes all kinds of messages below one topic."""
    return topic.rpartition("/")[0][:128]
