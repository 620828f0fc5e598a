from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import context_of, profile, telemetry

from subfleet.link.device_link import connect_devices, read_delivery
from subfleet.link.traffic import Traffic
from subfleet.protocol.blobs import Chunk, encode_chunk
from subfleet.protocol.messages import Ack, Presence, Telemetry, encode
from subfleet.protocol.topics import Topics
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.progress import Measuring
from subfleet.rounds.state import RunState
from subfleet.transport.base import Delivery
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.in_memory import MemoryBroker

TOPICS = Topics("main")
PLAN = context_of()


def _deliver(kind: str, payload: bytes, client_id: str = "ada") -> Delivery:
    return Delivery(topic=TOPICS.uplink(client_id, kind), payload=payload)


def _no_complaint(sender: str, text: str) -> None:
    raise AssertionError(f"{sender}: {text}")


def test_messages_become_events() -> None:
    presence = Presence(client_id="ada", session_id="s", online=True)
    assert read_delivery(TOPICS, _deliver("presence", encode(presence)), _no_complaint) == ("ada", presence)
    known = profile("ada")
    assert read_delivery(TOPICS, _deliver("profile", encode(known)), _no_complaint) == ("ada", known)
    read = read_delivery(TOPICS, _deliver("telemetry", encode(telemetry(PLAN, "ada"))), _no_complaint)
    assert read is not None
    assert isinstance(read[1], Telemetry)
    ack = Ack(of="x", status="accepted")
    assert read_delivery(TOPICS, _deliver("ack", encode(ack)), _no_complaint) == ("ada", ack)
    chunk = read_delivery(
        TOPICS, _deliver("chunk", encode_chunk(Chunk(sha256="0" * 64, offset=0, data=b"x"))), _no_complaint
    )
    assert chunk is not None


@pytest.mark.parametrize(
    "delivery",
    [
        _deliver("presence", encode(Presence(client_id="bob", session_id="s", online=True))),
        _deliver("profile", encode(Presence(client_id="ada", session_id="s", online=True))),
        _deliver("task", b"{}"),
        Delivery(topic=TOPICS.downlink("ada", "task"), payload=b"{}"),
        Delivery(topic="another/topic", payload=b"{}"),
        _deliver("chunk", b"short"),
    ],
)
def test_an_invalid_message_is_dropped_with_a_complaint_that_names_its_sender(delivery: Delivery) -> None:
    complaints: list[tuple[str, str]] = []
    assert read_delivery(TOPICS, delivery, lambda *complaint: complaints.append(complaint)) is None
    ((sender, text),) = complaints
    assert sender == ("ada" if "/ada/" in delivery.topic else "a sender without an id")
    assert text.startswith(f"dropped a message on {delivery.topic}: ")


def test_a_cleared_topic_is_ignored() -> None:
    assert read_delivery(TOPICS, _deliver("presence", b""), _no_complaint) is None


def test_retained_messages_are_ignored() -> None:
    presence = Presence(client_id="ada", session_id="s", online=True)
    for kind, payload in (("presence", encode(presence)), ("profile", encode(profile("ada"))), ("presence", b"?")):
        retained = replace(_deliver(kind, payload), retained=True)
        assert read_delivery(TOPICS, retained, _no_complaint) is None


@given(
    st.sampled_from(["presence", "profile", "telemetry", "update", "refusal", "deployed", "chunk", "x"]), st.binary()
)
def test_no_bytes_raise(kind: str, payload: bytes) -> None:
    read_delivery(TOPICS, _deliver(kind, payload), lambda _sender, _text: None)


def test_the_link_counts_the_payloads_of_each_client(tmp_path: Path) -> None:
    broker = MemoryBroker()
    link, ada = connect_devices("main", broker.client("server"))(BlobStore(tmp_path)), broker.client("ada")
    link.open()
    ada.open(())
    payload = encode(Presence(client_id="ada", session_id="s", online=True))
    ada.publish(TOPICS.uplink("ada", "presence"), payload)
    ada.publish("another/topic", payload)
    assert len(list(link.receive(0.0))) == 1
    ack = Ack(of="x", status="accepted")
    link.reply("ada", ack)
    link.send(build_round_info(PLAN, RunState().enter(Measuring(), 0.0), 0.0))
    assert link.traffic.of("ada") == (len(encode(ack)), len(payload))


def test_traffic_is_counted_by_client_and_direction() -> None:
    traffic = Traffic()
    traffic.count("ada", "sent", 5)
    traffic.count("ada", "received", 7)
    assert traffic.of("ada") == (5, 7)
    assert traffic.of("bob") == (0, 0)
    traffic.restart({"bob": (1, 2)})
    assert (traffic.of("ada"), traffic.of("bob")) == ((0, 0), (1, 2))
