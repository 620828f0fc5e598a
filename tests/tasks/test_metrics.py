import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from subfleet.tasks.metrics import accuracy, cross_entropy

LOGITS = hnp.arrays(np.float32, st.tuples(st.integers(1, 20), st.integers(1, 9)), elements=st.floats(-50, 50, width=32))


def test_equal_logits_give_the_logarithm_of_the_class_count() -> None:
    assert cross_entropy(np.zeros((3, 10), np.float32), np.array([0, 4, 9])) == pytest.approx(math.log(10))


@pytest.mark.slow
@given(logits=LOGITS, shift=st.floats(-1e4, 1e4, width=32))
def test_loss_is_not_negative_and_ignores_a_shift(logits: npt.NDArray[np.float32], shift: float) -> None:
    labels = np.arange(len(logits)) % logits.shape[1]
    loss = cross_entropy(logits.astype(np.float64), labels)
    assert loss >= 0
    assert cross_entropy(logits.astype(np.float64) + shift, labels) == pytest.approx(loss, abs=1e-6)


@pytest.mark.slow
@given(logits=LOGITS)
def test_the_guess_itself_is_always_right(logits: npt.NDArray[np.float32]) -> None:
    assert accuracy(logits, logits.argmax(1)) == 1
    assert accuracy(logits, logits.argmax(1) + 1) == 0


def test_a_huge_logit_overflows_nothing() -> None:
    assert cross_entropy(np.array([[3e38, -3e38]], np.float32), np.array([0])) == 0


@pytest.mark.parametrize("shapes", [((0, 3), (0,)), ((2, 3), (3,)), ((2,), (2,)), ((2, 3), (2, 1))])
def test_tables_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    logits, labels = np.zeros(shapes[0]), np.zeros(shapes[1], np.int64)
    for metric in (accuracy, cross_entropy):
        with pytest.raises(ValueError, match="with one sample or more"):
            metric(logits, labels)
