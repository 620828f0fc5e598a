"""Live readings: control groups of both versions in made-up folders, rates of made-up transfers."""

import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.device.control_groups import ControlGroups, MemoryHeadroom
from subfleet.device.meters import ReplayMeter, TransferRate
from subfleet.device.monitor import LiveMeter
from subfleet.device_profiles.logs import LogRow, ResourceLog
from subfleet.device_profiles.replay import ReplayedLog
from subfleet.protocol.readings import Reading

V1 = {"memory.limit_in_bytes": "1000\n", "memory.usage_in_bytes": "700\n", "memory.stat": "total_inactive_file 100\n"}
V2 = {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 5\ninactive_file 100\n"}


def groups(tmp_path: Path, membership: str, files: dict[str, dict[str, str]]) -> ControlGroups:
    (tmp_path / "membership").write_text(membership)
    for folder, content in files.items():
        path = tmp_path / "cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            (path / name).write_text(text)
    return ControlGroups(tmp_path / "cgroup", tmp_path / "membership")


HEADROOM = MemoryHeadroom(limit_bytes=1000, free_bytes=400)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/app\n", {"app": V2}, HEADROOM),
        ("0::/host/path\n", {"": V2}, HEADROOM),  # a container sees its own group as the root
        ("4:memory:/app\n1:cpu:/x\n", {"memory/app": V1}, HEADROOM),
        ("4:memory:/host/path\n", {"memory": V1}, HEADROOM),
        ("4:cpu,memory:/app\n", {"memory/app": V1}, HEADROOM),
        ("0::/app\n", {"app": V2 | {"memory.max": "max\n"}}, None),
        ("4:memory:/app\n", {"memory/app": V1 | {"memory.limit_in_bytes": "9223372036854771712\n"}}, None),
        ("0::/a/b\n", {"a": V2, "a/b": V2 | {"memory.max": "max\n"}}, HEADROOM),  # the parent group limits too
        ("0::/a/b\n", {"a": V2, "a/b": V2 | {"memory.max": "650\n"}}, MemoryHeadroom(limit_bytes=650, free_bytes=50)),
        ("0::/app\n", {"app": V2 | {"memory.current": "5000\n"}}, MemoryHeadroom(limit_bytes=1000, free_bytes=0)),
        ("0::/app\n", {"app": {**V2, "memory.stat": "\n"}}, MemoryHeadroom(limit_bytes=1000, free_bytes=300)),
        ("0::/../../etc\n", {"": V2}, HEADROOM),
        # Above memory.high the kernel reclaims memory, so it is a limit with or without memory.max.
        ("0::/app\n", {"app": V2 | {"memory.high": "800\n"}}, MemoryHeadroom(limit_bytes=800, free_bytes=200)),
        (
            "0::/app\n", {"app": V2 | {"memory.max": "max\n", "memory.high": "800\n"}},
            MemoryHeadroom(limit_bytes=800, free_bytes=200),
        ),
        ("0::/app\n", {"app": V2 | {"memory.high": "max\n"}}, HEADROOM),
        ("0::/app\n", {"app": V2 | {"memory.high": "5000\n"}}, HEADROOM),
        ("0::/app\n", {"app": V2 | {"memory.high": "100\n"}}, MemoryHeadroom(limit_bytes=100, free_bytes=0)),
        ("0::/a/b\n", {"a": V2 | {"memory.high": "650\n"}, "a/b": V2}, MemoryHeadroom(limit_bytes=650, free_bytes=50)),
        ("4:memory:/app\n", {"memory/app": V1 | {"memory.high": "650\n"}}, HEADROOM),
        ("0::/app\n", {}, None),
        ("nonsense\n", {"": {}}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_the_tightest_control_group_counts(
    tmp_path: Path, membership: str, files: dict[str, dict[str, str]], expected: MemoryHeadroom | None
) -> None:
    assert groups(tmp_path, membership, files).headroom() == expected


CGROUPS = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t80\t1\nmemory\t0\t80\t{enabled}\n"


@pytest.mark.parametrize(
    ("mark", "kernel", "controllers", "lacking"),
    [
        (True, CGROUPS.format(enabled=0), "cpuset cpu io pids\n", True),
        (True, CGROUPS.format(enabled=0), None, True),
        (True, CGROUPS.format(enabled=1), "cpuset cpu io pids\n", False),  # enabled, but not delegated to this group
        (True, "#subsys_name\thierarchy\tnum_cgroups\tenabled\n", "cpu memory\n", False),
        (True, "", None, False),
        (True, None, None, False),
        (False, CGROUPS.format(enabled=0), "cpu\n", False),  # outside a container there is no limit to lack
    ],
)
def test_a_container_without_memory_limits_is_recognised(
    tmp_path: Path, *, mark: bool, kernel: str | None, controllers: str | None, lacking: bool
) -> None:
    for name, text in (("mark", "" if mark else None), ("cgroups", kernel), ("cgroup.controllers", controllers)):
        if text is not None:
            (tmp_path / name).write_text(text)
    groups = ControlGroups(tmp_path, tmp_path / "membership", tmp_path / "cgroups", [tmp_path / "mark"])
    assert groups.lacks_memory_limits() is lacking


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert ControlGroups(tmp_path / "none", tmp_path / "absent").headroom() is None


@pytest.mark.parametrize(("available_bytes", "free_bytes"), [(300, 300), (5000, 400)])
def test_free_memory_is_the_minimum_of_system_and_control_group(
    tmp_path: Path, available_bytes: int, free_bytes: int
) -> None:
    meter = LiveMeter(groups(tmp_path, "0::/app\n", {"app": V2}), available_bytes=lambda: available_bytes)
    log_time_s, reading = meter.read(12.0)
    assert log_time_s is None
    assert (reading.memory_free_bytes, reading.cgroup_limit_bytes) == (free_bytes, 1000)


def test_memory_held_for_the_next_training_counts_as_free(tmp_path: Path) -> None:
    available, held = lambda: 300, lambda: 50
    meter = LiveMeter(groups(tmp_path, "0::/app\n", {"app": V2}), available_bytes=available, held_bytes=held)
    assert meter.read(None)[1].memory_free_bytes == 350
    assert LiveMeter(ControlGroups(tmp_path, tmp_path / "absent"), held_bytes=held).read(None)[1].memory_free_bytes


def test_this_machine_can_be_read() -> None:
    meter = LiveMeter()
    _, reading = meter.read(None)
    assert 0 < (reading.memory_free_bytes or 0) <= meter.memory_total_bytes()
    assert reading.downlink_bps is None
    assert meter.cores() >= 1


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), RuntimeError("no /proc/stat"), KeyError("x")]
)
def test_a_reading_that_the_system_refuses_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    for name in ("cpu_percent", "sensors_temperatures", "sensors_battery", "net_if_stats", "virtual_memory"):
        monkeypatch.setattr(psutil, name, refuse)
    assert LiveMeter(ControlGroups(tmp_path, tmp_path / "absent")).read(None) == (None, Reading())
    _, limited = LiveMeter(groups(tmp_path, "0::/app\n", {"app": V2})).read(None)
    assert limited == Reading(memory_free_bytes=400, cgroup_limit_bytes=1000)


def test_an_invalid_sensor_reading_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(current=math.nan)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"a": [broken, SimpleNamespace(current=41.0)]})
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(percent=math.nan, power_plugged=True))
    _, reading = LiveMeter().read(None)
    assert (reading.temperature_c, reading.battery_fraction, reading.charging) == (41.0, None, None)


def test_a_meter_learns_each_direction_from_its_own_transfers() -> None:
    meter = LiveMeter()
    for index in range(5):
        meter.note_transfer("down", 1000, index * 0.1)
    _, reading = meter.read(None)
    assert reading.downlink_bps == pytest.approx(80_000)
    assert reading.uplink_bps is None


def rate_after(*transfers: tuple[int, float]) -> float | None:
    rate = TransferRate()
    for size_bytes, at_s in transfers:
        rate.note(size_bytes, at_s)
    return rate.bps


def test_a_rate_is_unknown_before_a_burst_has_lasted() -> None:
    assert rate_after() is None
    assert rate_after((1000, 0.0)) is None
    assert rate_after((1000, 0.0), (1000, 0.001)) is None
    assert rate_after((1000, 0.0), (1000, 1.5)) is None  # two bursts of one arrival each


def test_newer_bursts_count_more_and_pauses_do_not_count() -> None:
    slow = [(1000, 0.0), (1000, 0.5), (1000, 1.0)]
    fast = [(1000, 60.0), (4000, 60.5), (4000, 61.0)]
    assert rate_after(*slow) == pytest.approx(16_000)
    assert rate_after(*slow, *fast) == pytest.approx(16_000 + 0.3 * (64_000 - 16_000))


@given(size_bytes=st.integers(1, 10**6), step_s=st.floats(0.03, 0.9), count=st.integers(2, 30))
def test_a_steady_link_is_measured_exactly(size_bytes: int, step_s: float, count: int) -> None:
    assert rate_after(*((size_bytes, index * step_s) for index in range(count))) == pytest.approx(
        8 * size_bytes / step_s
    )


def test_a_replayed_log_is_read_at_the_announced_time_and_goes_on() -> None:
    readings = (
        Reading(memory_free_bytes=1, downlink_bps=5e6, uplink_bps=1e6),
        Reading(memory_free_bytes=2, downlink_bps=0.0),
    )
    rows = tuple(LogRow(t_s=5.0 * index, reading=reading) for index, reading in enumerate(readings))
    log = ResourceLog(device="d", source="s", licence="l", rows=rows)
    now_s = 100.0
    meter = ReplayMeter(ReplayedLog(log), lambda: now_s)
    assert meter.read(None) == (0.0, readings[0])
    assert meter.read(7.0) == (7.0, readings[1])
    meter.note_transfer("down", 10**9, 0.0)
    now_s = 103.0
    assert meter.read(None) == (7.0, readings[1])
    assert meter.find_log_time(104.0) == 11.0
    assert meter.read(7.0)[0] == 7.0
    assert meter.find_log_time(104.0) == 11.0, "a repeated announcement does not set the log back"
    assert meter.read(20.0)[0] == 20.0
    assert meter.find_log_time(104.0) == 21.0
