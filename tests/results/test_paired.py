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
    """SciPy's statistics, which take a second to load."""
    return pytest.importorskip("scipy.stats")


@pytest.mark.slow
@given(pairs=FIGURES)
def test_the_interval_is_students(stats: Any, pairs: list[tuple[float, float]]) -> None:
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    found = measure_difference(ours, theirs)
    differences = [one - other for one, other in pairs]
    mean = math.fsum(differences) / len(pairs)
    spread = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (len(pairs) - 1) / len(pairs))
    reach = float(stats.t.ppf(0.975, len(pairs) - 1)) * spread
    assert found.mean == pytest.approx(mean, abs=1e-12)
    assert found.high - found.mean == pytest.approx(reach, rel=1e-4, abs=1e-12)
    assert found.mean - found.low == pytest.approx(reach, rel=1e-4, abs=1e-12)


@pytest.mark.slow
@given(pairs=FIGURES)
def test_the_other_way_round_is_its_mirror_image(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    there, back = measure_difference(ours, theirs), measure_difference(theirs, ours)
    assert (back.mean, back.low, back.high) == pytest.approx((-there.mean, -there.high, -there.low), abs=1e-12)
    assert there.tie == back.tie


@pytest.mark.parametrize("count", [2, 3, 31, 35, 41, 60, 90, 121, 200])
def test_the_table_is_never_below_the_exact_point(stats: Any, count: int) -> None:
    ours = [float(place % 2) for place in range(count)]
    found = measure_difference(ours, [0.0] * count)
    exact = float(stats.t.ppf(0.975, count - 1))
    used = (found.high - found.mean) / (float(stats.tstd(ours)) / math.sqrt(count))
    assert exact * (1 - 1e-4) <= used <= exact * 1.02


def test_what_the_seeds_cannot_tell_is_a_tie() -> None:
    assert measure_difference([0.80, 0.82, 0.79], [0.79, 0.83, 0.80]).tie
    better = measure_difference([0.80, 0.82, 0.79], [0.70, 0.72, 0.70])
    assert not better.tie
    assert better.low > 0.08
    assert measure_difference([0.5, 0.5], [0.5, 0.5]).tie


@pytest.mark.parametrize(("ours", "theirs"), [([0.5], [0.4]), ([0.5, 0.6], [0.4]), ([], [])])
def test_too_few_figures_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="equally many, at least 2"):
        measure_difference(ours, theirs)
