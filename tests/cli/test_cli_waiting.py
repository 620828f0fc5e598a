"""`subfleet serve --wait` waits for a broker that cannot be reached, until it can be or Ctrl-C is pressed."""

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from subfleet.link.broker import EmbeddedBroker
from subfleet.transport.address import parse_url
from subfleet.transport.base import Delivery
from subfleet.transport.mqtt import MqttTransport

pytestmark = [pytest.mark.slow, pytest.mark.broker]


def read_until(lines: Iterable[str], words: str) -> list[str]:
    """The lines up to the first that contains the words."""
    lines_read = []
    for line in lines:
        lines_read.append(line)
        if words in line:
            return lines_read
    raise AssertionError(f"{words!r} was not among: {lines_read}")


@pytest.mark.parametrize("arrives", [True, False])
def test_the_server_waits_for_a_broker_until_it_starts_or_ctrl_c(tmp_path: Path, arrives: bool) -> None:
    broker = EmbeddedBroker()
    with broker:
        pass  # only to get an address
    command = [sys.executable, "-u", "-m", "subfleet.cli.main", "serve", "fleet", "--broker", broker.url]
    command += ["--http-port", "0", "--wait", "--runs", str(tmp_path)]
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        stack.callback(server.kill)
        assert server.stdout is not None
        lines = read_until(server.stdout, "waiting for it until Ctrl-C")
        assert broker.url.removeprefix("mqtt://") in lines[-1]
        if arrives:
            stack.enter_context(broker)
            listener = MqttTransport(parse_url(broker.url), "listener")
            listener.open(("#",))
            stack.callback(listener.close)
            assert any(isinstance(listener.poll(1.0), Delivery) for _ in range(60)), "the server publishes nothing"
        server.send_signal(signal.SIGINT)
        rest, _ = server.communicate(timeout=60)
    assert rest.strip() == "Stopped; run the same command again to resume the run"
    assert server.returncode == 0
