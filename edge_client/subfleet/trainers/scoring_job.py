"""Scores a candidate by the gradients of a few batches, with training programs."""

from collections.abc import Callable, Mapping

from subfleet.arrays.zico import zico
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Score
from subfleet.trainers.feeding import check_settings, compute_constants, make_scoring_batches
from subfleet.trainers.job_context import open_context
from subfleet.trainers.job_files import read_weights
from subfleet.trainers.kept import Host
from subfleet.trainers.program_layout import list_stages
from subfleet.trainers.program_session import ProgramSession
from subfleet.trainers.runtime import Array, Runtime

_LAYER_DIMENSIONS = 2
"""The least number of dimensions of a layer's weight; biases and norms have fewer."""


def score_job(job: Job[Score], stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host) -> float:
    """Compute the ZiCo score of a candidate on a device's data; see `subfleet.arrays.zico`.

    Every batch starts from the given weights and buffers and from gradients of zero, and the optimiser takes no step,
    so the sum at the end of a batch is the gradient of its mean loss.

    Args:
        job: what to score.
        stopped: called between steps; True ends the job.
        target: the target that the program must be written for.
        runtime: the runtime.
        host: the process that the job runs in.

    Raises:
        MemoryLimitError: the process grew beyond the limit, or the program alone takes more.
        MemoryError: the system refused memory within the limit.
        LoadError: the runtime refuses the program.
        TrainingError: the program failed, or was stopped.
        DataError: the data do not fit the program, are too few, or a gradient is not finite.
        ProtocolError: program, weights and settings do not fit each other.
        FileError: a file of the job cannot be read.
    """
    gradients: list[Mapping[str, Array]] = []
    with open_context(job, stopped, target=target, runtime=runtime, host=host) as context:
        loaded, dataset = context.loaded, context.dataset
        layout, links = loaded.layout.for_training, loaded.layout.chain.links
        loaded.layout.check_paths(named=False)
        loaded.load_within(links, job, drops=False)
        check_settings(job.work.settings, layout)
        path = tuple(list_stages(links))
        for parts in make_scoring_batches(job, layout, dataset):
            weights = read_weights(job.tensor_paths, layout.weights)
            session = ProgramSession(
                loaded, links, weights, compute_constants(job.work.settings, layout, dataset, weights)
            )
            del weights
            for fed in parts:
                context.check_stopped("scoring was stopped")
                session.step(path, fed)
                context.watch.check()
            gradient = session.gradients()
            del session
            gradients.append({name: array for name, array in gradient.items() if array.ndim >= _LAYER_DIMENSIONS})
            del gradient
        return zico(gradients)
