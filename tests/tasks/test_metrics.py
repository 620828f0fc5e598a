"""What outputs and labels add up to, and the metrics that follow: as scikit-learn computes them from all at once."""

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


def drawn(objective: str, count: int, seed: int, outputs: int = OUTPUTS) -> tuple[Outputs, Labels]:
    """Random outputs that have something to do with their labels."""
    kind, stream = TASK_KINDS[objective], np.random.default_rng(seed)
    places = {"token": (3,), "pixel": (2, 3)}.get(kind.places, ())
    found = stream.normal(size=(count, *places, outputs)).astype(np.float32) * 3
    if kind.labels == "numbers":
        return found, (found + stream.normal(size=found.shape)).astype(np.float32) + 5
    noisy = found + stream.normal(size=found.shape) * 4
    if kind.labels == "probabilities":
        return found, (noisy > 0).astype(np.float32)
    labels = noisy.argmax(-1)
    if places:
        labels[..., 0] = -1  # padding
    return found, labels


def totals_of(objective: str, outputs: Outputs, labels: Labels, *, by_class: bool = True) -> Totals:
    tally = MetricTally(TASK_KINDS[objective], outputs.shape[-1], by_class=by_class)
    tally.add(outputs, labels)
    return with_loss(tally.totals(0.0))


def with_loss(totals: Totals) -> Totals:
    """The loss of regression is what its errors say; of others any number will do."""
    return replace(totals, loss=sum(totals.sums.squared_errors) or 0.5 * totals.label_count)


def probabilities(outputs: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    wide = np.exp(outputs.astype(np.float64))
    found: npt.NDArray[np.float64] = wide / wide.sum(-1, keepdims=True)
    return found


def expected_metrics(kind: TaskKind, outputs: Outputs, labels: Labels) -> Mapping[str, float]:
    """By scikit-learn, in whose words an output's label is a column."""
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
    found = {
        "accuracy": sk.accuracy_score(truth, rows.argmax(1)),
        "macro_f1": sk.f1_score(truth, rows.argmax(1), average="macro"),
        "mean_iou": sk.jaccard_score(truth, rows.argmax(1), average="macro"),
        "perplexity": float(np.exp(0.5)),
        "auroc": np.mean(
            [sk.roc_auc_score(truth == one, score_bins(log_odds(rows)[:, one])) for one in range(rows.shape[1])]
        ),
    }
    return {name: found[name] for name in kind.metrics}


def log_odds(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = np.log(probabilities(rows)) - np.log1p(-probabilities(rows))
    return found


@pytest.mark.parametrize("objective", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_metric_is_that_of_scikit_learn(objective: str, seed: int) -> None:
    kind, (outputs, labels) = TASK_KINDS[objective], drawn(objective, 60, seed)
    found = compute_metrics(kind, totals_of(objective, outputs, labels))
    assert tuple(found) == kind.metrics, "all of them, the headline first"
    assert found == pytest.approx(dict(expected_metrics(kind, outputs, labels)), abs=1e-9)
    assert set(found) <= set(METRICS)


def test_areas_differ_from_those_of_the_scores_by_what_falls_into_a_bin() -> None:
    from sklearn import metrics as sk

    outputs, labels = drawn("binary_cross_entropy", 500, 1)
    found = compute_metrics(TASK_KINDS["binary_cross_entropy"], totals_of("binary_cross_entropy", outputs, labels))
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(labels, outputs), abs=2e-3)
    outputs, labels = drawn("cross_entropy", 500, 1)
    found = compute_metrics(TASK_KINDS["cross_entropy"], totals_of("cross_entropy", outputs, labels))
    exact = sk.roc_auc_score(labels, probabilities(outputs), multi_class="ovr")
    assert found["auroc"] == pytest.approx(exact, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("objective", KINDS)
@given(data=st.data())
def test_sums_that_are_split_over_devices_and_batches_add_up_to_those_of_the_whole(
    objective: str, data: st.DataObject
) -> None:
    count = data.draw(st.integers(2, 30))
    outputs, labels = drawn(objective, count, data.draw(st.integers(0, 99)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=4)))
    parts = zip(np.split(outputs, cuts), np.split(labels, cuts), strict=True)
    whole = totals_of(objective, outputs, labels)
    together = Totals.of_all(totals_of(objective, *part) for part in parts)  # type: ignore[arg-type]  # NumPy's words
    assert (together.label_count, together.correct) == (whole.label_count, whole.correct)
    assert (together.class_counts, together.class_correct) == (whole.class_counts, whole.class_correct)
    for name in ("class_predicted", "positives", "negatives"):
        assert getattr(together.sums, name) == getattr(whole.sums, name), name
    for name in ("absolute_errors", "squared_errors", "targets", "squared_targets"):
        assert getattr(together.sums, name) == pytest.approx(getattr(whole.sums, name)), name
    kind = TASK_KINDS[objective]
    assert compute_metrics(kind, together) == pytest.approx(compute_metrics(kind, whole))
    assert not find_contradiction(kind, together, OUTPUTS), "what was counted can be"


def edited(totals: Totals, name: str, place: int, by: float) -> Totals:
    """With one number changed."""
    sums = name if hasattr(totals.sums, name) else ""
    numbers = list(getattr(totals.sums if sums else totals, name))
    numbers[place] += by
    changed: dict[str, Any] = {name: tuple(numbers)}
    return replace(totals, sums=replace(totals.sums, **changed)) if sums else replace(totals, **changed)


CLAIMS: Mapping[str, tuple[str, Callable[[Totals], Totals], str]] = {
    "labels that were not counted": ("cross_entropy", lambda one: edited(one, "class_counts", 0, 1), "by class"),
    "right ones beyond those": ("cross_entropy", lambda one: replace(one, correct=one.correct + 1), "right"),
    "too many predictions": ("cross_entropy", lambda one: edited(one, "class_predicted", 0, 1), "predictions"),
    "scores of nobody": ("cross_entropy", lambda one: edited(one, "positives", 5, 1), "scores do not count"),
    "more ones than rows": ("binary_cross_entropy", lambda one: edited(one, "class_predicted", 0, 999), "contradict"),
    "right by nothing": ("binary_cross_entropy", lambda one: replace(one, correct=one.correct - 1), "by the counts by"),
    "a part of a row": (
        "binary_cross_entropy",
        lambda one: replace(one, label_count=one.label_count + 1),
        "contradict",
    ),
    "zeros twice": ("binary_cross_entropy", lambda one: edited(one, "negatives", 0, 1), "scores do not count"),
    "pixels of no class": ("dense_cross_entropy", lambda one: edited(one, "class_counts", 1, -1), "by class"),
    "errors that cannot be": ("mean_squared_error", lambda one: edited(one, "absolute_errors", 0, 1e4), "squares of e"),
    "targets that cannot be": ("mean_squared_error", lambda one: edited(one, "targets", 0, 1e6), "squares of targets"),
    "another loss": ("mean_squared_error", lambda one: replace(one, loss=2 * one.loss), "but the loss says"),
    "errors of classes": (
        "cross_entropy",
        lambda one: replace(one, sums=replace(one.sums, squared_errors=(1.0,) * OUTPUTS)),
        "has none",
    ),
    "other outputs": (
        "mean_squared_error",
        lambda one: replace(one, sums=replace(one.sums, targets=(1.0,))),
        "targets has numbers of 1 outputs",
    ),
    "nothing at all": (
        "mean_squared_error",
        lambda one: replace(one, sums=replace(one.sums, squared_errors=())),
        "each",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_beyond_what_its_labels_allow_is_odd(name: str) -> None:
    objective, change, words = CLAIMS[name]
    totals = totals_of(objective, *drawn(objective, 20, 3))
    assert not find_contradiction(TASK_KINDS[objective], totals, OUTPUTS)
    assert words in find_contradiction(TASK_KINDS[objective], change(totals), OUTPUTS)


def test_what_was_not_asked_is_neither_counted_nor_told() -> None:
    totals = totals_of("cross_entropy", *drawn("cross_entropy", 20, 3), by_class=False)
    assert (totals.class_counts, totals.sums.class_predicted, totals.sums.positives) == ((), (), ())
    assert [*compute_metrics(TASK_KINDS["cross_entropy"], totals)] == ["accuracy"]
    wide = totals_of("binary_cross_entropy", *drawn("binary_cross_entropy", 20, 3, MAX_SCORED_OUTPUTS + 1))
    assert [*compute_metrics(TASK_KINDS["binary_cross_entropy"], wide)] == ["macro_f1", "accuracy"]


def test_metrics_that_mean_nothing_are_not_told() -> None:
    same = np.ones((5, 1), np.float32)
    found = compute_metrics(TASK_KINDS["mean_squared_error"], totals_of("mean_squared_error", same * 2, same))
    assert found == {"rmse": 1.0, "mae": 1.0}, "targets that do not differ have no variance to explain"
    found = compute_metrics(TASK_KINDS["binary_cross_entropy"], totals_of("binary_cross_entropy", -same, 0 * same))
    assert found == {"macro_f1": 0.0, "accuracy": 1.0}, "nothing is there to be ranked"


def test_bins_keep_the_order_of_scores_and_have_two_ends() -> None:
    assert score_bins(np.array([-1e30, -8.0, -0.01, 0.0, 0.125, 7.99, 1e30], np.float32)).tolist() == [
        *(0, 0, SCORE_BINS // 2 - 1, SCORE_BINS // 2, SCORE_BINS // 2 + 1, SCORE_BINS - 1, SCORE_BINS - 1)
    ]


@pytest.mark.parametrize("objective", KINDS)
def test_outputs_and_labels_of_other_places_are_refused(objective: str) -> None:
    outputs, labels = drawn(objective, 4, 1)
    with pytest.raises(ValueError, match="do not match"):
        MetricTally(TASK_KINDS[objective], OUTPUTS, by_class=True).add(outputs, labels[:3])


@pytest.mark.parametrize(("objective", "guess"), [("cross_entropy", np.log(4)), ("binary_cross_entropy", np.log(2))])
def test_a_guess_has_the_loss_of_equally_likely_labels(objective: str, guess: float) -> None:
    totals = totals_of(objective, *drawn(objective, 9, 1))
    assert TASK_KINDS[objective].guess_loss(OUTPUTS, totals) == pytest.approx(guess)


def test_a_guess_of_numbers_is_their_mean() -> None:
    outputs, labels = drawn("mean_squared_error", 50, 1)
    totals = totals_of("mean_squared_error", outputs, labels)
    assert TASK_KINDS["mean_squared_error"].guess_loss(OUTPUTS, totals) == pytest.approx(labels.var(0).mean())
