"""What `subfleet serve` does: a server, its HTTP API and a broker, until the run is over or someone stops it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from subfleet.aggregation.devices import compute_device
from subfleet.cli.console import Display
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import GuardedObserver
from subfleet.observers import observed, started
from subfleet.reporting.address import HttpAddress
from subfleet.reporting.api import serve_http
from subfleet.reporting.run_figures import run_figures
from subfleet.reporting.telling import ending_lines, reached_text
from subfleet.serving.deployment import Deployment, StoppedError, deployed
from subfleet.serving.outcome import gallery_of, leave_results
from subfleet.settings.run import Run
from subfleet.settings.taking import with_model
from subfleet.transport.address import BrokerAddress

__all__ = ["EMBEDDED_PORT", "ServeOptions", "serve_fleet"]

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

        @contextmanager
        def clients(broker: BrokerAddress) -> Iterator[Sequence[Callable[[], None]]]:
            with serve_http(folder / "server", options.http) as page:
                observer.say(f"Run {run.name!r} waits for {run.min_clients} devices; watch it at {page}")
                if options.broker is None:
                    observer.say(
                        f"Embedded broker at {broker.url}, for this machine only; --broker takes one that devices can "
                        "reach"
                    )
                    observer.say(f"Join from another terminal: subfleet-edge join {broker.url} --data ./data")
                yield []

        deployment = Deployment(
            run=run,
            folder=folder,
            exports=exports,
            clients=clients,
            broker=options.broker,
            embedded_port=EMBEDDED_PORT,
            wait=options.wait,
        )
        outcome = None
        with suppress(StoppedError), deployed(deployment, observer, stop) as (server, result):
            outcome = leave_results(folder, result, observer, figures=lambda: run_figures(gallery_of(server), result))
    guarded = GuardedObserver(display)
    if outcome is None:
        guarded.say("Stopped; the same command takes the run up again")
        return None
    for line in ending_lines(outcome.result):
        guarded.say(line)
    guarded.say(f"{reached_text(outcome.result)}; everything is in {folder}, look at {outcome.report}")
    return folder
