"""Checks a broker before a run: tries each feature once, with a time limit.

All messages go to this process itself, below a topic that a device of this name may write and read. Running servers
and devices do not receive them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from subfleet.protocol.blobs import (
    CHUNK_BYTES,
    LEAST_CHUNK_BYTES,
    MESSAGE_BYTES,
    Chunk,
    chunk_bytes_within,
    decode_chunk,
    encode_chunk,
)
from subfleet.protocol.errors import TransportError
from subfleet.protocol.identifiers import make_message_id
from subfleet.protocol.topics import Topics
from subfleet.transport.address import BrokerAddress
from subfleet.transport.base import Connected, Delivery, Disconnected, Transport, Will
from subfleet.transport.broker_terms import BrokerTerms, die_in_sight, query_terms
from subfleet.transport.mqtt import MqttTransport

_ANSWER_S = 1.5  # round trip of one small message
_CHUNKS_S = 5.0  # for all sizes of chunks together
_GAP_S = 1.5  # between two of them
_NO_RETAIN = "joining devices learn of a round up to 2 s later; everything else works"
_SIZES = tuple(CHUNK_BYTES >> halvings for halvings in range(5))


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFinding:
    """The result of one check.

    Attributes:
        check: its name.
        text: the outcome.
        remedy: what to do, or how the fleet works around it; empty if nothing is missing.
        serves: whether a fleet works with this outcome.
    """

    check: str
    text: str
    remedy: str = ""
    serves: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerReport:
    """The results of all checks.

    Attributes:
        findings: the results, in order.
        terms: the terms that sessions should use.
        chunk_bytes: the largest chunk that arrived; None if none did, or if it could not be tested.
    """

    findings: tuple[BrokerFinding, ...]
    terms: BrokerTerms
    chunk_bytes: int | None = None

    @property
    def shortcomings(self) -> tuple[BrokerFinding, ...]:
        """The findings with a remedy."""
        return tuple(finding for finding in self.findings if finding.remedy)


def examine_broker(
    address: BrokerAddress,
    topics: Topics,
    *,
    name: str,
    client_id: str,
    open_timeout_s: float = 10.0,
    opened: Callable[[Transport], Transport] = lambda transport: transport,
) -> BrokerReport:
    """Check everything that a fleet needs of a broker.

    Args:
        address: of the broker.
        topics: of the fleet.
        name: the id of a device with topics that this process may write and read; a server may use any.
        client_id: an unused MQTT client id; two more ids are derived from it.
        open_timeout_s: how long the first connection may take.
        opened: wraps the transport of the first connection, for example to wait for the broker.

    Raises:
        TransportError: the broker is unreachable, refuses the client, or cannot be trusted.
        FileError: a file for TLS cannot be read.
        ConfigError: a file for TLS does not hold what it should.
    """
    sender = MqttTransport(address, client_id, open_timeout_s=open_timeout_s)
    first = opened(sender)
    try:
        first.open(())
        terms = query_terms(address, f"{client_id}.1", timeout_s=_ANSWER_S)
        sender.expect(terms or BrokerTerms())
        trial = _Trial(address=address, topics=topics, name=name, client_id=client_id, stated=terms, sender=sender)
        return trial.report(open_timeout_s)
    finally:
        first.close()


@dataclass(slots=True, kw_only=True)
class _Trial:
    address: BrokerAddress
    topics: Topics
    name: str
    client_id: str
    stated: BrokerTerms | None
    sender: MqttTransport
    mark: str = field(default_factory=lambda: make_message_id()[:8])  # others may try the broker at the same time

    def report(self, open_timeout_s: float) -> BrokerReport:
        terms = self.stated or BrokerTerms()
        version = "3.1.1" if self.stated is None else "3.1.1 and 5"
        reached = BrokerFinding(check="broker", text=f"connected; the broker supports MQTT {version}")
        receiver = MqttTransport(self.address, f"{self.client_id}.2", open_timeout_s=open_timeout_s)
        receiver.expect(terms)
        try:
            receiver.open((self._make_topic("+"),))
        except TransportError as error:
            return BrokerReport(findings=(reached, self._explain_forbidden(str(error))), terms=terms)
        try:
            return self._try(receiver, terms, reached)
        finally:
            receiver.close()

    def _try(self, receiver: MqttTransport, terms: BrokerTerms, reached: BrokerFinding) -> BrokerReport:
        self._await_link()
        begun_s = time.monotonic()
        if not self._echo(receiver):
            why = f"messages on {self._make_topic('word')} are not received"
            return BrokerReport(findings=(reached, self._explain_forbidden(why)), terms=terms)
        took_ms = 1000 * (time.monotonic() - begun_s)
        reached = replace(reached, text=f"{reached.text}; the round trip of a message takes {took_ms:.0f} ms")
        chunk_bytes = self._find_largest_chunk(receiver, terms)
        retains, wills = (
            self._check_retained(receiver, terms) if terms.retains else (False, self._try_will(receiver, terms))
        )
        if not retains and not terms.retains:
            retained = BrokerFinding(
                check="retained messages", text="not supported, as the broker states", remedy=_NO_RETAIN
            )
        elif not retains:
            retained = BrokerFinding(check="retained messages", text="not delivered", remedy=_NO_RETAIN)
        else:
            retained = BrokerFinding(check="retained messages", text="stored, delivered and cleared")
        findings = (reached, _check_chunks(chunk_bytes), retained, _check_will(wills), *_check_terms(terms))
        return BrokerReport(findings=findings, terms=terms, chunk_bytes=chunk_bytes)

    def _make_topic(self, suffix: str) -> str:
        return self.topics.check(self.name, f"{self.mark}/{suffix}")

    def _explain_forbidden(self, why: str) -> BrokerFinding:
        return BrokerFinding(
            check="broker limits",
            text=f"cannot be tested: {why}",
            remedy=(
                f"to test them, allow this user to write and read {self.topics.check(self.name, '#')}; a fleet works "
                "without it"
            ),
        )

    def _await_link(self) -> bool:
        """Wait for the link: the broker may have closed it after the last message."""
        deadline_s = time.monotonic() + 2 * _ANSWER_S
        connected = True
        while True:
            event = self.sender.poll(0.0 if connected else max(0.0, deadline_s - time.monotonic()))
            if event is None:
                return connected
            connected = not isinstance(event, Disconnected) and (connected or isinstance(event, Connected))

    def _echo(self, receiver: MqttTransport) -> bool:
        self.sender.publish(self._make_topic("word"), b"word")
        return self._receive(receiver, "word", _ANSWER_S) is not None

    def _receive(self, receiver: MqttTransport, suffix: str, timeout_s: float) -> Delivery | None:
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            event = receiver.poll(left_s)
            if isinstance(event, Delivery) and event.topic == self._make_topic(suffix) and event.payload:
                return event
        return None

    def _find_largest_chunk(self, receiver: MqttTransport, terms: BrokerTerms) -> int | None:
        """Try the smallest chunk first: if the broker closes the link at a large one, smaller ones have arrived."""
        most = CHUNK_BYTES if terms.message_bytes is None else chunk_bytes_within(terms.message_bytes)
        for size in reversed(_SIZES):
            if size <= most:
                chunk = Chunk(sha256="0" * 64, offset=0, data=bytes(size))
                self.sender.publish(self._make_topic("chunk"), encode_chunk(chunk))
        largest, until_s = None, time.monotonic() + _CHUNKS_S
        while largest != most and (left_s := until_s - time.monotonic()) > 0:
            heard = self._receive(receiver, "chunk", min(left_s, _GAP_S))
            if heard is None:
                break
            largest = len(decode_chunk(heard.payload).data)
        return largest

    def _check_retained(self, receiver: MqttTransport, terms: BrokerTerms) -> tuple[bool, bool]:
        """Whether a later subscriber gets a retained message, and whether a will is published."""
        self._await_link()
        self.sender.publish(self._make_topic("kept"), b"kept", retain=True)
        if self._receive(receiver, "kept", _ANSWER_S) is None:
            return False, self._try_will(receiver, terms)
        shown = self._die(terms)
        self.sender.publish(self._make_topic("kept"), b"", retain=True)
        return shown, self._receive(receiver, "will", 2 * _ANSWER_S) is not None

    def _try_will(self, receiver: MqttTransport, terms: BrokerTerms) -> bool:
        self._die(replace(terms, retains=False))
        return self._receive(receiver, "will", 2 * _ANSWER_S) is not None

    def _die(self, terms: BrokerTerms) -> bool:
        return die_in_sight(
            self.address,
            f"{self.client_id}.3",
            will=Will(topic=self._make_topic("will"), payload=b"gone"),
            topic=self._make_topic("kept"),
            terms=terms,
            timeout_s=_ANSWER_S,
        )


def _check_chunks(chunk_bytes: int | None) -> BrokerFinding:
    if chunk_bytes == CHUNK_BYTES:
        return BrokerFinding(check="chunks", text=f"all sizes up to {CHUNK_BYTES} bytes are delivered")
    if chunk_bytes is None:
        return BrokerFinding(
            check="chunks",
            text=f"not even the smallest, of {LEAST_CHUNK_BYTES} bytes, are delivered",
            remedy=f"raise the broker's message limit to at least {MESSAGE_BYTES} bytes",
            serves=False,
        )
    return BrokerFinding(
        check="chunks",
        text=f"only sizes up to {chunk_bytes} bytes are delivered",
        remedy=(
            "models are sent more slowly, and a task or profile above the broker's message limit cannot be sent; raise "
            f"it to at least {MESSAGE_BYTES} bytes"
        ),
    )


def _check_will(published: bool) -> BrokerFinding:
    if published:
        return BrokerFinding(check="will", text="published when a link breaks")
    return BrokerFinding(
        check="will",
        text="not published when a link breaks",
        remedy="a device that disappears is noticed only by its missing heartbeats; allow wills if you can",
    )


def _check_terms(terms: BrokerTerms) -> tuple[BrokerFinding, ...]:
    if terms.qos > 0:
        return ()
    return (
        BrokerFinding(
            check="quality of service",
            text="the broker supports only 0",
            remedy="lost messages are sent again after seconds; allow 1 if you can",
        ),
    )
