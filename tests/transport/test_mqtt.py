"""The MQTT transport: addresses, errors of one sentence, brokers that stop and start."""

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from transport.rigs import await_event, deliver

from subfleet.link.broker import EmbeddedBroker
from subfleet.protocol.errors import ConfigError, FileError, TransportError, UnreachableError
from subfleet.transport.address import BrokerAddress, BrokerOptions, TlsFiles, parse_url
from subfleet.transport.base import MAX_PAYLOAD_BYTES, Connected, Delivery, Disconnected, Will
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.waiting import WaitingTransport

CONNECTED, SUBSCRIBED = bytes((0x20, 2, 0, 0)), bytes((0x90, 3, 0, 1, 1))
"""Answers of a broker to a client's first packets."""


def _fake_broker(answer: bytes | None) -> int:
    """A listener that answers every connection with the same bytes, or hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            while True:
                link, _ = listener.accept()
                with link:
                    link.recv(1024)
                    if answer is not None:
                        link.sendall(answer)
                        time.sleep(1.0)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


@pytest.mark.slow
def test_too_many_open_files_are_one_sentence() -> None:
    """paho waits with select(), which ignores file descriptors of 1024 and more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files: list[int] = []
    try:
        while not files or files[-1] < 1024:
            files.append(os.dup(2))
        with pytest.raises(TransportError, match="cannot be used while this process has 1024 files open"):
            MqttTransport(parse_url(f"mqtt://127.0.0.1:{_fake_broker(None)}"), "me").open(())
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_address_is_read() -> None:
    address = parse_url("mqtt://us%20er:p%40ss@host:2000")
    assert (address.host, address.port, address.username, address.password) == ("host", 2000, "us er", "p@ss")
    assert parse_url("mqtt://host").port == 1883
    assert parse_url("mqtts://host") == BrokerAddress(host="host", port=8883, tls=TlsFiles())
    assert parse_url("mqtt://[::1]").url == "mqtt://[::1]:1883"
    assert address.url == "mqtt://us%20er@host:2000"
    assert "p@ss" not in repr(address) + address.url


def test_other_names_of_the_schemes_are_accepted() -> None:
    assert parse_url("tcp://me@host") == parse_url("mqtt://me@host")
    assert parse_url("ssl://host:99") == parse_url("mqtts://host:99")
    assert parse_url("SSL://host") == parse_url("mqtts://host")


@pytest.mark.parametrize("password", ["p@ss", "p/a?s#s", "100%", "%41", "a:b", "[x]", "ä ö", "\t"])
def test_any_password_may_be_percent_encoded(password: str) -> None:
    assert parse_url(f"mqtt://me:{quote(password, safe='')}@host").password == password


@pytest.mark.parametrize("wrong", ["/", "?", "#", "%", "[", "]", " "])
def test_a_bare_special_character_is_named_and_nothing_else_of_the_password(wrong: str) -> None:
    for user, part in ((f"me:sec{wrong}ret", "password"), (f"sec{wrong}ret:x", "user name")):
        with pytest.raises(ConfigError) as caught:
            parse_url(f"mqtt://{user}@host:1883")
        message = str(caught.value)
        assert f"the {part} in the broker's address contains {wrong!r}, which must be percent-encoded" in message
        assert f"write {quote(wrong, safe='')} for it" in message
        assert ("$SUBFLEET_PASSWORD" in message) == (part == "password")
        assert not {"sec", "ret"} & set(message.replace("secret", "sec ret").split())


def _options(url: str, **files: Path) -> BrokerOptions:
    return BrokerOptions(url=url, **files)


def test_a_password_comes_from_a_file_or_the_environment_or_the_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("from file\n", encoding="utf-8")
    environment = {"SUBFLEET_PASSWORD": "from environment"}
    by_password = {
        "from file": _options("mqtt://me@h", password_file=file),
        "from environment": _options("mqtt://me@h"),
        "mine": _options("mqtt://me:mine@h"),
    }
    assert [options.address(environment).password for options in by_password.values()] == list(by_password)
    assert _options("mqtt://me@h").address({}).password is None
    [warning] = caplog.messages
    assert "is visible in this machine's list of processes; use --password-file or $SUBFLEET_PASSWORD" in warning
    assert "mine" not in warning
    assert "mine" not in repr(_options("mqtt://me:mine@h"))


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    file, empty = tmp_path / "password", tmp_path / "empty"
    file.write_text("secret", encoding="utf-8")
    empty.write_text("\n", encoding="utf-8")
    wrong: list[tuple[BrokerOptions, type[Exception], str]] = [
        (_options("mqtt://me:secret@h", password_file=file), ConfigError, "give it once"),
        (_options("mqtt://h", password_file=file), ConfigError, "has no user name; write mqtts://USER@host"),
        (_options("mqtt://me@h", password_file=empty), ConfigError, "must hold one password"),
        (_options("mqtt://me@h", password_file=tmp_path / "no"), FileError, "cannot be read"),
        (_options("mqtt://h", ca=file), ConfigError, "--ca is for TLS, but the broker's address says mqtt://"),
        (_options("mqtts://h", key=file), ConfigError, "--cert names no certificate"),
    ]
    for options, kind, words in wrong:
        with pytest.raises(kind) as caught:
            options.address({})
        assert words in str(caught.value)
        assert "secret" not in str(caught.value)


class UnreachableTransport:
    """A transport that opens after some attempts, or fails in the end."""

    def __init__(self, *answers: TransportError | None) -> None:
        self.answers = list(answers)

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        raise NotImplementedError

    def poll(self, timeout_s: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def test_a_broker_is_waited_for_with_growing_pauses_and_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    slept: list[float] = []
    inner = UnreachableTransport(*(UnreachableError("no broker listens") for _ in range(8)), None)
    WaitingTransport(inner, lambda: False, slept.append).open(())
    assert not inner.answers
    assert sum(slept) == pytest.approx(1 + 2 + 4 + 8 + 16 + 30 + 30 + 30)
    assert caplog.messages == ["no broker listens; waiting for it until Ctrl-C"]


def test_a_broker_that_refuses_is_not_waited_for() -> None:
    inner = UnreachableTransport(
        UnreachableError("no broker listens"), TransportError("the broker refuses the connection"), None
    )
    with pytest.raises(TransportError, match="refuses the connection"):
        WaitingTransport(inner, lambda: False, lambda _: None).open(())


def test_waiting_ends_when_it_is_asked_to() -> None:
    slept: list[float] = []
    inner = UnreachableTransport(UnreachableError("no broker listens"), None)
    WaitingTransport(inner, lambda: len(slept) == 3, slept.append).open(())
    assert len(slept) == 3
    assert inner.answers == [None], "there is no further attempt"


@pytest.mark.parametrize(
    "url", ["", "host:1883", "http://host", "mqtt://", "mqtt://host:0", "mqtt://h:99999", "mqtt://h:x", "mqtt://h/path"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt://host:"):
        parse_url(url)


def test_an_error_never_holds_the_password() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("mqtt://user:secret@host:port")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mqtt://127.0.0.1:1", "no broker listens at 127.0.0.1:1; start it"),
        ("mqtt://user:secret@no-such-host.invalid", "host name 'no-such-host.invalid' is unknown"),
    ],
)
def test_an_unreachable_broker_is_one_sentence(url: str, words: str) -> None:
    with pytest.raises(TransportError, match=words) as caught:
        MqttTransport(parse_url(url), "a").open(())
    assert "secret" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (bytes([0x20, 2, 0, 4]), "refuses the connection .*; check the user name and password"),
        (bytes([0x20, 2, 0, 5]), "refuses the connection .*; check the user name and password"),
        (bytes([0x20, 2, 0, 2]), "rejects the client id 'a'; choose a shorter name"),
        (None, "closes the connection without an MQTT answer; check the address, and whether the broker accepts"),
        (CONNECTED + bytes([0x90, 3, 0, 1, 0x80]), "does not allow a subscription to 'n'"),
    ],
)
def test_a_broker_that_refuses_is_one_sentence(answer: bytes | None, words: str) -> None:
    address = parse_url(f"mqtt://user:secret@127.0.0.1:{_fake_broker(answer)}")
    transport = MqttTransport(address, "a")
    with pytest.raises(TransportError, match=words) as caught:
        transport.open(("n",))
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_one_sentence() -> None:
    address = parse_url(f"mqtt://user:secret@127.0.0.1:{_fake_broker(b'')}")
    with pytest.raises(TransportError, match=r"does not answer as an MQTT broker within 0\.5 seconds"):
        MqttTransport(address, "a", open_timeout_s=0.5).open(("n",))


@pytest.mark.slow
@pytest.mark.broker
def test_a_server_may_start_before_its_broker_and_outlive_it() -> None:
    broker = EmbeddedBroker()
    with broker:
        pass  # only to get an address
    transport = WaitingTransport(MqttTransport(parse_url(broker.url), "early"), lambda: False)
    opening = threading.Thread(target=transport.open, args=(("n",),))
    opening.start()
    try:
        transport.publish("n", b"to nobody")
        with broker:
            await_event(transport, Connected)
            deliver(transport, transport, "n", b"1")
            assert broker.pid is not None
            os.kill(broker.pid, signal.SIGKILL)
            os.waitpid(broker.pid, 0)
            await_event(transport, Disconnected)
        with broker:
            await_event(transport, Connected)
            deliver(transport, transport, "n", b"2")
    finally:
        opening.join()
        transport.close()


@pytest.mark.slow
@pytest.mark.broker
def test_unsolicited_retained_messages_are_not_delivered(embedded_url: str) -> None:
    sender, stranger, watcher = (
        MqttTransport(parse_url(embedded_url), name) for name in ("sender", "stranger", "watcher")
    )
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


@pytest.mark.slow
def test_a_flood_takes_no_more_memory_than_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transport = MqttTransport(parse_url(f"mqtt://127.0.0.1:{listener.getsockname()[1]}"), "flooded")
        links: list[socket.socket] = []

        def accept() -> None:
            link, _ = listener.accept()
            link.recv(1024)
            link.sendall(CONNECTED)
            link.recv(1024)
            link.sendall(SUBSCRIBED)
            links.append(link)

        opening = threading.Thread(target=accept, daemon=True)
        opening.start()
        transport.open(("n",))
        opening.join()
        with links[0] as link, contextlib.closing(transport):
            await_event(transport, Connected)
            _flood(link, 100)
            waiting = [event for event in iter(lambda: transport.poll(0), None) if isinstance(event, Delivery)]
            assert len(waiting) == 64
            _flood(link, 1)
            assert isinstance(transport.poll(0), Delivery)


def _flood(link: socket.socket, count: int) -> None:
    """Send messages of the largest size to a client that acknowledges each."""
    for number in range(1, count + 1):
        body = b"\0\1n" + number.to_bytes(2, "big") + bytes(MAX_PAYLOAD_BYTES)
        size = bytes((0x80 | len(body) & 0x7F, 0x80 | len(body) >> 7 & 0x7F, len(body) >> 14))
        link.sendall(b"\x32" + size + body)
        acknowledged = b""
        while len(acknowledged) < 4:
            acknowledged += link.recv(4 - len(acknowledged))
        assert acknowledged == b"\x40\2" + number.to_bytes(2, "big")
