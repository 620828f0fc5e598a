"""Trains a subspace by a chain: for each batch along a path that the device draws (FedorAS, section 3.1)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from subfleet.arrays import change
from subfleet.protocol.chains import Link
from subfleet.protocol.errors import MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.programs import EvaluateJob, Role, TrainJob, TrainResult
from subfleet.tasks import Dataset
from subfleet.trainers.chain_layout import chain_layout, places_of
from subfleet.trainers.chain_paths import DrawnPaths
from subfleet.trainers.chain_programs import LoadedChain, OpenPieces
from subfleet.trainers.chain_session import ChainSession, Path
from subfleet.trainers.feeding import Call, calls_of, check_settings
from subfleet.trainers.job_data import read_data
from subfleet.trainers.job_files import file_sha256, read_program, read_weights, write_change
from subfleet.trainers.kept import Host, held
from subfleet.trainers.memory import Watch
from subfleet.trainers.sessions import Array
from subfleet.trainers.step_layout import StepLayout
from subfleet.trainers.tally import Tally

__all__ = ["loaded_chain", "train_chain"]


def train_chain(
    job: TrainJob, stopped: Callable[[], bool], *, target: str, open_pieces: OpenPieces, slot: Host
) -> TrainResult:
    """Train one job along paths of its subspace, and write the change of all of the subspace's weights and buffers.

    An operator without room within the memory limit, or that the runtime refuses, is never drawn: its weights stay as
    they are. What counts as memory is what counts in `train_job`.

    Args:
        job: what to train; it names how paths are drawn.
        stopped: asked between steps.
        target: what the chain must be written for.
        open_pieces: the runtime of its programs.
        slot: the process that trains, where they may be kept for the next job of the same chain.

    Raises:
        MemoryLimitError: not even the leanest path has room, or the process grew beyond the limit.
        MemoryError: the system refused memory below the limit.
        LoadError: the runtime refuses all operators of a link.
        TrainingError: a program failed, was stopped, or ended in values that are not finite.
        DataError: the data do not fit the chain.
        ProtocolError: chain, subspace, weights and settings do not fit each other, or no path is within the
            multiplications that the settings allow.
        FileError: a file of the job cannot be read or written.
    """
    dataset = read_data(job, target)
    with loaded_chain(job, target=target, open_pieces=open_pieces, slot=slot) as (loaded, watch):
        layout = loaded.layout.for_training
        check_settings(job.settings, layout)
        links = loaded.layout.chain.kept(dict(job.choices))
        paths = _drawn_paths(job, loaded, links, target, drops=not slot.shared)
        stored = loaded.layout.weights(links)
        weights = read_weights(job.weights_path, stored)
        # Copies, so that the file's memory goes whichever operators are drawn.
        own = {name: np.array(array) for name, array in weights.items()}
        del weights
        session = ChainSession(loaded.layout, loaded.runs, places_of(links), own)
        del own
        slot.release()  # what loading left behind would stay beneath the steps' peak
        work = _Work(job=job, dataset=dataset, layout=layout, session=session, paths=paths)
        tally = _run_steps(work, stopped, slot, watch)
        trained = session.finish()
        loaded.runtime.rest()
        slot.release()  # what only the steps needed, before the old weights come beside the new ones
        changed = change(trained, read_weights(job.weights_path, stored), in_place=True)
        write_change(job, changed, exact=layout.buffers)
        del trained, changed
    return TrainResult(
        sample_count=job.settings.round_count(len(dataset)),
        step_count=tally.step_count,
        loss=tally.loss_sum / tally.count_sum,
        accuracy=tally.correct_sum / tally.count_sum,
        measured_peak_bytes=watch.growth_bytes(),
        train_seconds=tally.train_seconds,
        square_loss=None if tally.square_sum is None else tally.square_sum / tally.count_sum,
        operator_examples=paths.examples,
    )


@contextmanager
def loaded_chain(
    job: TrainJob | EvaluateJob, *, target: str, open_pieces: OpenPieces, slot: Host
) -> Iterator[tuple[LoadedChain, Watch]]:
    """A job's chain, with the programs that the job before left loaded, and the watch over memory; none is loaded yet.

    Raises:
        MemoryLimitError: the process grew beyond the limit.
        ProtocolError: the program is no chain for such a job and this target.
        FileError: it cannot be read.
    """
    sha256 = file_sha256(job.program_path)

    def load() -> LoadedChain:
        layout = chain_layout(read_program(job.program_path, target).manifest)
        return LoadedChain(sha256=sha256, threads=job.threads, layout=layout, runtime=open_pieces(job.threads))

    limit_bytes = job.memory_limit_bytes
    with held(slot, sha256, threads=job.threads, limit_bytes=limit_bytes, kind=LoadedChain, load=load) as found:
        yield found


def _drawn_paths(job: TrainJob, loaded: LoadedChain, links: Sequence[Link], target: str, *, drops: bool) -> DrawnPaths:
    """Draws of the paths that have room, whose programs are loaded."""
    if job.paths is None:
        raise ProtocolError("the task names no way to draw paths, but must for a chain")
    room = loaded.layout.chain.room(links)
    drawable, left_bytes = room.within(job.memory_limit_bytes)
    if not drawable:
        # Nothing is allocated on the word of a received manifest alone.
        raise MemoryLimitError(needed_bytes=room.least_peak_bytes, limit_bytes=job.memory_limit_bytes)
    drawable = loaded.hold(drawable, job.program_path, target, drops=drops)
    least_bytes = sum(min(one.kept_bytes for one in link.operators) for link in drawable)
    if least_bytes > left_bytes:
        needed_bytes = job.memory_limit_bytes + least_bytes - left_bytes
        raise MemoryLimitError(needed_bytes=needed_bytes, limit_bytes=job.memory_limit_bytes)
    return DrawnPaths(links, drawable, job.paths, left_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What the steps of a job go by."""

    job: TrainJob
    dataset: Dataset
    layout: StepLayout
    session: ChainSession
    paths: DrawnPaths


def _run_steps(work: _Work, stopped: Callable[[], bool], slot: Host, watch: Watch) -> Tally:
    job, layout, paths = work.job, work.layout, work.paths
    tally, started_s = Tally(whole=job.settings.local_steps > 0), slot.now_s()
    most_norm = job.settings.optimiser.max_gradient_norm
    path: Path = ()
    for call in calls_of(job, layout, work.dataset):
        if stopped():
            raise TrainingError(f"training was stopped after {tally.step_count} steps; its task must be taken up anew")
        path = path or paths.draw(call.origin)
        fed = _fed(job, call, layout)
        read = work.session.step(path, fed, updates=call.ends_batch, max_gradient_norm=most_norm)
        tally.take(call, read, layout)
        paths.count(path, int(np.count_nonzero(fed["sample_mask"])))
        path = () if call.ends_batch else path
        del call, fed  # before the next ones are made
        watch.check()
    tally.end(slot.now_s() - started_s)
    return tally


def _fed(job: TrainJob, call: Call, layout: StepLayout) -> Mapping[Role, Array]:
    """What programs are fed of a call, by its role: each role is one value's."""
    values = (layout.input, layout.label, layout.sample_mask, layout.batch_weight)
    fed: dict[Role, Array] = {value.role: call.fed[value.name] for value in values if value is not None}
    return {**fed, "learning_rate": np.array(job.settings.learning_rate, np.float32)}
