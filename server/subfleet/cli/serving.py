"""What `subfleet serve` does: a server, its HTTP API and a broker, until the run is over or someone stops it."""

import logging
import shutil
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from subfleet.cli.console import Display
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.folding.devices import compute_device
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import RunObserver, RunResult
from subfleet.link.broker import EmbeddedBroker
from subfleet.link.watch import Watch
from subfleet.observers import observed, started
from subfleet.protocol.topics import Topics
from subfleet.reporting.address import HttpAddress
from subfleet.reporting.api import serve_http
from subfleet.reporting.own_models import kept_models
from subfleet.reporting.results import write_results
from subfleet.reporting.telling import ending_lines, reached_text
from subfleet.serving.broker import try_broker
from subfleet.serving.session import Server
from subfleet.settings.kept import MODEL, SUPERNET
from subfleet.settings.run import Run
from subfleet.settings.taking import with_model
from subfleet.transport.address import BrokerAddress, mqtt_client_id, parse_url
from subfleet.transport.base import Transport
from subfleet.transport.chunk_sizes import KNOWN_BROKERS, ChunkSizes, KnownBroker
from subfleet.transport.claiming import ClaimingTransport, server_place
from subfleet.transport.complaints import Complaints
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.rating import RatedTransport
from subfleet.transport.waiting import WaitingTransport

__all__ = ["EMBEDDED_PORT", "ServeOptions", "serve_fleet"]

_LOG = logging.getLogger(__name__)

EMBEDDED_PORT = 1883
"""Where MQTT clients look first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line says.

    Attributes:
        run: what is served.
        broker: where one is that is there already; None starts an embedded one on loopback.
        runs: folder in which the run's own is made, or found: an interrupted run is taken up.
        http: where the HTTP API listens.
        wait: for that broker, where it is not there at the start.
        cache: where exported programs are kept between runs.
        name: of the run's folder; None takes the run's name.
    """

    run: Run
    broker: BrokerAddress | None
    runs: Path
    http: HttpAddress
    cache: CacheFolder
    wait: bool = False
    name: str | None = None


def serve_fleet(options: ServeOptions, *, display: Display, stop: threading.Event) -> Path | None:
    """Serve one run of a fleet of real devices.

    Args:
        options: what the command line says.
        display: is told what happens.
        stop: set it to stop; the run can be taken up later.

    Returns:
        The folder with the results; None where the run was stopped before its end.

    Raises:
        ConfigError: the description is wrong, its run is over already, or its device is not there.
        TransportError: the broker is not there.
        PortError: an address is taken.
    """
    run = with_model(options.run, options.runs)
    compute_device(run.device)
    with ExitStack() as stack:
        stack.callback(display.ended)
        folder, shown = stack.enter_context(started(options.runs / (options.name or run.name), run, display))
        observer = stack.enter_context(observed(run, folder, shown))
        exports = stack.enter_context(ExportPool(options.cache))
        embedded, address = None, options.broker
        if address is None:
            embedded = stack.enter_context(EmbeddedBroker(port=EMBEDDED_PORT))
            address = parse_url(embedded.url)
        mqtt = MqttTransport(address, mqtt_client_id(run.fleet.name, "server", run.name))
        transport: Transport = WaitingTransport(mqtt, stop.is_set) if options.wait else mqtt
        topics = Topics(run.fleet.name)
        transport = ClaimingTransport(transport, server_place(topics, run.name), tell=observer.say)
        transport = RatedTransport(transport, topics, Complaints(_LOG).note)
        state = folder / "server"
        sizes = ChunkSizes.remembered(KnownBroker(state / KNOWN_BROKERS, address.where))
        server = Server(run, transport, observer, state_folder=state, exports=exports, sizes=sizes)
        page = stack.enter_context(serve_http(state, options.http))
        observer.say(f"Run {run.name!r} waits for {run.min_clients} devices; watch it at {page}")
        if embedded is not None:
            observer.say(
                f"Embedded broker at {embedded.url}, for this machine only; --broker takes one that devices can reach"
            )
            observer.say(f"Join from another terminal: subfleet-edge join {embedded.url} --data ./data")
        watch = stack.enter_context(Watch([embedded.start] if embedded else [], stop))
        if embedded is None:
            try_broker(address, run, mqtt, sizes, observer, stop if options.wait else None)
        result = server.run(stop)
        watch.raise_failure()
    guarded = GuardedObserver(display)
    if not result.finished:
        guarded.say("Stopped; the same command takes the run up again")
        return None
    return _keep(folder, run, result, guarded)


def _keep(folder: Path, run: Run, result: RunResult, display: RunObserver) -> Path:
    if result.model_path is not None:
        shutil.copyfile(result.model_path, folder / MODEL)
    if result.supernet_path is not None:
        shutil.copyfile(result.supernet_path, folder / SUPERNET)
    models = kept_models(folder, [(model, model.path) for model in result.deployed])
    report = write_results(folder, name=folder.name, result=result, extra={"models": list(models)})
    for line in ending_lines(result):
        display.say(line)
    display.say(f"{reached_text(result)}; everything is in {folder}, look at {report}")
    return folder
