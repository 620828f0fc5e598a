"""Evaluations on the wire: their bytes, fields left out for older readers, and impossible claims."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from agent.agent_cases import EVALUATION, profile

from subfleet.protocol.answers import sum_totals
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.evaluating import MAX_LABELS, EvaluationSettings
from subfleet.protocol.limits import MAX_COUNTED_CLASSES, MAX_LOSS
from subfleet.protocol.messages import MAX_CONTROL_BYTES, MAX_SAMPLES, Evaluated, decode, encode
from subfleet.protocol.metric_sums import MAX_MEASURED_OUTPUTS, MAX_SCORED_OUTPUTS, SCORE_BINS, MetricSums, Totals
from subfleet.protocol.training import ObjectiveSettings

ERRORS = ("absolute_errors", "squared_errors", "targets", "squared_targets")
EVALUATED = Evaluated(
    task_id="t",
    run_id="r",
    round=2,
    client_id="pi",
    loss=0.25,
    accuracy=0.75,
    sample_count=4,
    label_count=4,
    class_counts=(1, 3),
    class_correct=(0, 3),
    measured_peak_bytes=7,
    seconds=1.5,
    message_id="m",
)


def test_the_bytes_of_an_evaluation_are_fixed() -> None:
    assert encode(EVALUATED) == (
        b'{"accuracy":0.75,"class_correct":[0,3],"class_counts":[1,3],"client_id":"pi","kind":"evaluated",'
        b'"label_count":4,"loss":0.25,"measured_peak_bytes":7,"message_id":"m","round":2,"run_id":"r",'
        b'"sample_count":4,"schema":3,"seconds":1.5,"task_id":"t"}'
    )
    assert decode(encode(EVALUATED), expected="evaluated") == EVALUATED


def test_a_profile_has_the_held_out_count_if_there_are_held_out_data() -> None:
    assert json.loads(encode(profile()))["held_out_count"] == 4
    without = replace(profile(), held_out_count=0)
    assert "held_out_count" not in json.loads(encode(without))
    assert decode(encode(without)) == without


CLAIMS = [
    ({"loss": -0.1}, "loss is -0.1, but must be a number of single precision, 0 or more"),
    ({"loss": 1e39}, r"loss is 1e\+39, but must be a number of single precision, 0 or more"),
    ({"accuracy": 1.01}, "accuracy is 1.01, but must be from 0 to 1"),
    ({"accuracy": -0.01}, "accuracy is -0.01"),
    ({"sample_count": 0}, "sample_count is 0, but must be from 1 to"),
    ({"sample_count": MAX_SAMPLES + 1}, "sample_count is"),
    ({"label_count": 0}, "label_count is 0, but must be from 1 to"),
    ({"label_count": MAX_LABELS + 1}, "label_count is"),
    ({"measured_peak_bytes": -1}, "measured_peak_bytes is -1"),
    ({"class_counts": [1, 4], "class_correct": [0, 2]}, "class_counts add up to 5, but label_count is 4"),
    ({"class_counts": [4]}, "there are 1 class_counts, but 2 class_correct"),
    ({"class_correct": []}, "there are 2 class_counts, but 0 class_correct"),
    ({"class_correct": [2, 3]}, "each class_correct must be from 0 to its class_counts"),
    ({"class_correct": [-1, 3]}, "each class_correct must be from 0 to its class_counts"),
    ({"class_counts": [-1, 5], "class_correct": [-1, 3]}, "each class_correct"),
    ({"class_counts": [0] * (MAX_COUNTED_CLASSES + 1)}, "class_counts has 4097 items, but must have at most 4096"),
]


@pytest.mark.parametrize(
    ("changes", "words"), [*CLAIMS, ({"seconds": -1.0}, "seconds is -1.0"), ({"client_id": "a/b"}, "id")]
)
def test_an_impossible_claim_is_refused(changes: dict[str, Any], words: str) -> None:
    plain = json.loads(encode(EVALUATED))
    with pytest.raises(ProtocolError, match=words):
        decode(json.dumps(plain | changes).encode())


@pytest.mark.parametrize(("changes", "words"), CLAIMS)
def test_a_trainer_cannot_make_an_impossible_claim(changes: dict[str, Any], words: str) -> None:
    claims: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()
    }
    with pytest.raises(ValueError, match=words):
        replace(EVALUATION, **claims)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_loss_is_a_number(number: float) -> None:
    with pytest.raises(ValueError, match="loss is"):
        replace(EVALUATED, loss=number)


def test_the_largest_evaluation_fits_a_message() -> None:
    """Evenly spread labels take the most digits."""
    counts = (MAX_LABELS // MAX_COUNTED_CLASSES,) * MAX_COUNTED_CLASSES
    message = replace(
        EVALUATED,
        class_counts=counts,
        class_correct=counts,
        sums=MetricSums(class_predicted=counts),
        label_count=sum(counts),
        task_id="t" * 384,
        run_id="r" * 128,
    )
    assert len(encode(message)) < MAX_CONTROL_BYTES
    assert decode(encode(message)) == message


def test_the_most_scores_and_errors_fit_a_message() -> None:
    bins = (MAX_LABELS // SCORE_BINS // 2,) * SCORE_BINS * MAX_SCORED_OUTPUTS
    few = (MAX_LABELS // 2,) * MAX_SCORED_OUTPUTS
    errors = (MAX_LOSS / 3,) * MAX_MEASURED_OUTPUTS
    scores = MetricSums(class_predicted=few, positives=bins, negatives=bins)
    numbers = MetricSums(absolute_errors=errors, squared_errors=errors, targets=errors, squared_targets=errors)
    for sums in (scores, numbers):
        message = replace(EVALUATED, sums=sums, task_id="t" * 384, run_id="r" * 128)
        assert len(encode(message)) < MAX_CONTROL_BYTES
        assert decode(encode(message)) == message


SUMS = [
    ({"class_predicted": [-1]}, "class_predicted must have at most 4096 numbers, each from 0 to"),
    ({"class_predicted": [0] * (MAX_COUNTED_CLASSES + 1)}, "class_predicted must have at most 4096 numbers"),
    ({"positives": [0] * SCORE_BINS}, "positives and negatives must both have 128 numbers for each output"),
    ({"positives": [0] * 5, "negatives": [0] * 5}, "must both have 128 numbers for each output"),
    ({"targets": [1.0]}, "errors and targets must have the same number of outputs"),
    ({name: [-1.0] for name in ERRORS}, "sums of errors and of squares must be finite and 0 or more"),
    ({name: [1e300] for name in ERRORS}, "must be finite"),
]


@pytest.mark.parametrize(("sums", "words"), SUMS)
def test_impossible_sums_are_refused(sums: dict[str, Any], words: str) -> None:
    plain = json.loads(encode(replace(EVALUATED, sums=MetricSums(class_predicted=(2, 2)))))
    plain["sums"] |= sums
    with pytest.raises(ProtocolError, match=words):
        decode(json.dumps(plain).encode())


def test_settings_and_held_out_counts_are_checked() -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        EvaluationSettings(batch_size=0)
    for count in (-1, MAX_SAMPLES + 1):
        with pytest.raises(ValueError, match="held_out_count is"):
            replace(profile(), held_out_count=count)


def test_a_plain_objective_has_nothing_that_only_training_has() -> None:
    trained = ObjectiveSettings(
        name="next_token", label_smoothing=0.1, class_mask=True, proximal=True, distillation="self", temperature=2.0
    )
    assert trained.plain == ObjectiveSettings(name="next_token")
    assert trained.plain.plain == trained.plain


def test_a_claimed_accuracy_is_converted_back_to_a_number_of_labels() -> None:
    """The product of 0.29 and 100 is slightly less than 29 in floating point."""
    totals = sum_totals(replace(EVALUATED, accuracy=0.29, label_count=100, class_counts=(), class_correct=()))
    assert (totals.correct, totals.label_count, totals.loss, totals.mean_loss) == (29, 100, 25.0, 0.25)


def test_without_labels_there_is_no_mean_loss() -> None:
    assert math.isnan(Totals(label_count=0, loss=0.0).mean_loss)
