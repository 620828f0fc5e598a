"""What the steps of one job add up to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from subfleet.protocol.errors import DivergedError, TrainingError
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.paths import OperatorExamples
from subfleet.trainers.feeding import Call
from subfleet.trainers.runtime import Array
from subfleet.trainers.step_layout import StepLayout

__all__ = ["Tally"]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the steps of one job add up to; loss, correct, squares and count are those of the last epoch.

    Attributes:
        whole: whether they are those of all steps: where a job is told in steps, its last epoch may be a single batch.
    """

    whole: bool = False
    step_count: int = 0
    loss_sum: float = 0.0
    correct_sum: float = 0.0
    square_sum: float | None = None
    count_sum: float = 0.0
    train_seconds: float = 0.0
    epoch: int = 0

    def take(self, call: Call, read: Mapping[str, Array], layout: StepLayout) -> None:
        """Add what the program has given for a call.

        Raises:
            DivergedError: its loss is not finite.
        """
        if call.origin.epoch != self.epoch and not self.whole:
            self.epoch = call.origin.epoch
            self.loss_sum = self.correct_sum = self.count_sum = 0.0
            self.square_sum = None
        loss = float(read[layout.loss])
        if not math.isfinite(loss):
            raise DivergedError(f"the loss was {loss} in step {self.step_count + 1}; lower the learning rate")
        self.step_count += call.ends_batch
        count = float(read[layout.count]) if layout.count else call.count
        self.loss_sum += loss * (call.batch_count if layout.accumulates else count)
        self.correct_sum += float(read[layout.correct])
        if layout.squares:
            self.square_sum = (self.square_sum or 0.0) + float(read[layout.squares])
        self.count_sum += count

    def end(self, train_seconds: float) -> None:
        """Set the time of the steps.

        Raises:
            TrainingError: the program counted no label in the last epoch.
        """
        self.train_seconds = train_seconds
        if not self.count_sum > 0:
            raise TrainingError(f"the program counted {self.count_sum:g} labels in all; it must be exported again")

    def result(
        self, *, sample_count: int, measured_peak_bytes: int, operator_examples: OperatorExamples = ()
    ) -> TrainResult:
        """The result of the job, once its time is set."""
        return TrainResult(
            sample_count=sample_count,
            step_count=self.step_count,
            loss=self.loss_sum / self.count_sum,
            accuracy=self.correct_sum / self.count_sum,
            measured_peak_bytes=measured_peak_bytes,
            train_seconds=self.train_seconds,
            square_loss=None if self.square_sum is None else self.square_sum / self.count_sum,
            operator_examples=operator_examples,
        )
