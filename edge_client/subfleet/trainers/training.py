"""Trains along paths of a package's programs, one batch at a time, whatever the runtime; NumPy at the rim."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from subfleet.arrays import change
from subfleet.protocol.programs import TrainJob, TrainResult
from subfleet.trainers.calibrating import calibrate
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


def train_job(job: TrainJob, stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host) -> TrainResult:
    """Train one job and write the change of its weights and buffers; the memory that it took is given back.

    A job with a calibration trains nothing, and writes what its norms were given (`subfleet.trainers.calibrating`).
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
        trained = _train(job, context) if job.calibration is None else _Trained(tally=calibrate(job, context))
    tally, count = trained.tally, len(context.dataset)
    return TrainResult(
        sample_count=count if job.calibration is not None else job.settings.round_count(count),
        step_count=tally.step_count,
        loss=tally.loss_sum / tally.count_sum,
        accuracy=tally.correct_sum / tally.count_sum,
        measured_peak_bytes=context.watch.growth_bytes(),
        train_seconds=tally.train_seconds,
        square_loss=None if tally.square_sum is None else tally.square_sum / tally.count_sum,
        operator_examples=() if trained.paths is None else trained.paths.examples,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    tally: Tally
    paths: DrawnPaths | None = None


def _train(job: TrainJob, context: JobContext) -> _Trained:
    loaded, host = context.loaded, context.host
    layout = loaded.layout.for_training
    loaded.layout.check_paths(named=job.paths is not None)
    check_settings(job.settings, layout)
    links = loaded.layout.links(dict(job.choices))
    drawable, left_bytes = loaded.load_within(links, job, drops=not host.shared)
    paths = DrawnPaths(links, drawable, job.paths, left_bytes)
    values = loaded.layout.weights(links)
    weights = read_weights(job.weights_path, values)
    constants = constant_values(job.settings, layout, context.dataset, weights)
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
    return _Trained(tally=tally, paths=paths)


def _run_steps(job: TrainJob, context: JobContext, session: Session, paths: DrawnPaths) -> Tally:
    layout = context.loaded.layout.for_training
    tally, started_s = Tally(whole=job.settings.local_steps > 0), context.host.now_s()
    max_gradient_norm = job.settings.optimiser.max_gradient_norm
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
