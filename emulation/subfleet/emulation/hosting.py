"""The hosts of emulated fleets by name: they run a fleet as client processes, in one process, or account it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from subfleet.export.cache import CacheFolder
from subfleet.journal.records import RunObserver
from subfleet.observers import observe_run
from subfleet.settings.fleet import HostKind
from subfleet.settings.run import Run
from subfleet.transport.address import BrokerAddress

if TYPE_CHECKING:
    from subfleet.serving.outcome import Outcome

Host = Callable[[Run, Path, RunObserver, threading.Event], "Outcome"]
"""Runs an emulated fleet to the end, or until the event is set. It is called with the run, its folder and an observer.
It raises RunError if the run fails or is stopped, and other SubfleetErrors if data or devices cannot be used."""


@contextmanager
def open_host(kind: HostKind, cache: CacheFolder, broker: BrokerAddress | None = None) -> Iterator[Host]:
    """A context with a host that has loaded its packages, PyTorch above all; the exporter ends with the context.

    Args:
        kind: of the host.
        cache: of exported programs.
        broker: of client processes; None starts an embedded one.
    """
    from subfleet.export.pool import ExportPool

    processes = kind == "processes"
    # A worker loads PyTorch while this process does.
    with ExportPool(cache, workers=2 if processes else 1) as exports:
        host: Host
        if kind == "batch":
            from subfleet.emulation.batch.host import run_in_batch

            host = partial(run_in_batch, exports=exports)
        elif kind == "accounting":
            from subfleet.emulation.accounting.host import run_accounting

            host = partial(run_accounting, exports=exports)
        else:
            from subfleet.emulation.processes import run_processes

            host = partial(run_processes, exports=exports, broker=broker)
        from subfleet.aggregation.devices import compute_device

        def run(described: Run, folder: Path, observer: RunObserver, stop: threading.Event) -> "Outcome":
            compute_device(described.device)  # raises if it is missing
            with observe_run(described, folder, observer) as everyone:
                return host(described, folder, everyone, stop)

        yield run
