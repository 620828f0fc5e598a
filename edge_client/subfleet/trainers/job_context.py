"""The context of a job: its data, its loaded package and the watch on its memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from subfleet.protocol.errors import DataError, FileError, TrainingError
from subfleet.protocol.jobs import AnyJob
from subfleet.protocol.task import Evaluate
from subfleet.tasks import DataForm, Dataset
from subfleet.trainers.job_files import hash_program, read_program
from subfleet.trainers.kept import Host
from subfleet.trainers.layouts import StepLayout
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.memory_watch import GrowthWatch
from subfleet.trainers.program_layout import AnyLayout, read_layout
from subfleet.trainers.runtime import Runtime


def read_data(job: AnyJob, layout: AnyLayout, host: Host) -> Dataset:
    """Read the data set of a job in the form that its program takes, with the run's classes.

    Args:
        job: what to train, score or evaluate.
        layout: the layout of its program.
        host: the process that the job runs in.

    Raises:
        DataError: the data cannot be read or used, or do not fit the program or the run's classes.
    """
    form = DataForm(
        input_shape=layout.input.shape[1:],
        class_count=_count_classes(layout) if layout.label.dtype == "I64" else 0,
        classes=job.classes,
        label_shape=layout.label.shape[1:],
        targets=layout.label.dtype == "F32",
        transform=job.transform,
    )
    try:
        dataset = host.read(job.data, form)
    except FileError as error:  # tells errors of the program, which can be fetched again, from errors of the data
        raise DataError(str(error)) from error
    _check(dataset, layout, job.data)
    return dataset


def _check(dataset: Dataset, layout: AnyLayout, source: str) -> None:
    for kind, array, value in (("samples", dataset.inputs, layout.input), ("labels", dataset.labels, layout.label)):
        dtype = "F32" if array.dtype == np.float32 else "I64"
        if array.shape[1:] != value.shape[1:] or dtype != value.dtype:
            raise DataError(
                f"{kind} of {source!r} are {dtype} of shape {array.shape[1:]}, but the program takes {value.dtype} of "
                f"shape {value.shape[1:]}; use data of that kind"
            )
    if layout.input.limit and int(dataset.inputs.max()) >= layout.input.limit:
        raise DataError(
            f"samples of {source!r} go up to {int(dataset.inputs.max())}, but the program takes indices below "
            f"{layout.input.limit}; use data of the model's vocabulary"
        )


def _count_classes(layout: AnyLayout) -> int:
    named = layout.class_mask if isinstance(layout, StepLayout) else None
    return layout.label.limit if named is None else named.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The context of a job.

    Attributes:
        dataset: the job's data set, in the form that its program takes.
        loaded: its package, with the programs that the previous job left loaded.
        watch: measures the job's memory.
        host: the process that the job runs in.
        stopped: called between steps; True ends the job.
    """

    dataset: Dataset
    loaded: Loaded
    watch: GrowthWatch
    host: Host
    stopped: Callable[[], bool]

    def check_stopped(self, message: str) -> None:
        """Raise an error if the job is stopped.

        Raises:
            TrainingError: it is stopped.
        """
        if self.stopped():
            raise TrainingError(f"{message}; its task must be started again")


@contextmanager
def open_context(
    job: AnyJob, stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host
) -> Iterator[JobContext]:
    """Read a job's data, find its kept package, and release the job's memory at the end.

    The data set is read before measuring begins, since it is the same for any submodel. The program, the weights, the
    runtime's memory, the steps and the writing of results all count, as does a package kept from the previous job.

    Args:
        job: what to do.
        stopped: as in `JobContext`.
        target: the target that the program must be written for.
        runtime: the runtime.
        host: the process that it runs in; it may keep the package for the next job, except after an error.

    Raises:
        MemoryLimitError: the process grew beyond the job's limit.
        DataError: the data do not fit the program.
        ProtocolError: the program is not for such a job or this target.
        FileError: the program cannot be read.
    """
    sha256 = hash_program(job.program_path)
    layout = host.find_layout(sha256, job.threads)
    if layout is None:
        manifest = read_program(job.program_path, target).manifest
        layout = read_layout(manifest, evaluates=isinstance(job.work, Evaluate))
    dataset = read_data(job, layout.values, host)
    package = host.take(sha256, job.threads)
    before_bytes = 0 if package is None else package.loaded.planned_bytes
    watch = host.watch(job.memory_limit_bytes, held_bytes=0 if package is None else package.held_bytes)
    try:
        if package is None:
            programs = runtime.programs(job.threads)
            loaded = Loaded(sha256=sha256, target=target, threads=job.threads, layout=layout, programs=programs)
        else:
            loaded = package.loaded
        watch.check()
        yield JobContext(dataset=dataset, loaded=loaded, watch=watch, host=host, stopped=stopped)
        watch.check()
        host.release()
        # A package's memory is measured once, in the job that loaded it. Measured in each job, it would grow each time
        # by what a job adds to the process and returns after it (its thread's stack).
        grown_bytes = loaded.planned_bytes - before_bytes
        held_bytes = watch.measure_held_bytes() if package is None else max(package.held_bytes + grown_bytes, 0)
        host.keep(loaded, held_bytes=held_bytes, limit_bytes=job.memory_limit_bytes)
    finally:
        host.release()
