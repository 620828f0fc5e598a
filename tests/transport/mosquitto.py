"""The installed Mosquitto: for anonymous clients on loopback, or with the settings of a real fleet."""

import base64
import contextlib
import datetime
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
"""Path of the installed program, or None. On Debian it is in a folder that only root has in PATH."""
_START_S = 20.0
_LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Files of an authority, and certificates that it or an unknown authority has signed."""

    ca: Path
    broker: tuple[Path, Path]
    expired: tuple[Path, Path]
    elsewhere: tuple[Path, Path]
    device: tuple[Path, Path]
    stranger: tuple[Path, Path]


def make_certificates(folder: Path) -> Certificates:
    trustme = pytest.importorskip("trustme", reason="trustme is not installed; run: pip install 'subfleet[dev]'")
    authority, unknown = trustme.CA(), trustme.CA()
    ca = folder / "ca.pem"
    authority.cert_pem.write_to_path(ca)

    def issue(name: str, *names: str, by: object = authority, **times: datetime.datetime) -> tuple[Path, Path]:
        issued = by.issue_cert(*names, **times)  # type: ignore[attr-defined]
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return certificate, key

    return Certificates(
        ca=ca,
        broker=issue("broker", "localhost", "127.0.0.1"),
        expired=issue("expired", "localhost", not_before=_LONG_AGO, not_after=_LONG_AGO + datetime.timedelta(days=1)),
        elsewhere=issue("elsewhere", "broker.example"),
        device=issue("device", "cam"),
        stranger=issue("stranger", "cam", by=unknown),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tls_listener(port: int, certificate: tuple[Path, Path], *options: str) -> tuple[str, ...]:
    return (f"listener {port} 127.0.0.1", f"certfile {certificate[0]}", f"keyfile {certificate[1]}", *options)


def password_line(user: str, password: str) -> str:
    """A line of a password file, as mosquitto_passwd writes it."""
    salt, rounds = os.urandom(12), 101
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, rounds)
    return f"{user}:$7${rounds}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


@contextmanager
def mosquitto(folder: Path, settings: Sequence[str], port: int) -> Iterator[None]:
    """Run Mosquitto while the context lasts; `port` is one of the ports in the settings."""
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not installed; run: sudo apt-get install mosquitto")
    configuration = folder / "mosquitto.conf"
    # As another user, it might not be able to read the files of the test.
    configuration.write_text("\n".join(["user root", "per_listener_settings true", *settings, ""]), encoding="utf-8")
    # The signal ends it with this process; it stays in effect as Mosquitto does not change its user.
    command = ["setpriv", "--pdeathsig", "TERM", MOSQUITTO, "-c", str(configuration)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, "Mosquitto does not accept the configuration"
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def open_mosquitto() -> Iterator[str]:
    """Run Mosquitto for anonymous clients while the context lasts, and give its URL."""
    port = free_port()
    settings = (f"listener {port} 127.0.0.1", "allow_anonymous true", "persistence false")
    with tempfile.TemporaryDirectory() as folder, mosquitto(Path(folder), settings, port):
        yield f"mqtt://127.0.0.1:{port}"
