"""The context of a job: its data, its loaded package and the watch over its memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from subfleet.protocol.errors import DataError, FileError, TrainingError
from subfleet.protocol.jobs import AnyJob
from subfleet.protocol.task import Evaluate
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.trainers.job_files import hash_program, read_program
from subfleet.trainers.kept import Host
from subfleet.trainers.layouts import StepLayout
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.memory_watch import GrowthWatch
from subfleet.trainers.program_layout import AnyLayout, read_layout
from subfleet.trainers.runtime import Runtime


def read_data(job: AnyJob, layout: AnyLayout) -> Dataset:
    """Read the data set of a job in the form that its program takes, with the run's classes.

    Args:
        job: what to train, to score or to evaluate.
        layout: of its program.

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
        dataset = read_dataset(job.data, form)
    except FileError as error:  # which says of the program, that can be had anew, where it is one of it
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
        dataset: of the job, in the form that its program takes.
        loaded: its package, with the programs that the job before left loaded.
        watch: measures the job's memory.
        host: the process that the job runs in.
        stopped: whether the job is to end now; asked between steps.
    """

    dataset: Dataset
    loaded: Loaded
    watch: GrowthWatch
    host: Host
    stopped: Callable[[], bool]

    def check_stopped(self, what: str) -> None:
        """Raise an error if the job is stopped.

        Raises:
            TrainingError: it is stopped.
        """
        if self.stopped():
            raise TrainingError(f"{what}; its task must be taken up anew")


@contextmanager
def open_context(
    job: AnyJob, stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host
) -> Iterator[JobContext]:
    """Read a job's data, find its kept package, and release the job's memory at the end.

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
    sha256 = hash_program(job.program_path)
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
        # What a package holds is counted once, in the job that loaded it. Counted anew in each, all that a job adds to
        # the process and gives back after it (its thread's stack) would be added to it again and again.
        grown_bytes = loaded.planned_bytes - before_bytes
        held_bytes = watch.measure_held_bytes() if package is None else max(package.held_bytes + grown_bytes, 0)
        host.keep(loaded, held_bytes=held_bytes, limit_bytes=job.memory_limit_bytes)
    finally:
        host.release()
