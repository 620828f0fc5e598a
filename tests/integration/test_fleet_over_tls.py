"""The recipe for a real fleet in the documentation: TLS, a user for each device, an access list."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transport.mosquitto import free_port, make_certificates, mosquitto, password_line, tls_listener

from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.messages import Claim, encode
from subfleet.protocol.topics import Topics
from subfleet.transport.address import BrokerAddress, TlsFiles
from subfleet.transport.mqtt import MqttTransport

pytestmark = [pytest.mark.slow, pytest.mark.broker]

RECIPE = Path(__file__).resolve().parents[2] / "docs/how-to/run-a-fleet-over-tls.md"
PASSWORDS = {"subfleet-server": "served", "cam": "snapped", "eve": "listened"}
LIMIT_S = 90.0


def _read_access_list() -> str:
    lines = RECIPE.read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.strip() == "# /etc/mosquitto/access")
    end = next(number for number, line in enumerate(lines) if "# /etc/mosquitto/conf.d" in line)
    return "\n".join(line.strip() for line in lines[begin:end]) + "\n"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    folder: Path
    port: int
    ca: Path

    def options(self, user: str) -> list[str]:
        password = self.folder / f"{user}.password"
        password.write_text(f"{PASSWORDS[user]}\n", encoding="utf-8")
        return ["--ca", str(self.ca), "--password-file", str(password)]

    def url(self, user: str) -> str:
        return f"mqtts://{user}@localhost:{self.port}"

    def transport(self, user: str) -> MqttTransport:
        address = BrokerAddress(
            host="localhost", port=self.port, username=user, password=PASSWORDS[user], tls=TlsFiles(ca=self.ca)
        )
        return MqttTransport(address, f"stranger:{user}")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    certificates, port = make_certificates(tmp_path), free_port()
    users, access = tmp_path / "users", tmp_path / "access"
    users.write_text("".join(f"{password_line(*pair)}\n" for pair in PASSWORDS.items()), encoding="utf-8")
    access.write_text(_read_access_list(), encoding="utf-8")
    rules = (f"password_file {users}", f"acl_file {access}", "allow_anonymous false")
    with mosquitto(tmp_path, tls_listener(port, certificates.broker, *rules), port):
        yield Fleet(folder=tmp_path, port=port, ca=certificates.ca)


@dataclass(frozen=True, kw_only=True)
class Program:
    process: "subprocess.Popen[bytes]"
    output: Path

    def await_words(self, words: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while words not in self.output.read_text(encoding="utf-8"):
            assert self.process.poll() is None, self.output.read_text(encoding="utf-8")
            assert time.monotonic() < deadline_s, self.output.read_text(encoding="utf-8")
            time.sleep(0.05)


@contextmanager
def _start_program(fleet: Fleet, name: str, *command: str) -> Iterator[Program]:
    output = fleet.folder / f"{name}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=file,
            stderr=file,
            cwd=fleet.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            yield Program(process=process, output=output)
        finally:
            process.kill()
            process.wait()


def _write_run(folder: Path) -> None:
    np.savez(folder / "test.npz", x=np.zeros((4, 3), np.float32), y=np.array([0, 1, 0, 1]))
    (folder / "fleet.toml").write_text(
        'name = "long"\nrounds = 1\nmin_clients = 2\ndata.test = "test.npz"\n'
        '[model]\nfamily = "mlp"\ninput_shape = [3]\nclass_count = 2\nwidths = [4]\ndepths = [1]\n',
        encoding="utf-8",
    )


def _claim_until_end(fleet: Fleet, user: str, topic: str, program: Program) -> None:
    """Publish claims like a process that was first, until the program ends."""
    stranger = fleet.transport(user)
    stranger.open(())
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while program.process.poll() is None:
            assert time.monotonic() < deadline_s
            stranger.publish(topic, encode(Claim(session_id="first", holder="short", since_s=1.0)))
            time.sleep(0.2)
    finally:
        stranger.close()


def test_the_recipe_works_and_a_taken_lock_ends_device_and_server(fleet: Fleet) -> None:
    _write_run(fleet.folder)
    topics = Topics("main")
    serve = ["serve", "fleet.toml", "--broker", fleet.url("subfleet-server"), "--http-port", "0"]
    join = ["join", fleet.url("cam"), "--data", "test.npz", "--state", "cam", "--wait"]
    with ExitStack() as stack:
        server = stack.enter_context(
            _start_program(fleet, "server", "subfleet.cli.main", *serve, *fleet.options("subfleet-server"))
        )
        device = stack.enter_context(
            _start_program(fleet, "device", "subfleet.edge_client.cli", *join, *fleet.options("cam"))
        )
        device.await_words("connected as cam")
        server.await_words("client cam joined")
        _claim_until_end(fleet, "cam", topics.uplink("cam", Claim.KIND), device)
        _claim_until_end(fleet, "subfleet-server", topics.all(Claim.KIND), server)
        assert (device.process.wait(), server.process.wait()) == (ExitCode.TAKEN, ExitCode.TAKEN)
    outputs = device.output.read_text(encoding="utf-8"), server.output.read_text(encoding="utf-8")
    assert "another device with the id 'short' joined this fleet first; choose another --id" in outputs[0]
    assert "run 'short' already serves this fleet on this broker; choose another fleet" in outputs[1]
    assert not any("Traceback" in text or password in text for text in outputs for password in PASSWORDS.values())


def test_no_user_may_publish_for_another(fleet: Fleet) -> None:
    topics = Topics("main")
    server, cam, eve = (fleet.transport(user) for user in PASSWORDS)
    try:
        for transport in (server, cam, eve):
            transport.open(("subfleet/1/#",))
        eve.publish(topics.uplink("cam", Claim.KIND), b"of another device")
        eve.publish(topics.all(Claim.KIND), b"of the server")
        eve.publish(topics.downlink("cam", "task"), b"of the server")
        eve.publish(topics.uplink("eve", "presence"), b"of eve")
        server.publish(topics.downlink("cam", "task"), b"for cam")
        payloads: dict[str, set[bytes]] = {}
        for name, transport in zip(PASSWORDS, (server, cam, eve), strict=True):
            events = iter(lambda transport=transport: transport.poll(0.5), None)  # type: ignore[misc]
            payloads[name] = {event.payload for event in events if hasattr(event, "payload")}
    finally:
        for transport in (server, cam, eve):
            transport.close()
    assert payloads == {"subfleet-server": {b"of eve", b"for cam"}, "cam": {b"for cam"}, "eve": {b"of eve"}}
