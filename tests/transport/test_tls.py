"""TLS with a real broker: connections that work, and one sentence for each error."""

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from transport.mosquitto import Certificates, free_port, make_certificates, mosquitto, tls_listener
from transport.rigs import await_event, deliver

from subfleet.protocol.errors import ConfigError, FileError, TransportError, UnreachableError
from subfleet.transport.address import BrokerAddress, TlsFiles
from subfleet.transport.base import Connected
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.tls import make_tls_context


@dataclass(frozen=True, kw_only=True)
class Brokers:
    certificates: Certificates
    ports: dict[str, int]

    def address(self, listener: str, *, host: str = "localhost", **files: Path | None) -> BrokerAddress:
        return BrokerAddress(host=host, port=self.ports[listener], tls=TlsFiles(**files))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def brokers(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    ports = {name: free_port() for name in ("plain", "tls", "expired", "elsewhere", "asking")}
    anonymous = "allow_anonymous true"
    requiring = (f"cafile {certificates.ca}", "require_certificate true", anonymous)
    settings = (
        *(f"listener {ports['plain']} 127.0.0.1", anonymous),
        *tls_listener(ports["tls"], certificates.broker, anonymous),
        *tls_listener(ports["expired"], certificates.expired, anonymous),
        *tls_listener(ports["elsewhere"], certificates.elsewhere, anonymous),
        *tls_listener(ports["asking"], certificates.broker, *requiring),
    )
    with (
        mosquitto(tmp_path_factory.mktemp("broker"), settings, ports["asking"]),
        _open_tls12_listener(certificates) as port,
    ):
        yield Brokers(certificates=certificates, ports={**ports, "asking12": port})


@contextmanager
def _open_tls12_listener(certificates: Certificates) -> Iterator[int]:
    """A listener of TLS 1.2 that requires a certificate, which it reports in the handshake, unlike later versions."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(*certificates.broker)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            with contextlib.suppress(ssl.SSLError):
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                with link:
                    context.wrap_socket(link, server_side=True).close()

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("listener", ["tls", "asking"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_messages_pass_over_tls(brokers: Brokers, listener: str, host: str) -> None:
    certificate, key = brokers.certificates.device
    address = brokers.address(listener, host=host, ca=brokers.certificates.ca, certificate=certificate, key=key)
    sender, receiver = MqttTransport(address, "sender"), MqttTransport(address, "receiver")
    try:
        receiver.open(("n",))
        sender.open(())
        await_event(sender, Connected)
        assert deliver(sender, receiver, "n", b"1").payload == b"1"
    finally:
        sender.close()
        receiver.close()


def _list_cases(brokers: Brokers) -> dict[str, tuple[BrokerAddress, str]]:
    certificates, ports = brokers.certificates, brokers.ports
    tls, asking, asking12, plain = (f"localhost:{ports[name]}" for name in ("tls", "asking", "asking12", "plain"))
    certificate, key = certificates.stranger
    stranger = TlsFiles(ca=certificates.ca, certificate=certificate, key=key)
    return {
        "unknown authority": (
            brokers.address("tls"),
            f"the certificate of the broker at {tls} is signed by an authority that is unknown here; name that auth",
        ),
        "expired": (brokers.address("expired", ca=certificates.ca), "has expired; renew it, or correct the clock"),
        "wrong name": (
            brokers.address("elsewhere", ca=certificates.ca),
            "is not issued for the host name 'localhost'; use a name that it lists",
        ),
        "wrong address": (
            brokers.address("elsewhere", host="127.0.0.1", ca=certificates.ca),
            "is not issued for the address 127.0.0.1; use a name that it lists",
        ),
        "no certificate": (
            brokers.address("asking", ca=certificates.ca),
            f"the broker at {asking} requires a client certificate; give it with --cert and --key",
        ),
        "no certificate, TLS 1.2": (
            brokers.address("asking12", ca=certificates.ca),
            f"the broker at {asking12} requires a client certificate; give it with --cert and --key",
        ),
        "a stranger's certificate": (
            BrokerAddress(host="localhost", port=ports["asking"], tls=stranger),
            f"the broker at {asking} does not accept our certificate (unknown ca); have it signed",
        ),
        "a stranger's certificate, TLS 1.2": (
            BrokerAddress(host="localhost", port=ports["asking12"], tls=stranger),
            f"the broker at {asking12} does not accept our certificate (unknown ca); have it signed",
        ),
        "plain to TLS": (
            BrokerAddress(host="localhost", port=ports["tls"]),
            f"the broker at {tls} speaks TLS; write mqtts:// in its address",
        ),
        "plain to TLS that asks": (
            BrokerAddress(host="localhost", port=ports["asking"]),
            f"the broker at {asking} speaks TLS; write mqtts:// in its address",
        ),
        "TLS to plain": (
            brokers.address("plain", ca=certificates.ca),
            f"the broker at {plain} closes the connection during the TLS handshake; if the port is without TLS, write",
        ),
    }


_CASES = (
    *("unknown authority", "expired", "wrong name", "wrong address", "no certificate", "no certificate, TLS 1.2"),
    *("a stranger's certificate", "a stranger's certificate, TLS 1.2"),
    *("plain to TLS", "plain to TLS that asks", "TLS to plain"),
)


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("case", _CASES)
def test_a_tls_error_is_one_sentence(brokers: Brokers, case: str) -> None:
    address, words = _list_cases(brokers)[case]
    # Errors are found at once, without this timeout.
    transport = MqttTransport(address, "a", open_timeout_s=3600)
    with pytest.raises(TransportError) as caught:
        transport.open(())
    assert words in str(caught.value)
    # With --wait, errors that another attempt may resolve are waited for; errors of certificates are not.
    assert isinstance(caught.value, UnreachableError) == (case == "TLS to plain")


def test_the_broker_is_always_verified_and_old_tls_refused(certificates: Certificates) -> None:
    for files in (TlsFiles(), TlsFiles(ca=certificates.ca)):
        context = make_tls_context(files)
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def _list_files(certificates: Certificates, folder: Path) -> dict[str, tuple[TlsFiles, type[Exception], str]]:
    nothing = folder / "nothing.pem"
    text = folder / "text.pem"
    text.write_text("certificate", encoding="utf-8")
    certificate, key = certificates.device
    locked = folder / "locked.key"
    command = ["openssl", "pkey", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True)
    return {
        "no such ca": (TlsFiles(ca=nothing), FileError, f"{nothing} cannot be read (No such file or directory)"),
        "no such key": (TlsFiles(certificate=certificate, key=nothing), FileError, f"{nothing} cannot be read"),
        "no ca": (TlsFiles(ca=text), ConfigError, f"{text} contains no certificate of an authority"),
        "no certificate": (TlsFiles(certificate=text, key=key), ConfigError, "correct --cert and --key"),
        "no key": (TlsFiles(certificate=certificate), ConfigError, "correct --cert and --key"),
        "another key": (
            TlsFiles(certificate=certificate, key=certificates.stranger[1]),
            ConfigError,
            f"{certificates.stranger[1]} is not the key of the certificate {certificate}",
        ),
        "locked": (
            TlsFiles(certificate=certificate, key=locked),
            ConfigError,
            f"the key in {locked} is protected by a passphrase; give --key a key without one",
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["no such ca", "no such key", "no ca", "no certificate", "no key", "another key", "locked"]
)
def test_a_file_that_cannot_be_used_is_one_sentence(certificates: Certificates, tmp_path: Path, case: str) -> None:
    files, kind, words = _list_files(certificates, tmp_path)[case]
    with pytest.raises(kind) as caught:
        MqttTransport(BrokerAddress(host="localhost", port=8883, tls=files), "a")
    assert words in str(caught.value)
