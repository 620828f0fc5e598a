"""Hosts of emulated fleets: what runs a run, by the name that it gives."""

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
"""Runs a run to its end: in its folder, telling an observer, until an event is set that ends it early. It raises
RunError where the run fails or is stopped, and whatever SubfleetError the data, devices or observers give rise to."""


@contextmanager
def open_host(kind: HostKind, cache: CacheFolder, broker: BrokerAddress | None = None) -> Iterator[Host]:
    """A host with all that it runs with loaded, PyTorch above all; the exporter's processes end with the context.

    Args:
        kind: which.
        cache: where exported programs are kept between runs.
        broker: of client processes, where one is that is there already; None starts an embedded one.
    """
    with _HOSTS[kind](cache, broker) as host:
        from subfleet.aggregation.devices import compute_device

        def run(described: Run, folder: Path, observer: RunObserver, stop: threading.Event) -> "Outcome":
            compute_device(described.device)  # which may not be there, and nothing is begun then
            with observe_run(described, folder, observer) as everyone:
                return host(described, folder, everyone, stop)

        yield run


@contextmanager
def _processes(cache: CacheFolder, broker: BrokerAddress | None) -> Iterator[Host]:
    from subfleet.export.pool import ExportPool

    with ExportPool(cache) as exports:  # it loads PyTorch while this process does
        from subfleet.emulation.processes import run_processes

        yield partial(run_processes, exports=exports, broker=broker)


@contextmanager
def _batch(cache: CacheFolder, broker: BrokerAddress | None) -> Iterator[Host]:
    from subfleet.emulation.batch.exports import LazyExports
    from subfleet.emulation.batch.host import run_in_batch

    with LazyExports(cache) as exports:
        yield partial(run_in_batch, exports=exports)


_Opening = Callable[[CacheFolder, BrokerAddress | None], AbstractContextManager[Host]]
_HOSTS: Mapping[HostKind, _Opening] = MappingProxyType({"processes": _processes, "batch": _batch})
