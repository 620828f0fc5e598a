"""What an emulated device takes: its log's link and its profile's pace, moment by moment."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from emulation.batch_cases import LARGE_BYTES, client, experiment
from hypothesis import assume, example, given
from hypothesis import strategies as st

from subfleet.device.timing import ReplayedTiming
from subfleet.device_profiles import LogRow, ReplayedLog, ResourceLog
from subfleet.emulation.batch.agenda import Agenda, LogicalClock
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.protocol.readings import Reading
from subfleet.settings.sections import Deadlines

ROUNDING_S = 1e-9
rows = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.0, 1.0, 3.0, 10.0, math.inf])), min_size=1, max_size=6)


def make_log(*readings: Reading, step_s: float = 10.0) -> ResourceLog:
    timed = tuple(LogRow(t_s=step_s * number, reading=reading) for number, reading in enumerate(readings))
    return ResourceLog(device="virtual", source="a test", licence="none", rows=timed)


def link(bps: float, **more: object) -> Reading:
    return Reading(memory_free_bytes=10**9, downlink_bps=bps, uplink_bps=bps, **more)  # type: ignore[arg-type]


def make_timing(*readings: Reading, macs_per_s: float | None = None) -> ReplayedTiming:
    return ReplayedTiming(
        log=ReplayedLog(make_log(*readings)),
        macs_per_s=macs_per_s,
        sample_count=10,
        held_out_count=2,
    )


def replay_rates(given_rows: list[tuple[int, float]]) -> tuple[ReplayedLog, Callable[[Reading], float]]:
    """A log of rows, each with its seconds and its rate, and what reads the rate."""
    ends_s = tuple(accumulate(seconds for seconds, _ in given_rows))
    rates = dict(zip((0, *ends_s), (rate for _, rate in given_rows), strict=False))
    times = tuple(LogRow(t_s=float(at_s), reading=Reading(memory_free_bytes=at_s)) for at_s in rates)
    log = ReplayedLog(ResourceLog(device="virtual", source="a test", licence="none", rows=times))
    return log, lambda reading: rates[reading.memory_free_bytes or 0]


@given(rows, st.floats(0.0, 30.0), st.integers(0, 300))
@example([(1, 0.0), (2, 0.0), (5, 0.0), (2, 0.0), (1, math.inf)], 1.1486013668694053, 1)
def test_a_rate_that_changes_adds_up_to_the_amount(
    given_rows: list[tuple[int, float]], start_s: float, amount: int
) -> None:
    log, rate_at = replay_rates(given_rows)
    took_s = log.measure_duration(amount, rate_at, start_s)
    if amount and not any(rate for _, rate in given_rows):
        assert math.isinf(took_s)
        return
    # Step by step, each so short that the rate changes at its ends alone.
    borders = sorted(
        {start_s, start_s + took_s, *(border for border in range(4000) if start_s < border < start_s + took_s)}
    )
    moved = sum(rate_at(log.read((left + right) / 2)) * (right - left) for left, right in pairwise(borders))
    # An infinite rate may begin at the very end, which rounding may put before its row.
    assert moved == pytest.approx(amount) or (amount and math.isinf(rate_at(log.read(start_s + took_s + ROUNDING_S))))


@given(rows, st.floats(0.0, 30.0), st.integers(0, 300), st.integers(0, 300))
@example([(1, 0.0), (5, 10.0), (2, 0.0)], 4.8, 4, 8)  # they end with a row, before one in which nothing moves
def test_two_amounts_one_after_the_other_take_as_long_as_both_at_once(
    given_rows: list[tuple[int, float]], start_s: float, first: int, second: int
) -> None:
    log, rate_at = replay_rates(given_rows)
    took_s = log.measure_duration(first, rate_at, start_s)
    assume(math.isfinite(took_s))
    both_s = took_s + log.measure_duration(second, rate_at, start_s + took_s)
    assert both_s == pytest.approx(log.measure_duration(first + second, rate_at, start_s), abs=2 * ROUNDING_S)


def test_a_transfer_follows_the_link() -> None:
    timing = make_timing(link(8000.0 * 2), link(80_000.0))
    assert timing.transfer_s("up", 30_000, 0.0) == pytest.approx(10.0 + 1.0)
    assert timing.transfer_s("down", 30_000, 5.0) == pytest.approx(5.0 + 2.0)
    assert make_timing(Reading()).transfer_s("up", 10**9, 0.0) == 0.0, "an unknown link"
    assert make_timing(link(8e6, latency_s=0.25)).transfer_s("up", 10**6, 0.0) == pytest.approx(1.25)


def test_nothing_moves_while_the_device_is_away() -> None:
    timing = make_timing(link(80_000.0), link(80_000.0, available=False), macs_per_s=1.0)
    assert timing.transfer_s("down", 150_000, 0.0) == pytest.approx(10.0 + 10.0 + 5.0)
    gone = make_timing(link(80_000.0, available=False), macs_per_s=1.0)
    assert math.isinf(gone.transfer_s("down", 1, 0.0))


def test_functions_of_an_agenda_are_called_in_order_unless_cancelled() -> None:
    agenda, clock, called = Agenda(), LogicalClock(), list[str]()
    agenda.add(2.0, lambda: called.append("late"))
    number = agenda.add(1.0, lambda: called.append("never"))
    agenda.add(1.0, lambda: called.append("first"))
    agenda.add(1.0, lambda: called.append("second"))
    agenda.cancel(number)
    assert agenda.next_s == 1.0
    agenda.run(clock())
    assert called == []
    clock.advance(1.5)
    agenda.run(clock())
    assert called == ["first", "second"]
    agenda.cancel(number)
    clock.advance(1.0)
    assert clock() == 1.5, "time never goes back"
    agenda.run(9.0)
    assert (called[-1], agenda.next_s) == ("late", math.inf)


def with_link(device: EmulatedDevice, uplink_bps: float) -> EmulatedDevice:
    log_rows = [replace(row, reading=replace(row.reading, uplink_bps=uplink_bps)) for row in device.log.rows]
    return replace(device, log=replace(device.log, rows=tuple(log_rows)))


def with_pace(device: EmulatedDevice, macs_per_s: float) -> EmulatedDevice:
    return replace(device, profile=replace(device.profile, macs_per_s=macs_per_s))


def with_power(device: EmulatedDevice, training_watts: float) -> EmulatedDevice:
    return replace(device, profile=replace(device.profile, training_watts=training_watts))


def statuses(result: BatchResult) -> list[dict[str, str]]:
    return [{row.client_id: row.status for row in record.clients} for record in result.rounds]


def race(*devices: EmulatedDevice) -> GatheredRun:
    base = experiment(rounds=2, deadlines=Deadlines(round_s=5.0), communication_s=1e6, rates=(1.0,))
    return replace(base, devices=devices)


@pytest.mark.slow
@pytest.mark.export
def test_who_is_late_follows_from_links_and_not_from_the_order_of_the_file(exports: ExportPool) -> None:
    fast = [with_link(client(name, index, LARGE_BYTES), 1e6) for index, name in enumerate(("ada", "bob"))]
    slow = with_link(client("cyd", 2, LARGE_BYTES), 16_000.0)
    first, second = (run_batch(race(*order), exports) for order in ((*fast, slow), (slow, *fast)))
    assert first.model == second.model
    assert statuses(first) == statuses(second)
    for status in statuses(first):
        assert status.pop("cyd").startswith("missing")
        assert status == {"ada": "aggregated", "bob": "aggregated"}


@pytest.mark.slow
@pytest.mark.export
def test_training_takes_what_the_pace_says(exports: ExportPool) -> None:
    fast, slow = with_pace(client("ada", 0, LARGE_BYTES), 1e9), with_pace(client("bob", 1, LARGE_BYTES), 2e6)
    stuck = with_pace(client("cyd", 2, LARGE_BYTES), 1e3)
    result = run_batch(race(with_power(fast, 4.0), slow, stuck), exports)
    for record in result.rounds:
        rows = {row.client_id: row for row in record.clients}
        links_s = [8 * rows[name].bytes_down / 1e7 + 8 * rows[name].bytes_up / 1e6 for name in ("ada", "bob")]
        steps_s = [
            3 * rows[name].forward_macs * rows[name].sample_passes / pace for name, pace in (("ada", 1e9), ("bob", 2e6))
        ]
        assert [rows[name].took_s for name in ("ada", "bob")] == pytest.approx(
            [a + b for a, b in zip(links_s, steps_s, strict=True)]
        )
        assert rows["ada"].training_joules == pytest.approx(4.0 * steps_s[0])
        assert rows["bob"].training_joules is None, "its profile does not say what it takes"
        assert steps_s[1] > 1.0 > steps_s[0], "the paces make the difference"
        assert rows["cyd"].status.startswith("refused: compute"), "it would need an hour"
