"""Predictions for every kind of labels; the model is a function."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from subfleet.protocol.errors import DataError, TrainingError
from subfleet.protocol.jobs import Prediction
from subfleet.tasks import Dataset
from subfleet.trainers.prediction import Model, ModelForm, predict_dataset

Array = npt.NDArray[np.generic]
FORM = ModelForm(sample_shape=(2,))


def predict(
    dataset: Dataset, logits: npt.NDArray[np.float32], batch_size: int = 2, form: ModelForm = FORM
) -> Prediction:
    """Predict with a model that looks up logits by the number of the sample; the number of padding is invalid."""

    def infer(samples: Array) -> Array:
        assert samples.shape == (batch_size, *dataset.sample_shape)
        numbers = np.asarray(samples).reshape(batch_size, -1)[:, 0].astype(np.int64)
        return np.concatenate([logits, np.full((1, *logits.shape[1:]), 9, np.float32)])[numbers - 1]

    return predict_dataset(Model(form=form, batch_size=batch_size, infer=infer), dataset)


def number_samples(count: int) -> npt.NDArray[np.float32]:
    """Samples with the first values 1, 2, 3 ...; padding has 0."""
    return np.arange(1, count + 1, dtype=np.float32).reshape(-1, 1) * np.ones((1, 2), np.float32)


def test_each_token_has_a_class_and_missing_labels_do_not_count() -> None:
    labels = np.array([[0, 2, -1], [1, -100, -1], [2, 2, 0]])
    logits = np.zeros((3, 3, 3), np.float32)
    guesses = np.array([[0, 2, 1], [0, 2, 2], [2, 1, 0]])
    np.put_along_axis(logits, guesses[..., None], 1, -1)
    prediction = predict(Dataset(inputs=number_samples(3), labels=labels), logits)
    assert prediction.labels == tuple(guesses.ravel())
    assert prediction.accuracy == pytest.approx(4 / 6)  # of the 6 labels that count


def test_targets_of_0_and_1_are_on_one_side_of_a_logit_of_0() -> None:
    labels = np.array([[0, 1], [1, 1], [0, 0]], np.float32)
    logits = np.array([[-3, 0.1], [0.0, 5], [-1, 2]], np.float32)
    prediction = predict(Dataset(inputs=number_samples(3), labels=labels), logits)
    assert prediction.labels == (0, 1, 0, 1, 0, 1)
    assert prediction.accuracy == pytest.approx(4 / 6)
    single = predict(Dataset(inputs=number_samples(3), labels=labels[:, 0]), logits[:, 0])
    assert single.labels == (0, 0, 0)
    assert single.accuracy == pytest.approx(2 / 3)


def test_numbers_are_predicted_as_they_are_and_judged_by_their_errors() -> None:
    labels = np.array([0.5, 1.0, 3.0], np.float32)
    outputs = np.array([[0.5], [2.0], [3.0]], np.float32)
    prediction = predict(Dataset(inputs=number_samples(3), labels=labels), outputs)
    assert (prediction.labels, prediction.numbers, prediction.headline) == ((), (0.5, 2.0, 3.0), "rmse")
    assert prediction.metrics["mae"] == pytest.approx(1 / 3)
    assert prediction.metrics["rmse"] == pytest.approx(math.sqrt(1 / 3))
    assert prediction.metrics["r2"] == pytest.approx(1 - 1 / float(((labels - labels.mean()) ** 2).sum()))
    assert prediction.accuracy is None


def test_the_objective_of_a_model_decides_its_metrics() -> None:
    labels = np.array([0, 1, 1], np.float32)
    regression = ModelForm(sample_shape=(2,), objective="mean_squared_error")
    prediction = predict(
        Dataset(inputs=number_samples(3), labels=labels), np.array([0.25, 1.0, 1.0], np.float32), form=regression
    )
    assert (prediction.headline, prediction.numbers) == ("rmse", (0.25, 1.0, 1.0))
    with pytest.raises(DataError, match="labels are int64, but a model of objective 'mean_squared_error' predicts num"):
        predict(
            Dataset(inputs=number_samples(3), labels=np.array([0, 1, 1])), np.zeros((3, 2), np.float32), form=regression
        )
    classes = ModelForm(sample_shape=(2,), objective="next_token")
    with pytest.raises(DataError, match="labels are float32, but a model of objective 'next_token' predicts classes"):
        predict(Dataset(inputs=number_samples(3), labels=labels), np.zeros((3, 2), np.float32), form=classes)


def test_what_does_not_fit_is_refused() -> None:
    tokens = Dataset(inputs=number_samples(2), labels=np.zeros((2, 3), np.int64))
    with pytest.raises(
        TrainingError, match=r"of shape \(2, 4\), but labels of shape \(2, 3\) need \(2, 3, 'classes'\)"
    ):
        predict(tokens, np.zeros((2, 4), np.float32))
    binary = Dataset(inputs=number_samples(2), labels=np.ones(2, np.float32))
    with pytest.raises(TrainingError, match=r"of shape \(2, 2\), but labels of shape \(2,\) need \(2,\)"):
        predict(binary, np.zeros((2, 2), np.float32))
    with pytest.raises(DataError, match="a label is 3, but must be below 3, the model's classes"):
        predict(Dataset(inputs=number_samples(2), labels=np.array([3, 0])), np.zeros((2, 3), np.float32))
