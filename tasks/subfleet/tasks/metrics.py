"""Sums of a model's outputs and labels from which metrics follow, with NumPy alone.

Outputs are (samples, ..., outputs). Labels are class indices (samples, ...), ignored if below 0, or targets
(samples, ..., outputs). `subfleet.protocol.task_kinds` computes metrics from the sums.
"""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.limits import MAX_COUNTED_CLASSES
from subfleet.protocol.metric_sums import MAX_SCORED_OUTPUTS, SCORE_BINS, MetricSums, Totals
from subfleet.protocol.task_kinds import TaskKind

Outputs = npt.NDArray[np.floating]
Labels = npt.NDArray[np.int64] | npt.NDArray[np.float32]
_Counts = npt.NDArray[np.int64]
_BINS_PER_UNIT = 8


def score_bins(logits: Outputs) -> _Counts:
    """The bin of each logit, from 0 and below `SCORE_BINS`; it grows monotonically with the logit."""
    scaled = np.nan_to_num(np.floor(np.asarray(logits, np.float64) * _BINS_PER_UNIT), nan=0.0)
    bins: _Counts = np.clip(scaled, -SCORE_BINS // 2, SCORE_BINS // 2 - 1).astype(np.int64)
    return bins + SCORE_BINS // 2


class MetricTally:
    """Accumulates the sums of batches.

    Args:
        kind: kind of the task.
        outputs: number of outputs of the network for each prediction.
        by_class: also count by class, and by score if there are few enough outputs.
    """

    def __init__(self, kind: TaskKind, outputs: int, *, by_class: bool) -> None:
        self._kind = kind
        counted = outputs if by_class and outputs <= MAX_COUNTED_CLASSES and kind.labels != "numbers" else 0
        scored = counted if "auroc" in kind.metrics and counted <= MAX_SCORED_OUTPUTS else 0
        judged = counted if not {"macro_f1", "mean_iou"}.isdisjoint(kind.metrics) else 0
        self._labels = 0
        self._correct = 0
        self._counts, self._right = (np.zeros(counted, np.int64) for _ in range(2))
        self._predicted = np.zeros(judged, np.int64)
        self._scored = np.zeros((2, scored, SCORE_BINS), np.int64)
        self._errors = np.zeros((4, outputs if kind.labels == "numbers" else 0), np.float64)

    def add(self, outputs: Outputs, labels: Labels) -> None:
        """Add a batch, with a label for each prediction.

        Raises:
            ValueError: the shapes of outputs and labels do not match.
        """
        rows = np.asarray(outputs).reshape(-1, outputs.shape[-1])
        if self._kind.over_classes:
            if outputs.shape[:-1] != labels.shape:
                raise ValueError(f"outputs of shape {outputs.shape} do not match labels of shape {labels.shape}")
            self._add_classes(rows, labels.reshape(-1).astype(np.int64, copy=False))
            return
        if outputs.shape != labels.shape:
            raise ValueError(f"outputs of shape {outputs.shape} do not match labels of shape {labels.shape}")
        targets = np.asarray(labels, np.float64).reshape(rows.shape)
        self._labels += targets.size
        if self._kind.labels == "numbers":
            self._add_numbers(rows.astype(np.float64), targets)
        else:
            self._add_probabilities(rows, targets > 0.5)

    def totals(self, loss: float) -> Totals:
        """The sums so far, with the given sum of losses."""
        absolute, squared, targets, squares = (tuple(sums.tolist()) for sums in self._errors)
        return Totals(
            label_count=self._labels,
            loss=loss,
            correct=self._correct,
            class_counts=tuple(self._counts.tolist()),
            class_correct=tuple(self._right.tolist()),
            sums=MetricSums(
                class_predicted=tuple(self._predicted.tolist()),
                positives=tuple(self._scored[0].ravel().tolist()),
                negatives=tuple(self._scored[1].ravel().tolist()),
                absolute_errors=absolute,
                squared_errors=squared,
                targets=targets,
                squared_targets=squares,
            ),
        )

    def _add_classes(self, rows: Outputs, labels: _Counts) -> None:
        counted = labels >= 0
        if not counted.all():
            rows, labels = rows[counted], labels[counted]
        predicted = rows.argmax(-1)
        right = predicted == labels
        self._labels += len(labels)
        self._correct += int(np.count_nonzero(right))
        if len(self._counts):
            self._counts += np.bincount(labels, minlength=len(self._counts))
            self._right += np.bincount(labels[right], minlength=len(self._right))
        if len(self._predicted):
            self._predicted += np.bincount(predicted, minlength=len(self._predicted))
        if self._scored.size:
            self._add_scores(_log_odds(rows), labels[:, None] == np.arange(rows.shape[1]))

    def _add_probabilities(self, rows: Outputs, ones: npt.NDArray[np.bool_]) -> None:
        guessed = rows > 0
        self._correct += int(np.count_nonzero(guessed == ones))
        if len(self._counts):
            self._counts += np.count_nonzero(ones, axis=0)
            self._right += np.count_nonzero(ones & guessed, axis=0)
            self._predicted += np.count_nonzero(guessed, axis=0)
        if self._scored.size:
            self._add_scores(rows, ones)

    def _add_scores(self, scores: Outputs, ones: npt.NDArray[np.bool_]) -> None:
        """Count each output's scores by bin, separately for positive and negative labels."""
        outputs = scores.shape[1]
        bins = score_bins(scores) + np.arange(outputs) * SCORE_BINS
        for side, chosen in enumerate((ones, ~ones)):
            self._scored[side] += np.bincount(bins[chosen], minlength=outputs * SCORE_BINS).reshape(outputs, -1)

    def _add_numbers(self, rows: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]) -> None:
        errors = rows - targets
        self._errors += (np.abs(errors).sum(0), (errors**2).sum(0), targets.sum(0), (targets**2).sum(0))


def _log_odds(logits: Outputs) -> npt.NDArray[np.float64]:
    """Log odds of each class against all others: its logit minus the log-sum-exp of the others."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(1, keepdims=True)
    exponentials = np.exp(wide)
    others = exponentials.sum(1, keepdims=True) - exponentials
    # The sum without its largest term may round to 0: then the odds are beyond the last bin.
    with np.errstate(divide="ignore"):
        odds: npt.NDArray[np.float64] = wide - np.log(np.maximum(others, 0.0))
    return np.clip(odds, -1e9, 1e9)
