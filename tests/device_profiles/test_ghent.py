"""Reading bandwidth traces and joining them with memory."""

import gzip
from pathlib import Path

import pytest

from subfleet.device_profiles.ghent import BandwidthSample, average_bps, join_rows, read_ghent
from subfleet.protocol.errors import FileError

TEXT = "trace,t_s,dur_s,dl_mbps\nbus,0,2,10\nbus,2,1,40\nfoot,0,1,7\n"


@pytest.mark.parametrize("name", ["traces.csv", "traces.csv.gz"])
def test_one_trace_is_read_in_bits_per_second(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(TEXT.encode()) if name.endswith(".gz") else TEXT.encode())
    assert read_ghent(path, "bus") == (
        BandwidthSample(t_s=0, duration_s=2, downlink_bps=10e6),
        BandwidthSample(t_s=2, duration_s=1, downlink_bps=40e6),
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.replace("dl_mbps", "mbps"), "line 1 must name the columns"),
        (TEXT.replace("bus,2,1,40", "bus,2,1,fast"), "line 3 must hold"),
        (TEXT.replace("bus,2,1,40", "bus,2,1"), "line 3 must hold"),
        (TEXT.replace("bus,2,1,40", "bus,2,0,40"), "line 3 has duration 0"),
        (TEXT.replace("bus,2,1,40", "bus,2,1,-4"), "line 3 has duration 1 and rate -4"),
        (TEXT.replace("bus,2,1,40", "bus,2,1,nan"), "line 3 has duration 1 and rate nan"),
        (TEXT.replace("bus", "tram"), "has no trace 'bus'"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "traces.csv"
    path.write_text(content)
    with pytest.raises(FileError) as caught:
        read_ghent(path, "bus")
    assert words in str(caught.value)


def test_a_missing_and_a_damaged_file_are_file_errors(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_ghent(tmp_path / "absent.csv", "bus")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(TEXT.encode())[:-6])
    with pytest.raises(FileError, match="cannot be read"):
        read_ghent(tmp_path / "cut.csv.gz", "bus")
    whole = gzip.compress(TEXT.encode())
    (tmp_path / "cut.csv.gz").write_bytes(whole[:12] + bytes(255 - value for value in whole[12:30]) + whole[30:])
    with pytest.raises(FileError, match="cannot be read"):
        read_ghent(tmp_path / "cut.csv.gz", "bus")


SAMPLES = (
    BandwidthSample(t_s=0, duration_s=2, downlink_bps=10e6),
    BandwidthSample(t_s=2, duration_s=1, downlink_bps=40e6),
)


@pytest.mark.parametrize(
    ("start_s", "end_s", "mean"), [(0, 2, 10e6), (0, 3, 20e6), (1, 3, 25e6), (2.5, 9, 40e6), (3, 4, None)]
)
def test_the_mean_is_weighted_by_time_and_unknown_where_nothing_was_measured(
    start_s: float, end_s: float, mean: float | None
) -> None:
    assert average_bps(SAMPLES, start_s, end_s) == mean


def test_a_join_has_a_row_for_each_memory_value_and_starts_inside_the_trace() -> None:
    rows = join_rows(SAMPLES, [100, 200, 300], start_s=1.0, step_s=1.0, uplink_fraction=0.5, network="wifi")
    assert [row.t_s for row in rows] == [0.0, 1.0, 2.0]
    assert [row.reading.memory_free_bytes for row in rows] == [100, 200, 300]
    assert [row.reading.downlink_bps for row in rows] == [10e6, 40e6, None]
    assert [row.reading.uplink_bps for row in rows] == [5e6, 20e6, None]
    assert {row.reading.network for row in rows} == {"wifi"}
