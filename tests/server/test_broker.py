import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from subfleet.link.broker import EmbeddedBroker
from subfleet.protocol.errors import PortError
from subfleet.transport.address import parse_url
from subfleet.transport.base import Connected, Delivery
from subfleet.transport.mqtt import MqttTransport

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def _port(broker: EmbeddedBroker) -> int:
    return int(broker.url.rsplit(":", 1)[1])


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_it_runs_in_its_own_process_until_it_is_stopped() -> None:
    broker = EmbeddedBroker()
    with broker:
        pids = [broker.pid]
        assert not {None, os.getpid()} & set(pids)
        assert _accepts(_port(broker))
        broker.start()
        assert broker.pid == pids[0], "it is already running"
    assert not _accepts(_port(broker))
    broker.stop()


def test_clients_that_connect_at_once_are_all_answered() -> None:
    """While amqtt delivers retained messages, clients that subscribed at the same time were lost."""
    with EmbeddedBroker() as broker, ThreadPoolExecutor(32) as pool, ExitStack() as links:
        address = parse_url(broker.url)
        server = MqttTransport(address, "server")
        links.callback(server.close)
        server.open(("up/+",))
        for number in range(20):
            server.publish(f"up/{number}", b"here", retain=True)
        answered = 0
        while answered < 20:
            answered += isinstance(server.poll(5.0), Delivery)
        clients = [MqttTransport(address, f"client-{number}") for number in range(32)]
        for client in clients:
            links.callback(client.close)
        for opened in [pool.submit(client.open, (f"down/{name}",)) for name, client in enumerate(clients)]:
            opened.result()  # raises if the broker was silent for ten seconds
        for name in range(32):
            server.publish(f"down/{name}", b"welcome")
        for client in clients:
            assert isinstance(client.poll(5.0), Connected)
            message = client.poll(5.0)
            assert isinstance(message, Delivery)
            assert message.payload == b"welcome"


def test_it_hangs_up_on_a_client_that_does_not_begin_with_connect() -> None:
    with EmbeddedBroker() as broker, socket.create_connection(("127.0.0.1", _port(broker)), timeout=20) as link:
        link.sendall(b"\xc0\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00")  # a CONNECT packet with the type of PINGREQ
        assert link.recv(1) == b""


def test_it_keeps_its_address_after_a_crash() -> None:
    broker = EmbeddedBroker()
    with broker:
        url = broker.url
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        os.waitpid(broker.pid, 0)
        assert not _accepts(_port(broker))
        broker.start()
        assert broker.url == url
        assert _accepts(_port(broker))


def test_it_listens_on_loopback_only() -> None:
    with EmbeddedBroker() as broker, open("/proc/net/tcp") as table:  # noqa: PTH123 (a file of the kernel)
        port = f"{_port(broker):04X}"
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
        assert [address for address in listening if address.endswith(f":{port}")] == [f"0100007F:{port}"]


def test_an_occupied_port_is_reported_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortError, match=f"port {port} on 127.0.0.1 cannot be used"):
            EmbeddedBroker(port).start()


@pytest.mark.parametrize("port", [70_000, -1])
def test_an_invalid_port_is_reported_in_one_sentence(port: int) -> None:
    with pytest.raises(PortError, match="choose another"):
        EmbeddedBroker(port).start()


def test_it_dies_with_a_parent_that_was_killed() -> None:
    program = (
        "import time; from subfleet.link.broker import EmbeddedBroker; broker = EmbeddedBroker(); broker.start()\n"
        "print(broker.url.rsplit(':', 1)[1], flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        assert _accepts(port)
    finally:
        parent.kill()
        parent.communicate()
    _wait_until(lambda: not _accepts(port))
