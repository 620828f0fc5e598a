"""Serves a run to real devices: a server, its HTTP API and a broker, until the run is finished or stopped."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from subfleet.aggregation.devices import compute_device
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import RunObserver
from subfleet.observers import observe_run, open_run_folder
from subfleet.reporting.api import HttpAddress, serve_http
from subfleet.reporting.run_figures import compute_figures
from subfleet.reporting.texts import describe_ending, describe_result
from subfleet.serving.deployment import StoppedError, serve_run
from subfleet.serving.outcome import Outcome, collect_gallery, write_outcome
from subfleet.settings.run import Run
from subfleet.settings.stored_networks import resolve_model
from subfleet.transport.address import BrokerAddress

_PORT = 1883
"""Of the embedded broker; MQTT clients use it by default."""


def serve_fleet(  # noqa: PLR0913 - the options of the command
    described: Run,
    runs: Path,
    display: RunObserver,
    stop: threading.Event,
    *,
    http: HttpAddress,
    cache: CacheFolder,
    name: str | None = None,
    broker: BrokerAddress | None = None,
    wait: bool = False,
) -> Path | None:
    """Serve one run to a fleet of real devices.

    Args:
        described: the run.
        runs: contains a folder for each run.
        display: shows the run.
        stop: set it to stop; the run can be resumed later.
        http: where the HTTP API listens.
        cache: of exported programs.
        name: of the run's folder; None takes the run's name. An interrupted run in that folder is resumed.
        broker: None starts an embedded one on the loopback interface.
        wait: if the broker is not there yet, wait for it.

    Returns:
        The folder with the results, or None if the run was stopped before its end.

    Raises:
        ConfigError: the description is invalid, its run is already finished, or the compute device is missing.
        TransportError: the broker is unreachable.
        PortError: an address is in use.
    """
    run = resolve_model(described, runs)
    compute_device(run.device)
    with ExitStack() as stack:
        folder, shown = stack.enter_context(open_run_folder(runs / (name or run.name), run, display))
        observer = stack.enter_context(observe_run(run, folder, shown))
        exports = stack.enter_context(ExportPool(cache))

        @contextmanager
        def clients(address: BrokerAddress) -> Iterator[Sequence[Callable[[], None]]]:
            with serve_http(folder / "server", http) as page:
                for line in _describe_start(run, page, "" if broker else address.url):
                    observer.say(line)
                yield []

        outcome = None
        served = partial(serve_run, exports=exports, clients=clients, broker=broker, embedded_port=_PORT, wait=wait)
        with suppress(StoppedError), served(run, folder, observer, stop) as (server, result):
            outcome = write_outcome(
                folder, result, observer, figures=lambda: compute_figures(collect_gallery(server), result)
            )
    for line in _describe_end(outcome):
        GuardedObserver(display).say(line)
    return None if outcome is None else folder


def _describe_start(run: Run, page: str, embedded_broker: str) -> Iterator[str]:
    yield f"Run {run.name!r} waits for {run.min_clients} devices; watch it at {page}"
    if embedded_broker:
        yield (
            f"Embedded broker at {embedded_broker}, for this machine only; name one that other devices can reach with "
            "--broker"
        )
        yield f"Join from another terminal: subfleet-edge join {embedded_broker} --data ./data"


def _describe_end(outcome: Outcome | None) -> Iterator[str]:
    if outcome is None:
        yield "Stopped; run the same command again to resume the run"
        return
    yield from describe_ending(outcome.result)
    yield f"{describe_result(outcome.result)}; everything is in {outcome.folder}, look at {outcome.report}"
