"""What every job works with: its data, its loaded package and the watch over its memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from subfleet.protocol.errors import TrainingError
from subfleet.protocol.jobs import AnyJob
from subfleet.protocol.task import Evaluate
from subfleet.tasks import Dataset
from subfleet.trainers.job_data import read_data
from subfleet.trainers.job_files import file_sha256, read_program
from subfleet.trainers.kept import Host
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.memory import Watch
from subfleet.trainers.program_layout import read_layout
from subfleet.trainers.runtime import Runtime

__all__ = ["JobContext", "job_context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What a job works with.

    Attributes:
        dataset: of the job, in the form that its program takes.
        loaded: its package, with the programs that the job before left loaded.
        watch: measures the job's memory.
        host: the process that the job runs in.
        stopped: whether the job is to end now; asked between steps.
    """

    dataset: Dataset
    loaded: Loaded
    watch: Watch
    host: Host
    stopped: Callable[[], bool]

    def check_stopped(self, what: str) -> None:
        """End a job that is stopped, between two steps.

        Raises:
            TrainingError: it is stopped.
        """
        if self.stopped():
            raise TrainingError(f"{what}; its task must be taken up anew")


@contextmanager
def job_context(
    job: AnyJob, stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host
) -> Iterator[JobContext]:
    """Read a job's data, find its package where it was kept, and give back the job's memory at the end.

    The data set is read before measuring begins, since it is there whatever submodel is trained; the program, the
    weights, the runtime's memory, the steps and the writing of results all count. So does a package that is kept from
    the job before.

    Args:
        job: what to do.
        stopped: as in `JobContext`.
        target: what the program must be written for.
        runtime: that runs it.
        host: the process that it runs in, where the package may be kept for the next job. After an error it is not.

    Raises:
        MemoryLimitError: the process grew beyond the job's limit.
        DataError: the data do not fit the program.
        ProtocolError: the program is no program for such a job and this target.
        FileError: it cannot be read.
    """
    manifest = read_program(job.program_path, target).manifest
    layout = read_layout(manifest, evaluates=isinstance(job.work, Evaluate))
    dataset = read_data(job, layout.values)
    sha256 = file_sha256(job.program_path)
    kept = host.take(sha256, job.threads)
    before_bytes = 0 if kept is None else kept.loaded.planned_bytes
    watch = host.watch(job.memory_limit_bytes, held_bytes=0 if kept is None else kept.held_bytes)
    try:
        if kept is None:
            programs = runtime.programs(job.threads)
            loaded = Loaded(sha256=sha256, target=target, threads=job.threads, layout=layout, programs=programs)
        else:
            loaded = kept.loaded
        watch.check()
        yield JobContext(dataset=dataset, loaded=loaded, watch=watch, host=host, stopped=stopped)
        watch.check()
        host.release()
        # What a package holds is counted once, in the job that loaded it. Counted anew in each, all that a job adds to
        # the process and gives back after it (its thread's stack) would be added to it again and again.
        grown_bytes = loaded.planned_bytes - before_bytes
        held_bytes = watch.held_bytes() if kept is None else max(kept.held_bytes + grown_bytes, 0)
        host.keep(loaded, held_bytes=held_bytes, limit_bytes=job.memory_limit_bytes)
    finally:
        host.release()
