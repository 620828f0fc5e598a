"""The hosts of emulated fleets by name: they run a fleet as client processes or in one process."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
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
    with _HOSTS[kind](cache, broker) as host:
        from subfleet.aggregation.devices import compute_device

        def run(described: Run, folder: Path, observer: RunObserver, stop: threading.Event) -> "Outcome":
            compute_device(described.device)  # raises before anything is begun if the device is missing
            with observe_run(described, folder, observer) as everyone:
                return host(described, folder, everyone, stop)

        yield run


@contextmanager
def _open_processes(cache: CacheFolder, broker: BrokerAddress | None) -> Iterator[Host]:
    from subfleet.export.pool import ExportPool

    with ExportPool(cache) as exports:  # its worker loads PyTorch while this process does
        from subfleet.emulation.processes import run_processes

        yield partial(run_processes, exports=exports, broker=broker)


@contextmanager
def _open_batch(cache: CacheFolder, broker: BrokerAddress | None) -> Iterator[Host]:
    from subfleet.emulation.batch.host import run_in_batch
    from subfleet.export.pool import ExportPool

    with ExportPool(cache, workers=1) as exports:
        yield partial(run_in_batch, exports=exports)


_Opening = Callable[[CacheFolder, BrokerAddress | None], AbstractContextManager[Host]]
_HOSTS: Mapping[HostKind, _Opening] = MappingProxyType({"processes": _open_processes, "batch": _open_batch})
