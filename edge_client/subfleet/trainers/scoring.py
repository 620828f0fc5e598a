"""Scores a candidate by the gradients of a few batches, with the same programs and runtimes that train."""

from collections.abc import Callable, Mapping

from subfleet.arrays.zico import zico
from subfleet.protocol.errors import TrainingError
from subfleet.protocol.programs import ScoreJob
from subfleet.trainers.feeding import batches_to_score, check_settings, constant_values
from subfleet.trainers.job_data import read_data
from subfleet.trainers.job_files import read_weights
from subfleet.trainers.kept import Host
from subfleet.trainers.sessions import Array, OpenSession
from subfleet.trainers.training import loaded_session

__all__ = ["score_job"]

_LAYER_DIMENSIONS = 2
"""Of a layer's weight, or more; biases and norms have fewer."""


def score_job(
    job: ScoreJob, stopped: Callable[[], bool], *, target: str, open_session: OpenSession, slot: Host
) -> float:
    """The ZiCo score of a candidate on a device's own data; see `subfleet.arrays.zico`. Nothing is trained.

    Every batch starts from the given weights, buffers and gradients of zero, and no part of it lets the optimiser take
    a step: what the program has summed at the end of a batch is the gradient of its mean loss.

    Args:
        job: what to score.
        stopped: asked between steps.
        target: what the program must be written for.
        open_session: loads a program.
        slot: the process that it runs in.

    Raises:
        MemoryLimitError: the process grew beyond the limit, or what the program takes alone is beyond it.
        MemoryError: the system refused memory below the limit.
        LoadError: the runtime refuses the program.
        TrainingError: the program failed, or was stopped.
        DataError: the data do not fit the program, are too few, or a gradient is not finite.
        ProtocolError: program, weights and settings do not fit each other.
        FileError: a file of the job cannot be read.
    """
    dataset = read_data(job, target)
    gradients: list[Mapping[str, Array]] = []
    with loaded_session(job, target=target, open_session=open_session, slot=slot) as (loaded, watch):
        layout, session = loaded.for_training, loaded.session
        check_settings(job.settings, layout)
        for parts in batches_to_score(job, layout, dataset):
            weights = read_weights(job.weights_path, layout.weights)
            constants = constant_values(job.settings, layout, dataset, weights)
            session.begin({value.name: weights[value.tensor] for value in layout.stored}, constants)
            del weights, constants
            for fed in parts:
                if stopped():
                    raise TrainingError("scoring was stopped; its task must be taken up anew")
                session.step(fed)
                watch.check()
            found = session.gradients()
            session.finish()
            gradients.append({name: array for name, array in found.items() if array.ndim >= _LAYER_DIMENSIONS})
            del found
        return zico(gradients)
