"""Resource logs are read back exactly as written; errors name the line and column."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.device_profiles.logs import COLUMNS, LogRow, ResourceLog, parse_log, read_log, write_log
from subfleet.protocol.errors import FileError
from subfleet.protocol.readings import Reading

amounts = st.none() | st.integers(0, 10**15)
rates = st.none() | st.floats(0, 1e15)
readings = st.builds(
    Reading,
    memory_free_bytes=amounts,
    cgroup_limit_bytes=amounts,
    downlink_bps=rates,
    uplink_bps=rates,
    latency_s=rates,
    cpu_load=rates,
    temperature_c=st.none() | st.floats(-300, 300),
    battery_fraction=st.none() | st.floats(0, 1),
    charging=st.none() | st.booleans(),
    network=st.none() | st.from_regex(r"[A-Za-z0-9_.-]{1,32}", fullmatch=True),
    available=st.booleans(),
)
lines = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(
    lambda text: text == text.strip() and len(text.splitlines()) == 1
)
times = st.lists(st.floats(0, 1e9), min_size=1, max_size=8, unique=True).map(sorted)


@st.composite
def logs(draw: st.DrawFn) -> ResourceLog:
    return ResourceLog(
        device=draw(lines),
        source=draw(lines),
        licence=draw(lines),
        notes=tuple(draw(st.lists(lines, max_size=3))),
        rows=tuple(LogRow(t_s=t_s, reading=draw(readings)) for t_s in draw(times)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.mark.slow
@given(log=logs())
def test_a_log_is_read_back_exactly_as_it_was_written(log: ResourceLog, folder: Path) -> None:
    path = folder / "round_trip.csv"
    write_log(path, log)
    assert read_log(path) == log


HEADER = "# subfleet-log 1\n# device: d\n# source: s\n# licence: l\n# note: n\n" + ",".join(COLUMNS) + "\n"
ROW = "0.0,1000,,5e6,,,,,,,wifi,1\n"


def test_an_empty_cell_is_unknown_and_a_written_one_has_its_unit() -> None:
    row = parse_log(HEADER + ROW, "a.csv").rows[0]
    assert row.reading == Reading(memory_free_bytes=1000, downlink_bps=5e6, network="wifi")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1"),
        ("t_s\n", "line 1"),
        (HEADER.replace("log 1", "log 2") + ROW, "line 1"),
        (HEADER.replace("# device: d\n", "") + ROW, "0 lines '# device"),
        (HEADER.replace("# note: n", "# device: e") + ROW, "2 lines '# device"),
        (HEADER.replace("# note: n", "# owner: n") + ROW, "line 5 names 'owner'"),
        (HEADER.replace("t_s,", "") + ROW, "line 6 must name the columns"),
        (HEADER, "rows is empty, but must have 1 or more"),
        (HEADER + ROW + "\n", "line 8 has 1 cells"),
        (HEADER + ROW.replace("1000", "1e3"), "line 7 column memory_free_bytes is '1e3'"),
        (HEADER + ROW.replace("1000", "-1"), "line 7: memory_free_bytes is -1"),
        (HEADER + ROW.replace("5e6", "nan"), "line 7 column downlink_bps is 'nan'"),
        (HEADER + ROW.replace("5e6", "1e999"), "line 7: downlink_bps is inf"),
        (HEADER + ROW.replace("0.0", ""), "line 7 column t_s is ''"),
        (HEADER + ROW.replace(",1\n", ",yes\n"), "line 7 column available is 'yes'"),
        (HEADER + ROW.replace("wifi", "wi fi"), "line 7: network is 'wi fi'"),
        (HEADER + ROW + ROW, "line 8 column t_s is 0.0, but must be above 0.0"),
    ],
)
def test_a_wrong_log_is_one_sentence_that_names_file_line_and_column(text: str, words: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_log(text, "a.csv")
    assert words in str(caught.value)
    assert "a.csv" in str(caught.value)


@pytest.mark.slow
@given(text=st.text(max_size=200), after=st.sampled_from(["", HEADER, HEADER + ROW]))
def test_reading_never_raises_anything_but_a_file_error(text: str, after: str) -> None:
    with contextlib.suppress(FileError):
        parse_log(after + text, "any.csv")


def test_a_missing_file_and_a_binary_one_are_file_errors(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"absent\.csv"):
        read_log(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match=r"binary\.csv"):
        read_log(tmp_path / "binary.csv")


def test_times_must_grow_and_header_lines_must_be_lines() -> None:
    row = LogRow(t_s=1.0, reading=Reading())
    with pytest.raises(ValueError, match="must grow"):
        ResourceLog(device="d", source="s", licence="l", rows=(row, row))
    with pytest.raises(ValueError, match="one line"):
        ResourceLog(device="d\ne", source="s", licence="l", rows=(row,))
    with pytest.raises(ValueError, match="finite"):
        LogRow(t_s=float("nan"), reading=Reading())


def test_a_log_above_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = ResourceLog(device="d", source="s", licence="l", rows=(LogRow(t_s=1.0, reading=Reading()),))
    path = tmp_path / "log.csv"
    write_log(path, log)
    size_bytes = path.stat().st_size
    monkeypatch.setattr("subfleet.device_profiles.logs.MAX_LOG_BYTES", size_bytes)
    assert read_log(path) == log
    monkeypatch.setattr("subfleet.device_profiles.logs.MAX_LOG_BYTES", size_bytes - 1)
    with pytest.raises(FileError, match=f"is above {size_bytes - 1} bytes; split it"):
        read_log(path)
