"""Samples are reshaped to the input shape of the model if all values keep their order."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.errors import DataError
from subfleet.tasks import Dataset, read_dataset, reshape_samples, shape_problem

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("shape", "input_shape", "problem"),
    [
        ((1, 49, 10), (49, 10), ""),
        ((1, 49, 10), (490,), ""),
        ((490,), (1, 49, 10), ""),
        ((49, 10), (49, 1, 10), ""),
        ((1, 1), (1,), ""),
        ((1, 49, 10), (10, 49), "the dimensions differ"),
        ((3, 32, 32), (32, 32, 3), "the dimensions differ"),
        ((1, 49, 10), (1, 49, 40), "the number of values differs"),
        ((5,), (6,), "the number of values differs"),
    ],
)
def test_samples_are_fed_where_their_values_keep_their_order(
    shape: tuple[int, ...], input_shape: tuple[int, ...], problem: str
) -> None:
    expected = f"have shape {shape}, but the model takes {input_shape}: {problem}" if problem else ""
    assert shape_problem(shape, input_shape) == expected


@given(shape=SHAPES, input_shape=SHAPES)
def test_shaping_keeps_every_value_in_its_place_or_is_refused(
    shape: tuple[int, ...], input_shape: tuple[int, ...]
) -> None:
    values = np.arange(2 * math.prod(shape), dtype=np.float32)
    dataset = Dataset(inputs=values.reshape(2, *shape), labels=np.zeros(2, np.int64))
    if shape_problem(shape, input_shape):
        with pytest.raises(DataError, match="samples have shape"):
            reshape_samples(dataset, input_shape, "samples")
        return
    fed = reshape_samples(dataset, input_shape, "samples")
    assert fed.sample_shape == input_shape
    assert fed.inputs.ravel().tolist() == values.tolist()
    assert shape_problem(input_shape, shape) == ""


def test_a_series_in_an_npz_file_is_fed_in_each_shape_that_holds_it(tmp_path: Path) -> None:
    series = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
    np.savez(tmp_path / "series.npz", x=series, y=np.array([0, 1]))
    dataset = read_dataset(str(tmp_path / "series.npz"))
    for shape in ((5, 3), (1, 5, 3), (15,)):
        assert np.array_equal(reshape_samples(dataset, shape, "samples").inputs, series.reshape(2, *shape))
