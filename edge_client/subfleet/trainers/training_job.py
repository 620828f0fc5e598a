"""Trains along drawn paths of a package's programs, one batch at a time, on any runtime."""

from collections.abc import Callable, Sequence

import numpy as np

from subfleet.arrays import compute_change
from subfleet.protocol.chains import Link
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.paths import OperatorExamples, PathSettings
from subfleet.protocol.task import Train
from subfleet.tasks import StepOrigin, path_random
from subfleet.tasks.path_drawing import PathDrawer, PathPlace
from subfleet.trainers.feeding import Tally, check_settings, compute_constants, make_calls
from subfleet.trainers.job_context import JobContext, open_context
from subfleet.trainers.job_files import read_weights, write_change
from subfleet.trainers.kept import Host
from subfleet.trainers.program_layout import Path, list_stages
from subfleet.trainers.program_session import ProgramSession
from subfleet.trainers.runtime import Runtime


class DrawnPaths:
    """Draws paths that fit in memory, and counts the examples that pass each operator.

    Args:
        subspace: the subspace's links with all operators; examples are counted for these.
        drawable: the same links with only the operators that may be drawn.
        settings: how paths are drawn; None for a plain program, which has one path.
        left_bytes: bytes that the operators of a path may keep together.

    Raises:
        ProtocolError: every path that fits takes more multiplications than the settings allow.
    """

    def __init__(
        self, subspace: Sequence[Link], drawable: Sequence[Link], settings: PathSettings | None, left_bytes: int
    ) -> None:
        self._links = tuple(drawable)
        self._stages = {(stage.link, stage.operator.name): stage for stage in list_stages(drawable)}
        self._counts = {link.name: {operator.name: 0 for operator in link.operators} for link in subspace if link.open}
        self._make_draws = None if settings is None else _make_draws(drawable, settings, left_bytes)

    def draw(self, origin: StepOrigin) -> Path:
        """Draw the path of a batch."""
        if self._make_draws is None:
            return tuple(self._stages.values())
        operators = self._make_draws.draw(path_random(origin))
        return tuple(self._stages[link.name, name] for link, name in zip(self._links, operators, strict=True))

    def count(self, path: Path, examples: int) -> None:
        """Add the real samples of a batch, or of a part of one."""
        for stage in path:
            if stage.link in self._counts:
                self._counts[stage.link][stage.operator.name] += examples

    @property
    def examples(self) -> OperatorExamples:
        """Examples per operator of the subspace, in the order of its links."""
        return tuple((choice, tuple(counts.items())) for choice, counts in self._counts.items())


def _make_draws(drawable: Sequence[Link], settings: PathSettings, left_bytes: int) -> PathDrawer:
    stages = [
        PathPlace(
            name=link.name,
            operators=tuple(operator.name for operator in link.operators),
            costs=tuple((operator.forward_macs, operator.kept_bytes) for operator in link.operators),
        )
        for link in drawable
    ]
    try:
        return PathDrawer(stages, (settings.forward_macs, left_bytes), settings.sampler)
    except ConfigError as error:
        least_macs = sum(min(operator.forward_macs for operator in link.operators) for link in drawable)
        raise ProtocolError(
            f"a path may take {settings.forward_macs} multiplications and keep {left_bytes} bytes, but the task's "
            f"subspace has no such path: the cheapest takes {least_macs} multiplications; allow more"
        ) from error


def train_job(
    job: Job[Train], stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host
) -> TrainResult:
    """Train one job and write the change of its weights and buffers; its memory is released.

    If a path is drawn for each batch, operators that exceed the memory limit or that the runtime refuses are never
    drawn: their weights do not change. See `open_context` for what counts as memory.

    Args:
        job: what to train, and how paths are drawn.
        stopped: called between steps; True ends the job.
        target: the target that the program must be written for.
        runtime: the runtime.
        host: the process that trains.

    Raises:
        MemoryLimitError: not even the smallest path fits, or the process grew beyond the limit.
        MemoryError: the system refused memory within the limit.
        LoadError: the runtime refuses the program, or all operators of a link.
        TrainingError: a program failed, was stopped, or returned values that are not finite.
        DataError: the data do not fit the program.
        ProtocolError: program, subspace, weights and settings do not fit each other, or no path is within the
            multiplications that the settings allow.
        FileError: a file of the job cannot be read or written.
    """
    with open_context(job, stopped, target=target, runtime=runtime, host=host) as context:
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
    weights = read_weights(job.tensor_paths, values)
    constants = compute_constants(work.settings, layout, context.dataset, weights)
    session = ProgramSession(loaded, links, weights, constants)
    # Nobody measures the memory of one of several devices in a process.
    received = weights if host.shared else None
    del weights, constants
    # Memory that loading left behind would add to the steps' peak.
    host.release()
    tally = _run_steps(job, context, session, paths)
    trained = session.finish()
    # Release the memory of the steps before the old weights are loaded beside the new ones.
    host.release()
    # A device reads the old weights again instead of keeping them, which saves their memory during the steps.
    received = received or read_weights(job.tensor_paths, values)
    changed = compute_change(trained, {name: received[name] for name in trained}, in_place=True)
    write_change(job, changed, exact=layout.buffers)
    return tally, paths.examples


def _run_steps(job: Job[Train], context: JobContext, session: ProgramSession, paths: DrawnPaths) -> Tally:
    layout = context.loaded.layout.for_training
    tally, started_s = Tally(whole=job.work.settings.local_steps > 0), context.host.now_s()
    max_gradient_norm = job.work.settings.optimiser.max_gradient_norm
    path: Path = ()
    for call in make_calls(job, layout, context.dataset):
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
