"""A run over a broker: the server, its transport and its clients, whoever starts these, and one meaning of stop."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from subfleet.journal.records import RunObserver, RunResult
from subfleet.link.broker import EmbeddedBroker
from subfleet.link.watch import Watch
from subfleet.programs.supply import Exports
from subfleet.protocol.errors import RunError
from subfleet.protocol.topics import Topics
from subfleet.serving.broker import try_broker
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.tasks import Dataset
from subfleet.transport.address import BrokerAddress, mqtt_client_id, parse_url
from subfleet.transport.base import Transport
from subfleet.transport.chunk_sizes import KNOWN_BROKERS, ChunkSizes, KnownBroker
from subfleet.transport.complaints import Complaints
from subfleet.transport.locking import LockingTransport, make_server_lock
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.rating import RatedTransport
from subfleet.transport.waiting import WaitingTransport

__all__ = ["Clients", "Deployment", "StoppedError", "deployed"]

_LOG = logging.getLogger(__name__)

Clients = Callable[[BrokerAddress], AbstractContextManager[Sequence[Callable[[], None]]]]
"""Lets clients join at a broker; while its context lasts they may, and the checks that it gives look after them."""


class StoppedError(RunError):
    """The run was stopped before its end, and can be taken up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A run, and where it is served.

    Attributes:
        run: as the server is given it.
        folder: of the run; the server's state is in `server/` there.
        exports: the exporter; whoever opened it closes it.
        clients: those that take part.
        broker: where one is that is there already; None starts an embedded one on loopback.
        embedded_port: of that one; 0 takes a free port.
        wait: for the broker, where it is not there at the start.
        samples: the evaluation data, where somebody has read them.
    """

    run: Run
    folder: Path
    exports: Exports
    clients: Clients
    broker: BrokerAddress | None = None
    embedded_port: int = 0
    wait: bool = False
    samples: Dataset | None = None


@contextmanager
def deployed(
    deployment: Deployment, observer: RunObserver, stop: threading.Event
) -> Iterator[tuple[Server, RunResult]]:
    """Run to the end; while the context lasts, clients hear of it and leave.

    Args:
        deployment: what is run, and where.
        observer: is told what happens.
        stop: set it to stop the run.

    Yields:
        The server of the run, which has ended, and how it ended.

    Raises:
        StoppedError: `stop` was set before the end.
        RunError: the run cannot go on, or a client has failed.
        TransportError: the broker is not there.
        PortError: the port of the embedded broker is taken.
        SubfleetError: the run's data or its state cannot be used.
    """
    run, state, address = deployment.run, deployment.folder / "server", deployment.broker
    with ExitStack() as stack:
        mend: list[Callable[[], None]] = []
        if address is None:
            embedded = stack.enter_context(EmbeddedBroker(port=deployment.embedded_port))
            mend, address = [embedded.start], parse_url(embedded.url)
        mqtt = MqttTransport(address, mqtt_client_id(run.fleet.name, "server", run.name))
        link: Transport = WaitingTransport(mqtt, stop.is_set) if deployment.wait else mqtt
        topics = Topics(run.fleet.name)
        link = LockingTransport(link, make_server_lock(topics, run.name), tell=observer.say)
        link = RatedTransport(link, topics, Complaints(_LOG).note)
        sizes = ChunkSizes.remembered(KnownBroker(state / KNOWN_BROKERS, address.where))
        server = Server(
            run,
            link,
            observer,
            state_folder=state,
            exports=deployment.exports,
            sizes=sizes,
            samples=deployment.samples,
        )
        checks = stack.enter_context(deployment.clients(address))
        watch = stack.enter_context(Watch([*checks, *mend], stop))
        if deployment.broker is not None:
            try_broker(address, run, mqtt, sizes, observer, stop if deployment.wait else None)
        result = server.run(stop)
        watch.raise_failure()
        if not result.finished:
            raise StoppedError(
                f"the run was stopped before its end; start it again with --name {deployment.folder.name} to go on"
            )
        yield server, result
