"""Another scale of the inputs is detected, and heterogeneous data on the same scale are accepted."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from matrices import examples

from subfleet.protocol.input_statistics import InputStatistics, find_scale_problem
from subfleet.tasks import Dataset, describe_source, load_digits, measuring, write_npz
from subfleet.tasks.measuring import measure_inputs
from subfleet.tasks.named_dataset import DATASETS

REAL = ("fashion_mnist", "cifar10_subset", "speech_commands_subset")
_DATA = os.environ.get("SUBFLEET_DATA", "")


@cache
def load_real(name: str) -> tuple[Dataset, Dataset]:
    """A sample of the training part of a data set, and its whole test part."""
    if name != "digits" and not (_DATA and Path(_DATA).is_dir()):
        pytest.skip("SUBFLEET_DATA names no folder with this data set")
    parts = DATASETS.load(name).load()
    indices = np.arange(0, len(parts.train), max(1, len(parts.train) // 4000))
    return parts.train.take(indices), parts.test


def iter_unlike_parts(dataset: Dataset) -> Iterator[npt.NDArray[np.int64]]:
    """Samples of honest devices: one class only, Dirichlet 0.05, few samples, only dark or only bright ones."""
    generator, labels = np.random.default_rng(0), dataset.classes()
    for label in np.unique(labels):
        yield np.flatnonzero(labels == label)
    shares = generator.dirichlet([0.05] * 20, len(np.unique(labels)))
    owner = np.array([generator.choice(20, p=share) for share in shares[np.searchsorted(np.unique(labels), labels)]])
    yield from (np.flatnonzero(owner == number) for number in np.unique(owner))
    for size in (1, 2, 8):
        for _ in range(40):
            yield generator.choice(len(labels), size, replace=False)
    bright = np.argsort(dataset.inputs.reshape(len(dataset), -1).mean(1))
    yield from (bright[:8], bright[:100], bright[-8:], bright[-100:])


def scale(dataset: Dataset, factor: float, shift: float = 0.0) -> Dataset:
    return replace(dataset, inputs=(dataset.inputs * np.float32(factor) + np.float32(shift)).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("standardised", [False, True])
@pytest.mark.parametrize("name", ["digits", *REAL])
def test_no_honest_device_is_taken_for_one_on_another_scale(name: str, standardised: bool) -> None:
    train, test = load_real(name)
    if standardised:
        mean, deviation = float(train.inputs.mean()), float(train.inputs.std())
        train, test = (scale(dataset, 1 / deviation, -mean / deviation) for dataset in (train, test))
    evaluation = measure_inputs(test)
    for part in iter_unlike_parts(train):
        statistics = measure_inputs(train.take(part))
        assert find_scale_problem(statistics, evaluation) == "", (
            f"{len(part)} samples: {statistics} beside {evaluation}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "fashion_mnist", "cifar10_subset"])
def test_every_other_scale_of_pictures_is_found(name: str) -> None:
    train, test = load_real(name)
    mean, deviation = float(train.inputs.mean()), float(train.inputs.std())
    by_scale = {
        "bytes": scale(train, 255),
        "divided twice": scale(train, 1 / 255),
        "16 bits": scale(train, 65535),
        "standardised": scale(train, 1 / deviation, -mean / deviation),
        "from -1 to 1": scale(train, 2, -1),
        "of 16 levels": scale(train, 16),
    }
    evaluation = measure_inputs(test)
    for scale_name, dataset in by_scale.items():
        statistics = measure_inputs(dataset)
        assert find_scale_problem(statistics, evaluation), scale_name
        assert find_scale_problem(statistics, evaluation) == find_scale_problem(evaluation, statistics)


def test_black_pictures_match_every_scale() -> None:
    black = InputStatistics(kind="numbers", minimum=0, maximum=0, mean=0, deviation=0)
    assert find_scale_problem(black, measure_inputs(load_digits())) == ""


def test_indices_beside_numbers_are_reported() -> None:
    tokens = InputStatistics(kind="indices", minimum=0, maximum=96, mean=40, deviation=20)
    assert find_scale_problem(tokens, measure_inputs(load_digits())) == "indices beside numbers"
    assert find_scale_problem(tokens, replace(tokens, maximum=9000.0, mean=4000.0, deviation=2000.0)) == ""


@examples(20, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrays.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=st.floats(-1e6, 1e6, width=32)),
    st.integers(1, 12),
)
def test_statistics_are_those_of_all_values_however_they_are_read(
    inputs: npt.NDArray[np.float32], at_once: int
) -> None:
    dataset = Dataset(inputs=inputs, labels=np.zeros(len(inputs), np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "VALUES_AT_ONCE", at_once)
        statistics = measure_inputs(dataset)
    values = inputs.astype(np.float64)
    assert (statistics.minimum, statistics.maximum) == (values.min(), values.max())
    assert statistics.mean == pytest.approx(values.mean(), abs=1e-6)
    assert statistics.deviation == pytest.approx(values.std(), abs=1e-3)


def test_devices_report_statistics_of_every_source(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz", load_digits())
    assert describe_source(str(tmp_path / "a.npz")).inputs == measure_inputs(load_digits())
    np.savez(tmp_path / "text.npz", x=np.arange(12).reshape(3, 4), y=np.zeros(3, np.int64))
    text = describe_source(str(tmp_path / "text.npz")).inputs
    assert text is not None
    assert (text.kind, text.minimum, text.maximum, text.mean) == ("indices", 0, 11, 5.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"minimum": 2.0}, "minimum is 2, but must be at most maximum 1"),
        ({"maximum": 1e39}, "maximum is"),
        ({"minimum": float("nan")}, "minimum is nan, but must be a finite number"),
        ({"mean": 2.0}, "mean is 2, but must be from 0 to 1"),
        ({"mean": float("nan")}, "mean is nan, but must be a finite number"),
        ({"deviation": -0.1}, "deviation is -0.1, but values from 0 to 1 cannot"),
        ({"deviation": 0.6}, "deviation is 0.6, but values from 0 to 1 cannot have it"),
        ({"deviation": float("inf")}, "deviation is inf, but must be a finite number"),
        ({"kind": "indices", "minimum": -1.0}, "indices"),
    ],
)
def test_numbers_that_no_data_have_are_refused(changes: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {"kind": "numbers", "minimum": 0.0, "maximum": 1.0, "mean": 0.5, "deviation": 0.3}
    InputStatistics(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        InputStatistics(**{**fields, **changes})  # type: ignore[arg-type]
