"""What computes in a batch: the runtimes of its clients, here or in worker processes, or PyTorch for many at once."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet.aggregation.devices import compute_device
from subfleet.emulation.batch.grouped import GroupedWork, Groups
from subfleet.emulation.batch.grouped_steps import RequestLog
from subfleet.emulation.batch.trainers import SharedHost, create_trainers
from subfleet.emulation.batch.work import ClientMeans, ClientWork, WorkHere, write_samples
from subfleet.emulation.batch.workers import Pool, WorkElsewhere, WorkerPool
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.programs.supply import Exports
from subfleet.protocol.jobs import Trainer
from subfleet.settings.fleet import HostSettings
from subfleet.tasks import Dataset
from subfleet.transport.blob_store import BlobStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """What computes in a batch.

    Attributes:
        folder: for the files of clients.
        own: by client id, trainers of its own.
        samples: of clients that have had a task, by the names that their jobs have for them; the shared trainers read
            them.
        shared: by target, the trainers of all others.
        pool: does the tasks of the others; None for this process.
        groups: trains the others, but attackers; None for the runtimes.
        exports: the exporter, for the server.
        stopped: whether the run is to end, asked between steps.
    """

    folder: Path
    own: Mapping[str, Trainer]
    samples: dict[str, Dataset]
    shared: Mapping[str, Trainer]
    pool: Pool | None
    groups: Groups | None
    exports: Exports
    stopped: Callable[[], bool]

    def create_work(self, client: EmulatedDevice, blobs: BlobStore) -> ClientWork:
        """Create what does a client's tasks, with programs and weights in a store."""
        means, trainer = ClientMeans.of(client, self.folder), self.own.get(client.client_id)
        if self.pool is not None and trainer is None:
            return WorkElsewhere(pool=self.pool, means=means, samples=means.name_samples(client), blobs=blobs)
        if trainer is not None or client.attack is not None:  # only shared trainers hold them, and poison needs a file
            write_samples(means.name_samples(client))
        self.samples.update({str(path): held for path, held in means.name_samples(client).items()})
        here = WorkHere(work=means.open(trainer or self.shared[client.runtime], blobs.path), stopped=self.stopped)
        if self.groups is None or trainer is not None or client.attack is not None:
            return here
        return GroupedWork(here=here, groups=self.groups)


@contextmanager
def open_computing(
    gathered: GatheredRun, exports: Exports, folder: Path, own: Mapping[str, Trainer], stopped: Callable[[], bool]
) -> Iterator[Computing]:
    """A context with what computes in a run; see `Computing`.

    Raises:
        ConfigError: there is no trainer for a target, or the device or the cluster that computes is missing.
        MissingExtraError: Ray is to compute, and not installed.
    """
    run = gathered.run
    samples: dict[str, Dataset] = {}
    host = SharedHost(data=MappingProxyType(samples))
    shared = create_trainers({client.runtime for client in gathered.devices}, host)
    groups = None
    if run.host.numerics == "grouped":
        exports = log = RequestLog(exports=exports)
        groups = Groups(log.trainings, host, compute_device(run.device), stopped)
    with ExitStack() as stack:
        pool = _open_pool(run.host, stack)
        yield Computing(
            folder=folder,
            own=own,
            samples=samples,
            shared=shared,
            pool=pool,
            groups=groups,
            exports=exports,
            stopped=stopped,
        )


def _open_pool(host: HostSettings, stack: ExitStack) -> Pool | None:
    if host.ray:
        from subfleet.emulation.batch.ray_workers import RayPool

        return stack.enter_context(RayPool(host.ray))
    return stack.enter_context(WorkerPool(host.workers)) if host.workers > 1 else None
