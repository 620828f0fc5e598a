"""A replayed log gives the last row at or before a time, and starts again after its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.device_profiles.logs import LogRow, ResourceLog
from subfleet.device_profiles.replay import ReplayedLog
from subfleet.protocol.readings import Reading


def replay_times(*times_s: float) -> ReplayedLog:
    rows = tuple(LogRow(t_s=t_s, reading=Reading(memory_free_bytes=index)) for index, t_s in enumerate(times_s))
    return ReplayedLog(ResourceLog(device="d", source="s", licence="l", rows=rows))


@pytest.mark.parametrize(
    ("at_s", "index"), [(0, 0), (4.9, 0), (5, 1), (14.9, 1), (15, 2), (24.9, 2), (25, 0), (30, 1), (2500, 0), (2505, 1)]
)
def test_the_earlier_row_holds_and_the_log_wraps_around(at_s: float, index: int) -> None:
    # Rows at 10, 15 and 25 s: time 0 is the first row, and the last row lasts 10 s, as the row before it.
    assert replay_times(10, 15, 25).read(at_s).memory_free_bytes == index


def test_a_log_of_one_row_has_that_row_at_every_time() -> None:
    assert replay_times(3).read(1e9).memory_free_bytes == 0


@pytest.mark.parametrize("at_s", [-0.1, float("nan")])
def test_a_time_before_the_log_is_an_error(at_s: float) -> None:
    with pytest.raises(ValueError, match="log_time_s"):
        replay_times(0, 1).read(at_s)


@pytest.mark.slow
@given(
    times_s=st.lists(st.integers(0, 1000), min_size=2, max_size=20, unique=True).map(sorted),
    at_s=st.integers(0, 5000),
)
def test_replay_agrees_with_a_scan_of_the_rows(times_s: list[int], at_s: int) -> None:
    log = replay_times(*map(float, times_s))
    within_s = at_s % (times_s[-1] - times_s[0] + times_s[-1] - times_s[-2])
    last = max(index for index, t_s in enumerate(times_s) if t_s - times_s[0] <= within_s)
    assert log.read(at_s).memory_free_bytes == last


def _replay_rows(*rows: tuple[float, Reading]) -> ReplayedLog:
    return ReplayedLog(
        ResourceLog(
            device="d", source="s", licence="l", rows=tuple(LogRow(t_s=at_s, reading=reading) for at_s, reading in rows)
        )
    )


@pytest.mark.parametrize(("seconds", "memory_bytes"), [(0, 10), (1.9, 10), (2, 20), (7.9, 20), (8, 30), (23.9, 30)])
def test_the_low_of_a_log_is_a_quantile_over_its_time(seconds: float, memory_bytes: int) -> None:
    """The log has 30 bytes for 10 s, 10 for 2 s, 20 for 6 s, and 30 again for as long as the row before."""
    free = ((0.0, 30), (10.0, 10), (12.0, 20), (18.0, 30))
    log = _replay_rows(*((at_s, Reading(memory_free_bytes=free_bytes)) for at_s, free_bytes in free))
    assert log.period_s == 24
    # Fewer than 20 bytes are free for 2 of the 24 s, fewer than 30 for 8 s.
    assert log.low(seconds / 24).memory_free_bytes == memory_bytes


def test_a_log_without_memory_has_none_and_one_without_a_link_has_no_limit() -> None:
    rates = (None, 8.0, 9.0, None)
    log = _replay_rows(*((float(at_s), Reading(downlink_bps=rate)) for at_s, rate in enumerate(rates)))
    assert [log.low(share).downlink_bps for share in (0, 0.24, 0.25, 0.5)] == [8.0, 8.0, 9.0, None]
    assert log.low(0) == Reading(memory_free_bytes=0, downlink_bps=8.0)
    assert replay_times(3).low(0.9).memory_free_bytes == 0


def test_readings_of_an_unavailable_device_are_ignored() -> None:
    away = Reading(memory_free_bytes=1, available=False)
    log = _replay_rows((0.0, Reading(memory_free_bytes=9)), (1.0, away), (2.0, away))
    assert log.low(0).memory_free_bytes == 9
    assert _replay_rows((0.0, away), (1.0, away)).low(0).memory_free_bytes == 0


@pytest.mark.slow
@given(
    free_bytes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    quantile=st.floats(0, 1, exclude_max=True),
)
def test_a_log_is_below_its_low_for_at_most_that_fraction_of_its_time(free_bytes: list[int], quantile: float) -> None:
    rows = ((float(at_s), Reading(memory_free_bytes=free)) for at_s, free in enumerate(free_bytes))
    low = _replay_rows(*rows).low(quantile).memory_free_bytes
    assert low in free_bytes
    assert low is not None
    assert sum(free < low for free in free_bytes) <= quantile * len(free_bytes) + 1e-9
    assert sum(free <= low for free in free_bytes) >= quantile * len(free_bytes) - 1e-9


@pytest.mark.parametrize("quantile", [-0.1, 1, float("nan")])
def test_a_quantile_out_of_range_is_an_error(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        replay_times(0, 1).low(quantile)
