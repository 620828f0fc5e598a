"""Replay: the last row at or before a time, and from the start again after the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.device_profiles.logs import LogRow, ResourceLog
from subfleet.device_profiles.replay import ReplayedLog
from subfleet.protocol.readings import Reading


def replayed(*times_s: float) -> ReplayedLog:
    rows = tuple(LogRow(t_s=t_s, reading=Reading(memory_free_bytes=place)) for place, t_s in enumerate(times_s))
    return ReplayedLog(ResourceLog(device="d", source="s", licence="l", rows=rows))


@pytest.mark.parametrize(
    ("at_s", "place"), [(0, 0), (4.9, 0), (5, 1), (14.9, 1), (15, 2), (24.9, 2), (25, 0), (30, 1), (2500, 0), (2505, 1)]
)
def test_the_earlier_row_holds_and_the_log_wraps_around(at_s: float, place: int) -> None:
    # Rows at 10, 15 and 25; time 0 is the first row, and the last one holds for 10 s as the one before it did.
    assert replayed(10, 15, 25).read(at_s).memory_free_bytes == place


def test_a_log_of_one_row_holds_for_ever() -> None:
    assert replayed(3).read(1e9).memory_free_bytes == 0


@pytest.mark.parametrize("at_s", [-0.1, float("nan")])
def test_a_time_before_the_log_is_an_error(at_s: float) -> None:
    with pytest.raises(ValueError, match="log_time_s"):
        replayed(0, 1).read(at_s)


@given(
    times_s=st.lists(st.integers(0, 1000), min_size=2, max_size=20, unique=True).map(sorted),
    at_s=st.integers(0, 5000),
)
def test_replay_agrees_with_a_scan_of_the_rows(times_s: list[int], at_s: int) -> None:
    log = replayed(*map(float, times_s))
    within_s = at_s % (times_s[-1] - times_s[0] + times_s[-1] - times_s[-2])
    last = max(place for place, t_s in enumerate(times_s) if t_s - times_s[0] <= within_s)
    assert log.read(at_s).memory_free_bytes == last
