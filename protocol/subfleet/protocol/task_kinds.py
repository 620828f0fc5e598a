"""Kinds of task: the type of labels, the metrics of a model, and the computation of metrics from sums over labels.

Devices and server compute the same sums (`subfleet.tasks.metrics`). Sums of several data sets add up, so that a fleet's
metric is that of all its samples together, and a device's claim can be checked for contradictions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from subfleet.protocol.metric_sums import SCORE_BINS, Totals

Objective = Literal["cross_entropy", "next_token", "dense_cross_entropy", "binary_cross_entropy", "mean_squared_error"]
_MOST_LOSS = 700.0
"""Losses above this would overflow a perplexity."""
_ROUNDING = 1e-6
"""Relative rounding error of sums of floating-point numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of a model.

    Attributes:
        title: its name for people.
        larger_is_better: whether larger values are better.
    """

    title: str
    larger_is_better: bool = True


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": Metric(title="accuracy"),
        "macro_f1": Metric(title="macro F1"),
        "auroc": Metric(title="AUROC"),
        "mean_iou": Metric(title="mean IoU"),
        "perplexity": Metric(title="perplexity", larger_is_better=False),
        "rmse": Metric(title="RMSE", larger_is_better=False),
        "mae": Metric(title="MAE", larger_is_better=False),
        "r2": Metric(title="R2"),
        "loss": Metric(title="loss", larger_is_better=False),
    }
)
"""By name in files. Most are fractions from 0 to 1; RMSE and MAE are in the unit of the targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKind:
    """A kind of task, as its objective determines it.

    Attributes:
        name: of the kind.
        labels: "classes" are indices of classes; "probabilities" numbers from 0 to 1, one for each output; "numbers"
            any numbers, one for each output.
        places: what has a label: a "sample", each "token" of a sequence, each "pixel" of an image, or "any" of these,
            depending on the network.
        metrics: names in `METRICS`, the headline first.
        by_class: whether the headline needs counts by class.
    """

    name: Literal["classification", "sequence", "segmentation", "multi_label", "regression"]
    labels: Literal["classes", "probabilities", "numbers"]
    places: Literal["sample", "token", "pixel", "any"]
    metrics: tuple[str, ...]
    by_class: bool = False

    @property
    def headline(self) -> str:
        """The main metric."""
        return self.metrics[0]

    @property
    def over_classes(self) -> bool:
        """Whether labels are indices of classes."""
        return self.labels == "classes"

    @property
    def by_accuracy(self) -> bool:
        """Whether paths of a supernet are ranked by accuracy, else by loss."""
        return self.headline == "accuracy"

    def label_shape(self, input_shape: Sequence[int], outputs: int, predicts: str) -> tuple[int, ...]:
        """Compute the shape of one sample's label.

        Args:
            input_shape: of one sample.
            outputs: of the network, for each place.
            predicts: what the network has outputs for: a "sample", each "token" or each "pixel".
        """
        of_places = {"sample": (), "token": tuple(input_shape), "pixel": tuple(input_shape[1:])}[predicts]
        return of_places if self.over_classes else (*of_places, outputs)

    def guess_loss(self, outputs: int, totals: Totals) -> float:
        """Compute the mean loss of guessing: of equally likely classes, or of the targets' mean.

        Args:
            outputs: of the network.
            totals: of any model on the evaluation data; their targets count, not what the model made of them.
        """
        if self.labels == "classes":
            return math.log(outputs)
        if self.labels == "probabilities":
            return math.log(2)
        variances = list(_compute_variances(totals))
        return math.fsum(variances) / len(variances) if variances else 0.0


TASK_KINDS: Mapping[str, TaskKind] = MappingProxyType(
    {
        "cross_entropy": TaskKind(
            name="classification", labels="classes", places="sample", metrics=("accuracy", "macro_f1", "auroc")
        ),
        "next_token": TaskKind(name="sequence", labels="classes", places="token", metrics=("perplexity", "accuracy")),
        "dense_cross_entropy": TaskKind(
            name="segmentation", labels="classes", places="pixel", metrics=("mean_iou", "accuracy"), by_class=True
        ),
        "binary_cross_entropy": TaskKind(
            name="multi_label",
            labels="probabilities",
            places="any",
            metrics=("macro_f1", "auroc", "accuracy"),
            by_class=True,
        ),
        "mean_squared_error": TaskKind(
            name="regression", labels="numbers", places="any", metrics=("rmse", "mae", "r2")
        ),
    }
)
"""By the name of the objective."""


def better(metric: str) -> float:
    """Return 1 if a larger value of the metric is better, else -1."""
    return 1.0 if METRICS[metric].larger_is_better else -1.0


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format metrics, such as "RMSE 0.5512, R2 0.4321"."""
    return ", ".join(
        f"{METRICS[name].title if name in METRICS else name} {value:{'.4g' if name == 'perplexity' else '.4f'}}"
        for name, value in metrics.items()
    )


def compute_metrics(kind: TaskKind, totals: Totals) -> dict[str, float]:
    """Compute the metrics of a kind that the sums allow, in the kind's order.

    Some need counts by class, which an evaluation must request; AUROC needs labels of both kinds, R2 varying targets.
    """
    values = ((name, _METRICS[name](totals)) for name in kind.metrics)
    return {name: value for name, value in values if value is not None}


def find_contradiction(kind: TaskKind, totals: Totals, outputs: int) -> str:
    """Explain why labels cannot add up to these sums; empty if they can.

    Args:
        kind: of the task.
        totals: as a device claims them, in the ranges that messages have.
        outputs: of the network.
    """
    sums = totals.sums
    series = {
        "class_counts": totals.class_counts,
        "class_predicted": sums.class_predicted,
        "absolute_errors": sums.absolute_errors,
        "squared_errors": sums.squared_errors,
        "targets": sums.targets,
        "squared_targets": sums.squared_targets,
        "positives": sums.positives[::SCORE_BINS],
        "negatives": sums.negatives[::SCORE_BINS],
    }
    for name, numbers in series.items():
        if len(numbers) not in (0, outputs):
            return f"{name} has numbers for {len(numbers)} outputs, but the model has {outputs}"
    if kind.labels == "numbers":
        return _contradict_errors(totals)
    if any(sums.squared_errors) or any(sums.squared_targets):
        return f"errors are reported, but a task of {kind.name} has none"
    return _contradict_classes(totals) if kind.over_classes else _contradict_probabilities(totals, outputs)


def _contradict_classes(totals: Totals) -> str:
    counts, right, predicted = totals.class_counts, totals.class_correct, totals.sums.class_predicted
    if counts and (sum(counts) != totals.label_count or sum(right) != totals.correct):
        return (
            f"{sum(counts)} labels were counted by class, {sum(right)} of them right, but {totals.label_count} and "
            f"{totals.correct} in all"
        )
    if predicted and (not counts or sum(predicted) != totals.label_count or _is_any_below(predicted, right)):
        return f"{sum(predicted)} predictions by class contradict the counts of {totals.label_count} labels"
    return _contradict_scores(totals, totals.label_count, counts)


def _contradict_probabilities(totals: Totals, outputs: int) -> str:
    counts, right, predicted = totals.class_counts, totals.class_correct, totals.sums.class_predicted
    rows, rest = divmod(totals.label_count, outputs)
    if (
        rest
        or max((*counts, *predicted), default=0) > rows
        or _is_any_below(predicted, right)
        or len(predicted) != len(counts)
    ):
        return f"{totals.label_count} labels of {outputs} outputs contradict the counts by class"
    alike = (rows - count - guessed + 2 * both for count, guessed, both in zip(counts, predicted, right, strict=True))
    if counts and sum(alike) != totals.correct:
        return f"{totals.correct} correct labels contradict the counts by class"
    return _contradict_scores(totals, rows, counts)


def _contradict_scores(totals: Totals, rows: int, counts: Sequence[int]) -> str:
    positives, negatives = totals.sums.positives, totals.sums.negatives
    if not positives and not negatives:
        return ""
    scored = zip(map(sum, _split_bins(positives)), map(sum, _split_bins(negatives)), strict=False)
    if [*scored] != [(count, rows - count) for count in counts]:
        return "the scores do not count each label once"
    return ""


def _contradict_errors(totals: Totals) -> str:
    sums = totals.sums
    outputs = len(sums.squared_errors)
    if not outputs or totals.class_counts or sums.class_predicted or sums.positives or sums.negatives:
        return "errors of each output are missing, or classes are counted, which regression does not have"
    rows, rest = divmod(totals.label_count, outputs)
    if rest:
        return f"{totals.label_count} labels cannot be divided evenly among {outputs} outputs"
    # The mean of squares is at least the square of the mean.
    for name, roots, squares in (
        ("errors", sums.absolute_errors, sums.squared_errors),
        ("targets", sums.targets, sums.squared_targets),
    ):
        if any(root * root > rows * square * (1 + _ROUNDING) for root, square in zip(roots, squares, strict=True)):
            return f"the squared {name} add up to less than is possible for {rows} numbers with their sum"
    total = math.fsum(sums.squared_errors)
    if abs(total - totals.loss) > 1e-3 * max(total, totals.loss):  # programs compute in single precision
        return f"the squared errors add up to {total:g}, but the loss is {totals.loss:g}"
    return ""


def _is_any_below(numbers: Sequence[int], least: Sequence[int]) -> bool:
    return any(number < bound for number, bound in zip(numbers, least, strict=False))


def _split_bins(counts: Sequence[int]) -> Iterator[Sequence[int]]:
    return (counts[start : start + SCORE_BINS] for start in range(0, len(counts), SCORE_BINS))


def _accuracy(totals: Totals) -> float:
    return totals.correct / totals.label_count


def _perplexity(totals: Totals) -> float:
    """Compute the perplexity."""
    return math.exp(min(totals.loss / totals.label_count, _MOST_LOSS))


def _average_classes(totals: Totals, score: Callable[[int, int, int], float]) -> float | None:
    """Average a score over the classes that occur among labels or predictions; 0 if none does."""
    predicted = totals.sums.class_predicted
    if not predicted:
        return None
    each = zip(totals.class_counts, predicted, totals.class_correct, strict=True)
    scores = [score(count, guessed, right) for count, guessed, right in each if count or guessed]
    return math.fsum(scores) / len(scores) if scores else 0.0


def _macro_f1(totals: Totals) -> float | None:
    return _average_classes(totals, lambda count, guessed, right: 2 * right / (count + guessed))


def _mean_iou(totals: Totals) -> float | None:
    return _average_classes(totals, lambda count, guessed, right: right / (count + guessed - right))


def _auroc(totals: Totals) -> float | None:
    """Average the area under the ROC curve over outputs with labels of both sorts; ties count half."""
    areas = []
    for ones, zeros in zip(_split_bins(totals.sums.positives), _split_bins(totals.sums.negatives), strict=True):
        if not any(ones) or not any(zeros):
            continue
        below, twice = 0, 0
        for positive, negative in zip(ones, zeros, strict=True):
            twice += positive * (2 * below + negative)
            below += negative
        areas.append(twice / (2 * sum(ones) * sum(zeros)))
    return math.fsum(areas) / len(areas) if areas else None


def _count_rows(totals: Totals) -> int:
    return totals.label_count // len(totals.sums.squared_errors)


def _rmse(totals: Totals) -> float:
    errors = totals.sums.squared_errors
    return math.fsum(math.sqrt(error / _count_rows(totals)) for error in errors) / len(errors)


def _mae(totals: Totals) -> float:
    errors = totals.sums.absolute_errors
    return math.fsum(error / _count_rows(totals) for error in errors) / len(errors)


def _compute_variances(totals: Totals) -> Iterator[float]:
    rows, sums = _count_rows(totals), totals.sums
    for total, square in zip(sums.targets, sums.squared_targets, strict=True):
        yield max(square / rows - (total / rows) ** 2, 0.0)


def _r2(totals: Totals) -> float | None:
    """Average the explained fraction of the targets' variance over outputs."""
    each = zip(totals.sums.squared_errors, _compute_variances(totals), strict=True)
    shares = [1 - error / _count_rows(totals) / variance for error, variance in each if variance > 0]
    return math.fsum(shares) / len(shares) if shares else None


_METRICS: Mapping[str, Callable[[Totals], float | None]] = MappingProxyType(
    {
        "accuracy": _accuracy,
        "macro_f1": _macro_f1,
        "auroc": _auroc,
        "mean_iou": _mean_iou,
        "perplexity": _perplexity,
        "rmse": _rmse,
        "mae": _mae,
        "r2": _r2,
    }
)
