"""The training loop that every runtime shares: one manifest, one step at a time, NumPy at the rim.

A runtime brings one function that loads a program and gives back one that runs it. Values cross as NumPy arrays: both
runtimes take an array's memory as it is and give theirs the same way, so that nothing is copied between steps.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subfleet.arrays import Arrays, numpy_dtype
from subfleet.protocol.errors import DataError, MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.programs import Program, TrainJob, TrainResult
from subfleet.tasks import Dataset, iter_batches, read_dataset
from subfleet.trainers.job_files import read_program, read_weights, write_change
from subfleet.trainers.memory import MemoryWatch, release_free_memory
from subfleet.trainers.step_layout import StepLayout, step_layout

__all__ = ["LoadProgram", "RunProgram", "run_training"]

Array = npt.NDArray[np.generic]

RunProgram = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Runs a loaded program once: inputs by name to outputs by name, which stay valid when it runs again.

Raises TrainingError where the runtime fails.
"""

LoadProgram = Callable[[Program, int], RunProgram]
"""Loads a program to run on a number of threads; raises TrainingError where the runtime refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tally:
    """What the steps of one training added up to; loss and correct are those of the last epoch."""

    step_count: int
    loss_sum: float
    correct_sum: float
    train_seconds: float


def run_training(job: TrainJob, stopped: Callable[[], bool], *, target: str, load: LoadProgram) -> TrainResult:
    """Train one job and write the weights' change; the memory that it took is given back.

    The data set is read before measuring begins, since it is there whatever subnet is trained; the program, the
    weights, the runtime's session, the steps and the writing of the change all count.

    Raises:
        MemoryLimitError: the process grew beyond the limit, or what the program takes alone is beyond it.
        MemoryError: the system refused memory below the limit.
        TrainingError: the program failed, was stopped, or ended in values that are not finite.
        DataError: the data do not fit the program.
        ProtocolError: program, weights and settings do not fit each other.
        FileError: a file of the job cannot be read or written.
    """
    dataset = read_dataset(job.data)
    watch = MemoryWatch(job.memory_limit_bytes)
    try:
        layout, loaded = _load(job, dataset, target, load)
        watch.check()
        step = _Step(loaded, layout, read_weights(job.weights_path, layout), job.settings.learning_rate)
        tally = _run_steps(job, stopped, dataset, step, watch)
        trained = step.parameters()
        del step, loaded
        # The old weights are read again, not kept: while the steps ran, their memory was free.
        write_change(job.output_path, trained, read_weights(job.weights_path, layout))
        watch.check()
    finally:
        release_free_memory()
    return TrainResult(
        sample_count=len(dataset),
        step_count=tally.step_count,
        loss=tally.loss_sum / len(dataset),
        accuracy=tally.correct_sum / len(dataset),
        measured_peak_bytes=watch.growth_bytes(),
        train_seconds=tally.train_seconds,
    )


class _Step:
    """A training step with the weights and optimiser states that the last one left."""

    def __init__(self, program: RunProgram, layout: StepLayout, weights: Arrays, learning_rate: float) -> None:
        self.layout = layout
        self._program = program
        self._learning_rate = np.array(learning_rate, np.float32)
        self._carried: dict[str, Array] = {value.name: weights[value.tensor] for value in layout.parameters}
        for value in layout.states:
            self._carried[value.name] = np.zeros(value.shape, numpy_dtype(value.dtype))

    def run(self, inputs: Array, labels: Array, mask: Array) -> tuple[float, float]:
        """Take one step; gives its loss and how many samples were right before it."""
        layout = self.layout
        outputs = self._program(
            {
                **self._carried,
                layout.input.name: inputs,
                layout.label.name: labels,
                layout.sample_mask.name: mask,
                layout.learning_rate.name: self._learning_rate,
            }
        )
        self._carried = {old: outputs[new] for old, new in layout.carried.items()}
        return float(outputs[layout.loss]), float(outputs[layout.correct])

    def parameters(self) -> dict[str, Array]:
        """The weights as they stand, by tensor name."""
        return {value.tensor: self._carried[value.name] for value in self.layout.parameters}


def _load(job: TrainJob, dataset: Dataset, target: str, load: LoadProgram) -> tuple[StepLayout, RunProgram]:
    program = read_program(job.program_path, target)
    layout = step_layout(program.manifest)
    if job.settings.batch_size != layout.batch_size:
        raise ProtocolError(
            f"the task's batch size is {job.settings.batch_size}, but its program takes {layout.batch_size}"
        )
    if dataset.sample_shape != layout.input.shape[1:]:
        raise DataError(
            f"samples of {job.data!r} are of shape {dataset.sample_shape}, but the program takes "
            f"{layout.input.shape[1:]}; use data of that shape"
        )
    # Nothing is allocated on the word of a received manifest alone.
    fed_bytes = sum(math.prod(value.shape) * numpy_dtype(value.dtype).itemsize for value in program.manifest.inputs)
    if fed_bytes > job.memory_limit_bytes:
        raise MemoryLimitError(needed_bytes=fed_bytes, limit_bytes=job.memory_limit_bytes)
    return layout, load(program, job.threads)


def _run_steps(job: TrainJob, stopped: Callable[[], bool], dataset: Dataset, step: _Step, watch: MemoryWatch) -> _Tally:
    started_s = time.perf_counter()
    step_count = 0
    loss_sum = correct_sum = 0.0
    for epoch in range(job.settings.epochs):
        loss_sum = correct_sum = 0.0
        for indices, mask in iter_batches(
            len(dataset),
            step.layout.batch_size,
            seed=job.settings.seed,
            round_number=job.round,
            client_id=job.client_id,
            epoch=epoch,
        ):
            if stopped():
                raise TrainingError(f"training was stopped after {step_count} steps; its task must be taken up anew")
            loss, correct = step.run(dataset.inputs[indices], dataset.labels[indices], mask)
            step_count += 1
            if not math.isfinite(loss):
                raise TrainingError(f"the loss was {loss} in step {step_count}; lower the learning rate")
            loss_sum += loss * float(mask.sum())
            correct_sum += correct
            watch.check()
    return _Tally(
        step_count=step_count,
        loss_sum=loss_sum,
        correct_sum=correct_sum,
        train_seconds=time.perf_counter() - started_s,
    )
