"""The embedded broker, amqtt, in its own process and on loopback only.

It ends with the process that started it, even if that was killed. The module is also the program of the broker's
process: `python -m subfleet.link.broker --port N`.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import UserDict
from collections.abc import ItemsView, Iterator, Sequence
from contextlib import ExitStack, suppress

from subfleet.protocol.errors import PortError, TransportError
from subfleet.protocol.exit_codes import ExitCode

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_START_ATTEMPTS = 5
_AMQTT_PLUGINS = {
    # amqtt's default set would also log every packet and publish its own statistics.
    "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
}


class _Subscriptions(UserDict[str, list[tuple[object, int]]]):
    """amqtt's subscriptions, iterated as they were at the beginning.

    amqtt (0.12) awaits while it iterates: without this, a client that subscribes meanwhile breaks the session of
    another one that has just connected, whose subscriptions are then never answered.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self.data))

    def items(self) -> ItemsView[str, list[tuple[object, int]]]:
        return dict(self.data).items()


class EmbeddedBroker:
    """amqtt in its own process, on loopback, for anonymous clients. Start and stop it, or use it as a context manager.

    It stores nothing: a broker that is restarted on the same object has the same address and no retained messages.

    Args:
        port: 0 chooses a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self._fixed = port != 0
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = ExitStack()  # of the process

    @property
    def url(self) -> str:
        """Its address for clients; valid after its first start."""
        return f"mqtt://{_HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Id of its process; None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and wait until it accepts connections; nothing happens while it runs.

        Raises:
            PortError: the port is taken or may not be used.
            TransportError: it does not start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()  # closes the pipe to a broker that has crashed
        for attempt in range(_START_ATTEMPTS):
            self._port = _find_port(self._port if self._fixed else 0)
            reason = self._launch()
            if not reason:
                self._fixed = True  # a broker that is started again keeps its address
                return
            self.stop()
            # Another process may take a free port before the broker listens on it.
            if self._fixed or attempt == _START_ATTEMPTS - 1 or "in use" not in reason:
                raise TransportError(f"the embedded broker did not start on port {self._port}: {reason}")

    def stop(self) -> None:
        """Stop it; nothing happens while it does not run."""
        self._process = None
        self._resources.close()

    def __enter__(self) -> "EmbeddedBroker":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self) -> str:
        """Start a process and wait until it accepts connections; returns why it does not, or an empty text."""
        stderr = self._resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (it lives as long as the process)
        # The pipe closes when this process ends in any way, which ends the broker. Its own session keeps Ctrl-C from
        # it, so that clients can say goodbye over it first.
        command = [sys.executable, "-m", "subfleet.link.broker", "--port", str(self._port)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
            )
        except OSError as error:
            return str(error)
        self._process = self._resources.enter_context(process)
        self._resources.callback(_end, process)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            with suppress(OSError), socket.create_connection((_HOST, self._port), timeout=1):
                return ""
            time.sleep(0.05)
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it did not accept connections within {_START_TIMEOUT_S:g} seconds"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _find_port(port: int) -> int:
    """The port, if it is free; any free one for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "it must be 0 to 65535"
            raise PortError(f"port {port} on {_HOST} cannot be used ({why}); choose another, or 0 for any") from error
        return int(probe.getsockname()[1])


async def _serve_amqtt(port: int) -> None:
    # Imported here, so that the process that only starts brokers does not load a broker.
    from amqtt.broker import Broker

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def watch_parent() -> None:
        # The bare descriptor: a buffered reader that still reads holds a lock that the interpreter needs to exit.
        while os.read(0, 1024):
            pass
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=watch_parent, daemon=True, name="parent").start()
    listeners = {"default": {"type": "tcp", "bind": f"{_HOST}:{port}"}}
    broker = Broker({"listeners": listeners, "plugins": _AMQTT_PLUGINS})
    broker._subscriptions = _Subscriptions()  # noqa: SLF001 (amqtt has no other place to mend this)
    serve_client = broker.stream_connected

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str) -> None:
        # amqtt leaves the connection open when its own code fails: the client would wait instead of reconnecting.
        try:
            await serve_client(reader, writer, listener_name)
        finally:
            writer.close()

    broker.stream_connected = serve_and_close
    await broker.start()
    await ended.wait()
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(broker.shutdown(), _STOP_TIMEOUT_S / 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a broker in this process until its parent ends or it is told to stop."""
    parser = argparse.ArgumentParser(description="Runs an MQTT broker on loopback until its standard input closes.")
    parser.add_argument("--port", type=int, required=True, help="TCP port on 127.0.0.1")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)
    asyncio.run(_serve_amqtt(options.port))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
