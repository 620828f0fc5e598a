"""Serves a run over a broker: the server, its transport and its clients."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from subfleet.journal.records import RunObserver, RunResult
from subfleet.link.broker import EmbeddedBroker
from subfleet.link.device_link import connect_devices
from subfleet.link.watch import watch
from subfleet.programs.supply import Exports
from subfleet.protocol.errors import RunError
from subfleet.protocol.topics import Topics
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.tasks import Dataset
from subfleet.transport.address import BrokerAddress, mqtt_client_id, parse_url
from subfleet.transport.base import Transport
from subfleet.transport.broker_check import examine_broker
from subfleet.transport.chunk_sizes import KNOWN_BROKERS, ChunkSizes, KnownBroker
from subfleet.transport.complaints import Complaints
from subfleet.transport.locking import LockingTransport, make_server_lock
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.rating import RatedTransport
from subfleet.transport.waiting import WaitingTransport

_LOG = logging.getLogger(__name__)

Clients = Callable[[BrokerAddress], AbstractContextManager[Sequence[Callable[[], None]]]]
"""A context in which clients can join at a broker; it gives functions that check the clients."""


class StoppedError(RunError):
    """The run was stopped before its end, and can be resumed."""


@contextmanager
def serve_run(  # noqa: PLR0913 - where and how a run is served
    run: Run,
    folder: Path,
    observer: RunObserver,
    stop: threading.Event,
    *,
    exports: Exports,
    clients: Clients,
    broker: BrokerAddress | None = None,
    embedded_port: int = 0,
    wait: bool = False,
    samples: Dataset | None = None,
) -> Iterator[tuple[Server, RunResult]]:
    """Run to the end; in the context, clients learn of the end and leave.

    Args:
        run: settings of the run.
        folder: of the run; the state of the server is in `server/`.
        observer: of the run.
        stop: set it to stop the run.
        exports: the exporter; it is not closed.
        clients: lets clients join.
        broker: None starts an embedded one on the loopback interface.
        embedded_port: port of the embedded broker; 0 selects a free port.
        wait: if the broker is not there yet, wait for it.
        samples: evaluation data, if they have been read.

    Yields:
        The server, after the end of the run, and the result.

    Raises:
        StoppedError: `stop` was set before the end.
        RunError: the run cannot go on, or a client has failed.
        TransportError: the broker is not there.
        PortError: the port of the embedded broker is taken.
        SubfleetError: the run's data or its state cannot be used.
    """
    state, address = folder / "server", broker
    with ExitStack() as stack:
        repairs: list[Callable[[], None]] = []
        if address is None:
            embedded = stack.enter_context(EmbeddedBroker(port=embedded_port))
            repairs, address = [embedded.start], parse_url(embedded.url)
        mqtt = MqttTransport(address, mqtt_client_id(run.fleet.name, "server", run.name))
        link: Transport = WaitingTransport(mqtt, stop.is_set) if wait else mqtt
        topics = Topics(run.fleet.name)
        link = LockingTransport(link, make_server_lock(topics, run.name), tell=observer.say)
        link = RatedTransport(link, topics, Complaints(_LOG).note)
        sizes = ChunkSizes.from_broker(KnownBroker(state / KNOWN_BROKERS, address.host_and_port))
        connect = connect_devices(run.fleet.name, link, sizes=sizes)
        server = Server(run, connect, observer, state_folder=state, exports=exports, samples=samples)
        checks = stack.enter_context(clients(address))
        raise_failure = stack.enter_context(watch([*checks, *repairs], stop))
        if broker is not None:
            adapt_to_broker(address, run, mqtt, sizes, observer, stop if wait else None)
        result = server.run(stop)
        raise_failure()
        if not result.finished:
            raise StoppedError(f"the run was stopped before its end; start it again with --name {folder.name}")
        yield server, result


def adapt_to_broker(
    address: BrokerAddress,
    run: Run,
    transport: MqttTransport,
    sizes: ChunkSizes,
    observer: RunObserver,
    wait_until: threading.Event | None = None,
) -> None:
    """Examine a broker, and adapt the server's transport and chunk sizes to it.

    Args:
        address: of the broker.
        run: to be served.
        transport: of the server, not opened yet.
        sizes: of chunks.
        observer: gets a sentence for each shortcoming of the broker.
        wait_until: wait for a missing broker until this is set; None does not wait.

    Raises:
        TransportError: the broker is not there, refuses us, or cannot be trusted.
    """
    fleet = run.fleet.name
    client_id = mqtt_client_id(fleet, "doctor", f"{run.name}-{os.getpid()}")
    report = examine_broker(
        address,
        Topics(fleet),
        name=run.name,
        client_id=client_id,
        opened=lambda first: first if wait_until is None else WaitingTransport(first, wait_until.is_set),
    )
    if wait_until is not None and wait_until.is_set():
        return
    transport.expect(report.terms)
    if report.chunk_bytes is not None:
        sizes.set_proven(report.chunk_bytes)
    for finding in report.shortcomings:
        observer.say(f"Broker at {address.host_and_port}, {finding.check}: {finding.text}; {finding.remedy}")
