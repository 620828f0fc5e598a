"""Paired differences with Student's t."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.reporting.comparison import measure_difference

FIGURES = st.lists(
    st.tuples(st.floats(-1, 1, allow_subnormal=False), st.floats(-1, 1, allow_subnormal=False)), min_size=2, max_size=12
)


@pytest.fixture(scope="module")
def stats() -> Any:
    """SciPy's statistics, which take a second to import."""
    return pytest.importorskip("scipy.stats")


@pytest.mark.slow
@given(pairs=FIGURES)
def test_the_interval_is_students(stats: Any, pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    difference = measure_difference(first, second)
    differences = [a - b for a, b in pairs]
    mean = math.fsum(differences) / len(pairs)
    spread = math.sqrt(math.fsum((a - mean) ** 2 for a in differences) / (len(pairs) - 1) / len(pairs))
    reach = float(stats.t.ppf(0.975, len(pairs) - 1)) * spread
    assert difference.mean == pytest.approx(mean, abs=1e-12)
    assert difference.high - difference.mean == pytest.approx(reach, rel=1e-4, abs=1e-12)
    assert difference.mean - difference.low == pytest.approx(reach, rel=1e-4, abs=1e-12)


@pytest.mark.slow
@given(pairs=FIGURES)
def test_swapped_figures_give_the_negated_interval(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    forward, backward = measure_difference(first, second), measure_difference(second, first)
    assert (backward.mean, backward.low, backward.high) == pytest.approx(
        (-forward.mean, -forward.high, -forward.low), abs=1e-12
    )
    assert forward.tie == backward.tie


@pytest.mark.parametrize("count", [2, 3, 31, 35, 41, 60, 90, 121, 200])
def test_the_table_is_never_below_the_exact_point(stats: Any, count: int) -> None:
    figures = [float(index % 2) for index in range(count)]
    difference = measure_difference(figures, [0.0] * count)
    exact_quantile = float(stats.t.ppf(0.975, count - 1))
    quantile = (difference.high - difference.mean) / (float(stats.tstd(figures)) / math.sqrt(count))
    assert exact_quantile * (1 - 1e-4) <= quantile <= exact_quantile * 1.02


def test_a_difference_that_may_be_zero_is_a_tie() -> None:
    assert measure_difference([0.80, 0.82, 0.79], [0.79, 0.83, 0.80]).tie
    better = measure_difference([0.80, 0.82, 0.79], [0.70, 0.72, 0.70])
    assert not better.tie
    assert better.low > 0.08
    assert measure_difference([0.5, 0.5], [0.5, 0.5]).tie


@pytest.mark.parametrize(("first", "second"), [([0.5], [0.4]), ([0.5, 0.6], [0.4]), ([], [])])
def test_too_few_figures_are_refused(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError, match="the same number, at least 2"):
        measure_difference(first, second)
