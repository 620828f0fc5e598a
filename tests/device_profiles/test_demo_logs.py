"""The shipped logs are complete, state how they were made, and can be reproduced byte for byte from the same data."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from subfleet.device_profiles import LOGS, PROFILES, find_demo_log, load_log
from subfleet.protocol.errors import FileError

ROOT = Path(__file__).parents[2]
DATA = os.environ.get("SUBFLEET_DATA", "")
# The free memory of each device, in megabytes.
RANGES_MB = {
    "raspberry_pi_zero_2_w": (60, 110),
    "raspberry_pi_4": (700, 1500),
    "android_phone": (300, 900),
    "jetson_orin_nano": (3000, 5000),
    "laptop": (6000, 9000),
}


@pytest.mark.parametrize("name", sorted(LOGS))
def test_a_shipped_log_states_its_origin_and_stays_in_its_range(name: str) -> None:
    log = load_log(name)
    low_mb, high_mb = RANGES_MB[name]
    assert log.device == name
    assert name in PROFILES
    assert "van der Hooft" in log.source
    assert "memory: generated" in log.source
    assert "LICENSE.ghent" in log.licence
    assert any("app_switch(seed=" in note for note in log.notes)
    assert log.rows[-1].t_s >= 540
    for row in log.rows:
        assert low_mb * 1_000_000 - 4096 <= (row.reading.memory_free_bytes or 0) <= high_mb * 1_000_000
        assert row.reading.downlink_bps
        assert row.reading.uplink_bps == pytest.approx(row.reading.downlink_bps / 4, abs=1)


def test_the_licence_of_the_traces_is_shipped_with_the_logs() -> None:
    text = (find_demo_log("laptop").parent / "LICENSE.ghent").read_text()
    assert "BSD 2-Clause" in text
    assert "Copyright (c)" in text


def test_the_smallest_board_cites_the_source_of_its_memory() -> None:
    (note,) = [note for note in load_log("raspberry_pi_zero_2_w").notes if note.startswith("range of free memory")]
    assert "120 MiB" in note
    assert "https://github.com/tiny-pilot/tinypilot/issues/1392" in note


def test_the_phone_has_large_swings() -> None:
    free = [row.reading.memory_free_bytes or 0 for row in load_log("android_phone").rows]
    assert max(free) > 2 * min(free)


def test_an_unknown_log_lists_the_known_ones() -> None:
    with pytest.raises(FileError, match="android_phone"):
        load_log("toaster")
    with pytest.raises(FileError, match="cannot be read"):
        load_log("x" * 5000)
    with pytest.raises(FileError, match="android_phone"):
        find_demo_log("toaster")


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="SUBFLEET_DATA names no folder with the bandwidth traces")
def test_the_script_makes_the_shipped_bytes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_demo_logs", ROOT / "scripts" / "make_demo_logs.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # the annotations of its records are looked up there
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    assert script.main() == 0
    for name in LOGS:
        assert (tmp_path / f"{name}.csv").read_bytes() == find_demo_log(name).read_bytes()
