"""Metrics computed from sums over outputs and labels equal those of scikit-learn from all outputs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.metric_sums import MAX_SCORED_OUTPUTS, SCORE_BINS, Totals
from subfleet.protocol.task_kinds import METRICS, TASK_KINDS, TaskKind, compute_metrics, find_contradiction
from subfleet.tasks.metrics import MetricTally, score_bins

Outputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64] | npt.NDArray[np.float32]
KINDS = sorted(TASK_KINDS)
OUTPUTS = 4


def draw_outputs(objective: str, count: int, seed: int, outputs: int = OUTPUTS) -> tuple[Outputs, Labels]:
    """Random outputs that correlate with their labels."""
    kind, stream = TASK_KINDS[objective], np.random.default_rng(seed)
    positions = {"token": (3,), "pixel": (2, 3)}.get(kind.places, ())
    drawn_outputs = stream.normal(size=(count, *positions, outputs)).astype(np.float32) * 3
    if kind.labels == "numbers":
        return drawn_outputs, (drawn_outputs + stream.normal(size=drawn_outputs.shape)).astype(np.float32) + 5
    noisy = drawn_outputs + stream.normal(size=drawn_outputs.shape) * 4
    if kind.labels == "probabilities":
        return drawn_outputs, (noisy > 0).astype(np.float32)
    labels = noisy.argmax(-1)
    if positions:
        labels[..., 0] = -1  # padding
    return drawn_outputs, labels


def compute_totals(objective: str, outputs: Outputs, labels: Labels, *, by_class: bool = True) -> Totals:
    tally = MetricTally(TASK_KINDS[objective], outputs.shape[-1], by_class=by_class)
    tally.add(outputs, labels)
    return add_loss(tally.totals(0.0))


def add_loss(totals: Totals) -> Totals:
    """Totals with a loss: for regression the sum of squared errors, for other tasks any number."""
    return replace(totals, loss=sum(totals.sums.squared_errors) or 0.5 * totals.label_count)


def softmax(outputs: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    wide = np.exp(outputs.astype(np.float64))
    shares: npt.NDArray[np.float64] = wide / wide.sum(-1, keepdims=True)
    return shares


def compute_expected_metrics(kind: TaskKind, outputs: Outputs, labels: Labels) -> Mapping[str, float]:
    """The metrics by scikit-learn, where each output is a column."""
    from sklearn import metrics as sk

    rows: npt.NDArray[np.floating] = outputs.reshape(-1, outputs.shape[-1])
    if kind.labels == "numbers":
        numbers, rows = labels.reshape(rows.shape).astype(np.float64), rows.astype(np.float64)
        return {
            "rmse": sk.root_mean_squared_error(numbers, rows),
            "mae": sk.mean_absolute_error(numbers, rows),
            "r2": sk.r2_score(numbers, rows),
        }
    if kind.labels == "probabilities":
        return {
            "macro_f1": sk.f1_score(labels, rows > 0, average="macro"),
            "auroc": sk.roc_auc_score(labels, score_bins(rows)),
            "accuracy": 1 - sk.hamming_loss(labels, rows > 0),
        }
    flat = labels.reshape(-1)
    rows, truth = rows[flat >= 0], flat[flat >= 0]
    by_name = {
        "accuracy": sk.accuracy_score(truth, rows.argmax(1)),
        "macro_f1": sk.f1_score(truth, rows.argmax(1), average="macro"),
        "mean_iou": sk.jaccard_score(truth, rows.argmax(1), average="macro"),
        "perplexity": float(np.exp(0.5)),
        "auroc": np.mean(
            [
                sk.roc_auc_score(truth == column, score_bins(compute_log_odds(rows)[:, column]))
                for column in range(rows.shape[1])
            ]
        ),
    }
    return {name: by_name[name] for name in kind.metrics}


def compute_log_odds(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = np.log(softmax(rows)) - np.log1p(-softmax(rows))
    return result


@pytest.mark.parametrize("objective", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_metric_is_that_of_scikit_learn(objective: str, seed: int) -> None:
    kind, (outputs, labels) = TASK_KINDS[objective], draw_outputs(objective, 60, seed)
    metrics = compute_metrics(kind, compute_totals(objective, outputs, labels))
    assert tuple(metrics) == kind.metrics, "all of them, the headline first"
    assert metrics == pytest.approx(dict(compute_expected_metrics(kind, outputs, labels)), abs=1e-9)
    assert set(metrics) <= set(METRICS)


def test_areas_differ_from_exact_ones_by_the_width_of_a_bin() -> None:
    from sklearn import metrics as sk

    outputs, labels = draw_outputs("binary_cross_entropy", 500, 1)
    metrics = compute_metrics(
        TASK_KINDS["binary_cross_entropy"], compute_totals("binary_cross_entropy", outputs, labels)
    )
    assert metrics["auroc"] == pytest.approx(sk.roc_auc_score(labels, outputs), abs=2e-3)
    outputs, labels = draw_outputs("cross_entropy", 500, 1)
    metrics = compute_metrics(TASK_KINDS["cross_entropy"], compute_totals("cross_entropy", outputs, labels))
    exact = sk.roc_auc_score(labels, softmax(outputs), multi_class="ovr")
    assert metrics["auroc"] == pytest.approx(exact, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("objective", KINDS)
@given(data=st.data())
def test_sums_that_are_split_over_devices_and_batches_add_up_to_those_of_the_whole(
    objective: str, data: st.DataObject
) -> None:
    count = data.draw(st.integers(2, 30))
    outputs, labels = draw_outputs(objective, count, data.draw(st.integers(0, 99)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=4)))
    parts = zip(np.split(outputs, cuts), np.split(labels, cuts), strict=True)
    whole = compute_totals(objective, outputs, labels)
    together = Totals.of_all(compute_totals(objective, *part) for part in parts)  # type: ignore[arg-type]  # the annotations of NumPy
    assert (together.label_count, together.correct) == (whole.label_count, whole.correct)
    assert (together.class_counts, together.class_correct) == (whole.class_counts, whole.class_correct)
    for name in ("class_predicted", "positives", "negatives"):
        assert getattr(together.sums, name) == getattr(whole.sums, name), name
    for name in ("absolute_errors", "squared_errors", "targets", "squared_targets"):
        assert getattr(together.sums, name) == pytest.approx(getattr(whole.sums, name)), name
    kind = TASK_KINDS[objective]
    assert compute_metrics(kind, together) == pytest.approx(compute_metrics(kind, whole))
    assert not find_contradiction(kind, together, OUTPUTS), "true counts contradict nothing"


def add_to(totals: Totals, name: str, index: int, amount: float) -> Totals:
    """Totals with one number changed."""
    sums = name if hasattr(totals.sums, name) else ""
    numbers = list(getattr(totals.sums if sums else totals, name))
    numbers[index] += amount
    changed: dict[str, Any] = {name: tuple(numbers)}
    return replace(totals, sums=replace(totals.sums, **changed)) if sums else replace(totals, **changed)


CLAIMS: Mapping[str, tuple[str, Callable[[Totals], Totals], str]] = {
    "labels that were not counted": ("cross_entropy", lambda totals: add_to(totals, "class_counts", 0, 1), "by class"),
    "right ones beyond those": ("cross_entropy", lambda totals: replace(totals, correct=totals.correct + 1), "right"),
    "too many predictions": ("cross_entropy", lambda totals: add_to(totals, "class_predicted", 0, 1), "predictions"),
    "scores of nobody": ("cross_entropy", lambda totals: add_to(totals, "positives", 5, 1), "scores do not count"),
    "more ones than rows": (
        "binary_cross_entropy",
        lambda totals: add_to(totals, "class_predicted", 0, 999),
        "contradict",
    ),
    "right by nothing": (
        "binary_cross_entropy",
        lambda totals: replace(totals, correct=totals.correct - 1),
        "correct labels contradict",
    ),
    "a part of a row": (
        "binary_cross_entropy",
        lambda totals: replace(totals, label_count=totals.label_count + 1),
        "contradict",
    ),
    "zeros twice": ("binary_cross_entropy", lambda totals: add_to(totals, "negatives", 0, 1), "scores do not count"),
    "pixels of no class": ("dense_cross_entropy", lambda totals: add_to(totals, "class_counts", 1, -1), "by class"),
    "errors that cannot be": (
        "mean_squared_error",
        lambda totals: add_to(totals, "absolute_errors", 0, 1e4),
        "squared errors add up to less",
    ),
    "targets that cannot be": (
        "mean_squared_error",
        lambda totals: add_to(totals, "targets", 0, 1e6),
        "squared targets add up to less",
    ),
    "another loss": ("mean_squared_error", lambda totals: replace(totals, loss=2 * totals.loss), "but the loss is"),
    "errors of classes": (
        "cross_entropy",
        lambda totals: replace(totals, sums=replace(totals.sums, squared_errors=(1.0,) * OUTPUTS)),
        "has none",
    ),
    "other outputs": (
        "mean_squared_error",
        lambda totals: replace(totals, sums=replace(totals.sums, targets=(1.0,))),
        "targets has numbers for 1 outputs",
    ),
    "nothing at all": (
        "mean_squared_error",
        lambda totals: replace(totals, sums=replace(totals.sums, squared_errors=())),
        "each",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_beyond_its_labels_is_a_contradiction(name: str) -> None:
    objective, change, words = CLAIMS[name]
    totals = compute_totals(objective, *draw_outputs(objective, 20, 3))
    assert not find_contradiction(TASK_KINDS[objective], totals, OUTPUTS)
    assert words in find_contradiction(TASK_KINDS[objective], change(totals), OUTPUTS)


def test_metrics_that_were_not_requested_are_neither_counted_nor_reported() -> None:
    totals = compute_totals("cross_entropy", *draw_outputs("cross_entropy", 20, 3), by_class=False)
    assert (totals.class_counts, totals.sums.class_predicted, totals.sums.positives) == ((), (), ())
    assert [*compute_metrics(TASK_KINDS["cross_entropy"], totals)] == ["accuracy"]
    wide = compute_totals("binary_cross_entropy", *draw_outputs("binary_cross_entropy", 20, 3, MAX_SCORED_OUTPUTS + 1))
    assert [*compute_metrics(TASK_KINDS["binary_cross_entropy"], wide)] == ["macro_f1", "accuracy"]


def test_undefined_metrics_are_left_out() -> None:
    same = np.ones((5, 1), np.float32)
    metrics = compute_metrics(TASK_KINDS["mean_squared_error"], compute_totals("mean_squared_error", same * 2, same))
    assert metrics == {"rmse": 1.0, "mae": 1.0}, "targets that do not differ have no variance to explain"
    metrics = compute_metrics(
        TASK_KINDS["binary_cross_entropy"], compute_totals("binary_cross_entropy", -same, 0 * same)
    )
    assert metrics == {"macro_f1": 0.0, "accuracy": 1.0}, "there are no positive labels to rank"


def test_bins_keep_the_order_of_scores_and_have_two_ends() -> None:
    assert score_bins(np.array([-1e30, -8.0, -0.01, 0.0, 0.125, 7.99, 1e30], np.float32)).tolist() == [
        *(0, 0, SCORE_BINS // 2 - 1, SCORE_BINS // 2, SCORE_BINS // 2 + 1, SCORE_BINS - 1, SCORE_BINS - 1)
    ]


@pytest.mark.parametrize("objective", KINDS)
def test_outputs_and_labels_of_different_shapes_are_refused(objective: str) -> None:
    outputs, labels = draw_outputs(objective, 4, 1)
    with pytest.raises(ValueError, match="do not match"):
        MetricTally(TASK_KINDS[objective], OUTPUTS, by_class=True).add(outputs, labels[:3])


@pytest.mark.parametrize(("objective", "guess"), [("cross_entropy", np.log(4)), ("binary_cross_entropy", np.log(2))])
def test_a_guess_has_the_loss_of_equally_likely_labels(objective: str, guess: float) -> None:
    totals = compute_totals(objective, *draw_outputs(objective, 9, 1))
    assert TASK_KINDS[objective].guess_loss(OUTPUTS, totals) == pytest.approx(guess)


def test_a_guess_of_numbers_is_their_mean() -> None:
    outputs, labels = draw_outputs("mean_squared_error", 50, 1)
    totals = compute_totals("mean_squared_error", outputs, labels)
    assert TASK_KINDS["mean_squared_error"].guess_loss(OUTPUTS, totals) == pytest.approx(labels.var(0).mean())
