"""The training loop that every runtime shares: one manifest, one step at a time, NumPy at the rim."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from subfleet.arrays import change, numpy_dtype
from subfleet.protocol.errors import LoadError, MemoryLimitError, TrainingError
from subfleet.protocol.programs import TrainJob, TrainResult
from subfleet.tasks import Dataset
from subfleet.trainers.calibrating import calibrate
from subfleet.trainers.feeding import calls_of, check_settings, constant_values
from subfleet.trainers.job_data import read_data
from subfleet.trainers.job_files import file_sha256, read_program, read_weights, write_change
from subfleet.trainers.kept import Host, LoadedSession, Slot, held
from subfleet.trainers.layouts import AnyJob, layout_for
from subfleet.trainers.memory import Watch
from subfleet.trainers.sessions import Array, LoadProgram, OpenSession, RunProgram, hosted
from subfleet.trainers.tally import Tally

__all__ = ["LoadProgram", "RunProgram", "loaded_session", "run_training", "train_job"]


def run_training(
    job: TrainJob, stopped: Callable[[], bool], *, target: str, load: LoadProgram, slot: Host | None = None
) -> TrainResult:
    """Train one job with a runtime that runs programs from arrays to arrays; see `train_job`."""
    return train_job(job, stopped, target=target, open_session=hosted(load), slot=slot or Slot())


def train_job(
    job: TrainJob, stopped: Callable[[], bool], *, target: str, open_session: OpenSession, slot: Host
) -> TrainResult:
    """Train one job and write the change of its weights and buffers; the memory that it took is given back.

    A job with a calibration trains nothing, and writes what its norms were given (`subfleet.trainers.calibrating`).

    The data set is read before measuring begins, since it is there whatever subnet is trained; the program, the
    weights, the runtime's session, the steps and the writing of the change all count. So does a session that is kept
    from the job before.

    Args:
        job: what to train.
        stopped: asked between steps.
        target: what the program must be written for.
        open_session: loads a program.
        slot: the process that trains, where the session may be kept for the next job of the same program. After an
            error that session is not in it.

    Raises:
        MemoryLimitError: the process grew beyond the limit, or what the program takes alone is beyond it.
        MemoryError: the system refused memory below the limit.
        LoadError: the runtime refuses the program.
        TrainingError: the program failed, was stopped, or ended in values that are not finite.
        DataError: the data do not fit the program.
        ProtocolError: program, weights and settings do not fit each other.
        FileError: a file of the job cannot be read or written.
    """
    dataset = read_data(job, target)
    with loaded_session(job, target=target, open_session=open_session, slot=slot) as (loaded, watch):
        work = _train if job.calibration is None else calibrate
        tally = work(job, stopped, dataset, loaded, slot, watch)
    return TrainResult(
        sample_count=len(dataset) if job.calibration is not None else job.settings.round_count(len(dataset)),
        step_count=tally.step_count,
        loss=tally.loss_sum / tally.count_sum,
        accuracy=tally.correct_sum / tally.count_sum,
        measured_peak_bytes=watch.growth_bytes(),
        train_seconds=tally.train_seconds,
        square_loss=None if tally.square_sum is None else tally.square_sum / tally.count_sum,
    )


@contextmanager
def loaded_session(
    job: AnyJob, *, target: str, open_session: OpenSession, slot: Host
) -> Iterator[tuple[LoadedSession, Watch]]:
    """A job's program, loaded or kept from the job before, and the watch over the memory of what is done with it.

    Raises:
        MemoryLimitError: the process grew beyond the limit, or what the program takes alone is beyond it.
        LoadError: the runtime refuses the program.
        ProtocolError: it is no program for such a job and this target.
        FileError: it cannot be read.
    """
    sha256 = file_sha256(job.program_path)

    def load() -> LoadedSession:
        return _load(job, sha256, target, open_session)

    limit_bytes = job.memory_limit_bytes
    with held(slot, sha256, threads=job.threads, limit_bytes=limit_bytes, kind=LoadedSession, load=load) as found:
        _check_least(job, found[0].least_bytes)
        yield found


def _load(job: AnyJob, sha256: str, target: str, open_session: OpenSession) -> LoadedSession:
    program = read_program(job.program_path, target)
    layout = layout_for(job, program.manifest)
    least_bytes = sum(math.prod(value.shape) * numpy_dtype(value.dtype).itemsize for value in program.manifest.inputs)
    _check_least(job, least_bytes)
    try:
        session = open_session(program, layout, job.threads)
    except TrainingError as error:
        raise LoadError(str(error)) from error
    return LoadedSession(sha256=sha256, threads=job.threads, layout=layout, session=session, least_bytes=least_bytes)


def _check_least(job: AnyJob, least_bytes: int) -> None:
    # Nothing is allocated on the word of a received manifest alone.
    if least_bytes > job.memory_limit_bytes:
        raise MemoryLimitError(needed_bytes=least_bytes, limit_bytes=job.memory_limit_bytes)


def _train(
    job: TrainJob, stopped: Callable[[], bool], dataset: Dataset, loaded: LoadedSession, slot: Host, watch: Watch
) -> Tally:
    layout = loaded.for_training
    check_settings(job.settings, layout)
    weights = read_weights(job.weights_path, layout.weights)
    constants = constant_values(job.settings, layout, dataset, weights)
    loaded.session.begin({value.name: weights[value.tensor] for value in layout.stored}, constants)
    del weights, constants
    # What loading left behind would stay beneath the steps' peak.
    slot.release()
    tally = _run_steps(job, stopped, dataset, loaded, slot, watch)
    trained: dict[str, Array] = {}
    finished = loaded.session.finish()
    for value in layout.stored:
        trained[value.tensor] = finished[value.name]
    del finished
    # What only the steps needed, before the old weights come beside the new ones.
    slot.release()
    # The old weights are read again, not kept: while the steps ran, their memory was free.
    received = read_weights(job.weights_path, layout.weights)
    changed = change(trained, {name: received[name] for name in trained}, in_place=True)
    write_change(job, changed, exact=layout.buffers)
    return tally


def _run_steps(
    job: TrainJob, stopped: Callable[[], bool], dataset: Dataset, loaded: LoadedSession, slot: Host, watch: Watch
) -> Tally:
    layout = loaded.for_training
    tally, started_s = Tally(whole=job.settings.local_steps > 0), slot.now_s()
    for call in calls_of(job, layout, dataset):
        if stopped():
            raise TrainingError(f"training was stopped after {tally.step_count} steps; its task must be taken up anew")
        tally.take(call, loaded.session.step(call.fed, last=call.last), layout)
        del call  # before the next one is made
        watch.check()
    tally.end(slot.now_s() - started_s)
    return tally
