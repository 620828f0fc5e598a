"""Trains along paths of a package's programs, one batch at a time, whatever the runtime; NumPy at the rim."""

from collections.abc import Callable

import numpy as np

from subfleet.arrays import change
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.task import Train
from subfleet.trainers.drawn_paths import DrawnPaths
from subfleet.trainers.feeding import calls_of, check_settings, constant_values
from subfleet.trainers.job_context import JobContext, job_context
from subfleet.trainers.job_files import read_weights, write_change
from subfleet.trainers.kept import Host
from subfleet.trainers.program_layout import Path
from subfleet.trainers.runtime import Runtime
from subfleet.trainers.session import Session
from subfleet.trainers.tally import Tally

__all__ = ["train_job"]


def train_job(
    job: Job[Train], stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host
) -> TrainResult:
    """Train one job and write the change of its weights and buffers; the memory that it took is given back.

    Where a path is drawn for each batch, an operator without room within the memory limit, or that the runtime refuses,
    is never drawn: its weights stay as they are. See `job_context` for what counts as memory.

    Args:
        job: what to train, and how paths are drawn.
        stopped: asked between steps.
        target: what the program must be written for.
        runtime: that runs it.
        host: the process that trains.

    Raises:
        MemoryLimitError: not even the leanest path has room, or the process grew beyond the limit.
        MemoryError: the system refused memory below the limit.
        LoadError: the runtime refuses the program, or all operators of a link.
        TrainingError: a program failed, was stopped, or ended in values that are not finite.
        DataError: the data do not fit the program.
        ProtocolError: program, subspace, weights and settings do not fit each other, or no path is within the
            multiplications that the settings allow.
        FileError: a file of the job cannot be read or written.
    """
    with job_context(job, stopped, target=target, runtime=runtime, host=host) as context:
        tally, examples = _train(job, context)
    return tally.result(
        sample_count=job.work.settings.round_count(len(context.dataset)),
        measured_peak_bytes=context.watch.growth_bytes(),
        operator_examples=examples,
    )


def _train(job: Job[Train], context: JobContext) -> tuple[Tally, OperatorExamples]:
    work = job.work
    loaded, host = context.loaded, context.host
    layout = loaded.layout.for_training
    loaded.layout.check_paths(named=work.paths is not None)
    check_settings(work.settings, layout)
    links = loaded.layout.links(dict(job.choices))
    drawable, left_bytes = loaded.load_within(links, job, drops=not host.shared)
    paths = DrawnPaths(links, drawable, work.paths, left_bytes)
    values = loaded.layout.weights(links)
    weights = read_weights(job.weights_path, values)
    constants = constant_values(work.settings, layout, context.dataset, weights)
    session = Session(loaded, links, weights, constants)
    del weights, constants
    # What loading left behind would stay beneath the steps' peak.
    host.release()
    tally = _run_steps(job, context, session, paths)
    trained = session.finish()
    # What only the steps needed, before the old weights come beside the new ones.
    host.release()
    # The old weights are read again, not kept: while the steps ran, their memory was free.
    received = read_weights(job.weights_path, values)
    changed = change(trained, {name: received[name] for name in trained}, in_place=True)
    write_change(job, changed, exact=layout.buffers)
    return tally, paths.examples


def _run_steps(job: Job[Train], context: JobContext, session: Session, paths: DrawnPaths) -> Tally:
    layout = context.loaded.layout.for_training
    tally, started_s = Tally(whole=job.work.settings.local_steps > 0), context.host.now_s()
    max_gradient_norm = job.work.settings.optimiser.max_gradient_norm
    path: Path = ()
    for call in calls_of(job, layout, context.dataset):
        context.check_stopped(f"training was stopped after {tally.step_count} steps")
        path = path or paths.draw(call.origin)
        read = session.step(
            path, call.fed, updates=call.ends_batch, last=call.last, max_gradient_norm=max_gradient_norm
        )
        tally.take(call, read, layout)
        paths.count(path, int(np.count_nonzero(call.fed[layout.sample_mask.name])))
        path = () if call.ends_batch else path
        del call  # before the next one is made
        context.watch.check()
    tally.end(context.host.now_s() - started_s)
    return tally
