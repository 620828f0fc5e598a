"""Runs an emulated fleet on the host that its run names."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet.emulation.outcome import Outcome
from subfleet.export.cache import CacheFolder
from subfleet.journal.records import RunObserver
from subfleet.observers import observed
from subfleet.settings.host import HostKind
from subfleet.settings.run import Run
from subfleet.transport.address import BrokerAddress

__all__ = ["Hosting", "run_on_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """What a host works with beside the run.

    Attributes:
        cache: where exported programs are kept between runs.
        observer: is told what happens, before those that the run names.
        stop: set it to end the run early.
        broker: of client processes, where one is that is there already; None starts an embedded one.
    """

    cache: CacheFolder
    observer: RunObserver
    stop: threading.Event
    broker: BrokerAddress | None = None


def run_on_host(run: Run, folder: Path, hosting: Hosting) -> Outcome:
    """Run to the end, in the run's folder.

    Raises:
        RunError: the run failed, or was stopped before its end.
        SubfleetError: what the run says of data, devices and observers cannot be had.
    """
    with observed(run, folder, hosting.observer) as observer:
        return _HOSTS[run.host.type](run, folder, hosting, observer)


def _processes(run: Run, folder: Path, hosting: Hosting, observer: RunObserver) -> Outcome:
    from subfleet.export.pool import ExportPool

    with ExportPool(hosting.cache) as exports:  # it loads PyTorch while this process does
        from subfleet.emulation.processes import run_processes

        return run_processes(run, folder, observer=observer, stop=hosting.stop, exports=exports, broker=hosting.broker)


def _batch(run: Run, folder: Path, hosting: Hosting, observer: RunObserver) -> Outcome:
    from subfleet.emulation.batch.exports import SettledExports
    from subfleet.emulation.batch.host import run_in_batch

    with SettledExports(hosting.cache) as exports:
        return run_in_batch(run, folder, observer=observer, stop=hosting.stop, exports=exports)


_HOSTS: Mapping[HostKind, Callable[[Run, Path, Hosting, RunObserver], Outcome]] = MappingProxyType(
    {"processes": _processes, "batch": _batch}
)
