"""Scores a candidate by the gradients of a few batches, with the same programs and runtimes that train."""

from collections.abc import Callable, Mapping

from subfleet.arrays.zico import zico
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Score
from subfleet.trainers.feeding import batches_to_score, check_settings, constant_values
from subfleet.trainers.job_context import job_context
from subfleet.trainers.job_files import read_weights
from subfleet.trainers.kept import Host
from subfleet.trainers.program_layout import places_of
from subfleet.trainers.runtime import Array, Runtime
from subfleet.trainers.session import Session

__all__ = ["score_job"]

_LAYER_DIMENSIONS = 2
"""Of a layer's weight, or more; biases and norms have fewer."""


def score_job(job: Job[Score], stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host) -> float:
    """The ZiCo score of a candidate on a device's own data; see `subfleet.arrays.zico`. Nothing is trained.

    Every batch starts from the given weights, buffers and gradients of zero, and no part of it lets the optimiser take
    a step: what the program has summed at the end of a batch is the gradient of its mean loss.

    Args:
        job: what to score.
        stopped: asked between steps.
        target: what the program must be written for.
        runtime: that runs it.
        host: the process that it runs in.

    Raises:
        MemoryLimitError: the process grew beyond the limit, or what the program takes alone is beyond it.
        MemoryError: the system refused memory below the limit.
        LoadError: the runtime refuses the program.
        TrainingError: the program failed, or was stopped.
        DataError: the data do not fit the program, are too few, or a gradient is not finite.
        ProtocolError: program, weights and settings do not fit each other.
        FileError: a file of the job cannot be read.
    """
    gradients: list[Mapping[str, Array]] = []
    with job_context(job, stopped, target=target, runtime=runtime, host=host) as context:
        loaded, dataset = context.loaded, context.dataset
        layout, links = loaded.layout.for_training, loaded.layout.chain.links
        loaded.layout.check_paths(named=False)
        loaded.load_within(links, job, drops=False)
        check_settings(job.work.settings, layout)
        path = tuple(places_of(links))
        for parts in batches_to_score(job, layout, dataset):
            weights = read_weights(job.weights_path, layout.weights)
            session = Session(loaded, links, weights, constant_values(job.work.settings, layout, dataset, weights))
            del weights
            for fed in parts:
                context.check_stopped("scoring was stopped")
                session.step(path, fed)
                context.watch.check()
            found = session.gradients()
            del session
            gradients.append({name: array for name, array in found.items() if array.ndim >= _LAYER_DIMENSIONS})
            del found
        return zico(gradients)
