"""Live readings of the resources that this process may use."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TypeVar

from subfleet.device.meters import Direction, TransferRate
from subfleet.device.process_limits import process_room_bytes
from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.readings import Reading

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

_UNLIMITED_BYTES = 2**60
"""Kernels write a number near 2**63 where there is no limit."""
_NETWORKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"ethernet": ("eth", "en"), "wifi": ("wl",), "cellular": ("ww", "rmnet", "ppp")}
)


def load_psutil() -> ModuleType:
    """Import psutil.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import psutil
    except ImportError as error:
        raise MissingExtraError("psutil", "edge") from error
    module: ModuleType = psutil
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHeadroom:
    """The limit and the free memory of the tightest control group.

    Attributes:
        limit_bytes: of that group.
        free_bytes: what the group may still take; page cache that the kernel would give up counts as free.
    """

    limit_bytes: int
    free_bytes: int


class ControlGroups:
    """Reads memory limits of control groups, versions 1 and 2, of this process and of every group above it.

    Args:
        root: where control groups are mounted.
        membership: the file that names this process's groups.
        controllers: the file in which the kernel tells what groups can limit.
        marks: files that container engines leave in each container.
    """

    def __init__(
        self,
        root: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
        controllers: Path = Path("/proc/cgroups"),
        marks: Sequence[Path] = (Path("/.dockerenv"), Path("/run/.containerenv")),
    ) -> None:
        self._root = root
        self._membership = membership
        self._controllers = controllers
        self._marks = marks

    def lacks_memory_limits(self) -> bool:
        """Whether this is a container and the kernel cannot limit its memory, so that its limit is void.

        Raspberry Pi OS starts its kernel so, and container engines say it once, when they start the container.
        """
        if not any(mark.exists() for mark in self._marks):
            return False
        try:
            lines = self._controllers.read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        # Name, hierarchy, number of groups, and 1 where it is enabled.
        enabled = {line.split()[0] for line in lines if not line.startswith("#") and line.split()[-1:] == ["1"]}
        unified = _read_words(self._root / "cgroup.controllers") | _read_words(
            self._root / "unified/cgroup.controllers"
        )
        return bool(lines) and "memory" not in enabled | unified

    def headroom(self) -> MemoryHeadroom | None:
        """The tightest limit; None where there is none."""
        limits = [
            room for folder, version in self._list_folders() if (room := _read_headroom(folder, version)) is not None
        ]
        return min(limits, key=lambda room: room.free_bytes, default=None)

    def _list_folders(self) -> list[tuple[Path, int]]:
        try:
            lines = self._membership.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        folders: list[tuple[Path, int]] = []
        for line in lines:
            _, _, entry = line.partition(":")
            controllers, _, inner = entry.partition(":")
            if "memory" in controllers.split(","):
                folders += [(folder, 1) for folder in _list_parents(self._root / "memory", inner)]
            elif controllers == "":
                folders += [(folder, 2) for folder in _list_parents(self._root, inner)]
                folders += [(folder, 2) for folder in _list_parents(self._root / "unified", inner)]
        return folders


def _list_parents(root: Path, inner: str) -> list[Path]:
    # Inside a container the path may be the host's, which is not mounted: then only the root is there to be read.
    parts = [part for part in inner.split("/") if part not in ("", ".", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _read_headroom(folder: Path, version: int) -> MemoryHeadroom | None:
    # Above memory.high the kernel takes a group's memory back and slows it down: nobody can train there, either.
    limit_names, usage_name, cache_name = (
        (("memory.max", "memory.high"), "memory.current", "inactive_file")
        if version == 2
        else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
    )
    limits = [limit for name in limit_names if (limit := _read_number(folder / name)) is not None]
    limit_bytes, usage_bytes = min(limits, default=_UNLIMITED_BYTES), _read_number(folder / usage_name)
    if usage_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    used_bytes = max(usage_bytes - _read_stat(folder / "memory.stat", cache_name), 0)
    return MemoryHeadroom(limit_bytes=limit_bytes, free_bytes=max(limit_bytes - used_bytes, 0))


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _read_words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    number = values.get(name, "0").strip()
    return int(number) if number.isdigit() else 0


class LiveMeter:
    """Reads this device. What the system hides from this process (phones hide much) is unknown.

    Args:
        groups: the control groups that limit this process.
        available_bytes: memory that a new process could take without swapping; psutil's figure where it is None.
        held_bytes: what is kept for the next training and counts as part of it: free memory for a training.
        trains_in: id of the process that trains, under the limits of this one; None is this one.

    Raises:
        MissingExtraError: psutil is not installed.
    """

    def __init__(
        self,
        groups: ControlGroups | None = None,
        available_bytes: Callable[[], int] | None = None,
        held_bytes: Callable[[], int] = lambda: 0,
        trains_in: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._psutil = load_psutil()
        self._groups = groups or ControlGroups()
        self._available_bytes = available_bytes or self._read_available_bytes
        self._held_bytes = held_bytes
        self._trains_in = trains_in
        self._rates: dict[Direction, TransferRate] = {"down": TransferRate(), "up": TransferRate()}
        _read_or_none(self._read_cpu_load)  # the load is measured from here to the next call

    def read(self, log_time_s: float | None) -> tuple[float | None, Reading]:
        """See `Meter.read`; the log's time means nothing to a live device."""
        del log_time_s
        headroom = self._groups.headroom()
        rooms_bytes = [
            _read_or_none(self._available_bytes),
            None if headroom is None else headroom.free_bytes,
            _read_or_none(lambda: process_room_bytes(self._psutil, self._trains_in())),
        ]
        battery_fraction, charging = _read_or_none(self._read_battery) or (None, None)
        return None, Reading(
            memory_free_bytes=min(
                (room + self._held_bytes() for room in rooms_bytes if room is not None), default=None
            ),
            cgroup_limit_bytes=None if headroom is None else headroom.limit_bytes,
            downlink_bps=self._rates["down"].bps,
            uplink_bps=self._rates["up"].bps,
            cpu_load=_read_or_none(self._read_cpu_load),
            temperature_c=_read_or_none(self._read_temperature),
            battery_fraction=battery_fraction,
            charging=charging,
            network=_read_or_none(self._read_network),
        )

    def low(self, quantile: float) -> Reading | None:
        """See `Meter.low`; nobody knows what this device will have."""
        del quantile
        return None

    def note_transfer(self, direction: Direction, size_bytes: int, now_s: float) -> None:
        """See `Meter.note_transfer`."""
        self._rates[direction].note(size_bytes, now_s)

    def memory_total_bytes(self) -> int:
        """Memory of the device."""
        return int(self._psutil.virtual_memory().total)

    def cores(self) -> int:
        """Number of cores of the device, 1 if it is unknown."""
        return self._psutil.cpu_count() or 1

    def _read_available_bytes(self) -> int:
        return int(self._psutil.virtual_memory().available)

    def _read_cpu_load(self) -> float:
        return min(max(float(self._psutil.cpu_percent(interval=None)) / 100, 0.0), 1.0)

    def _read_temperature(self) -> float | None:
        read = getattr(self._psutil, "sensors_temperatures", None)  # not there on macOS and Windows
        sensors = read() if read is not None else {}
        readings = [float(entry.current) for entries in sensors.values() for entry in entries]
        return max(filter(math.isfinite, readings), default=None)

    def _read_battery(self) -> tuple[float | None, bool | None]:
        read = getattr(self._psutil, "sensors_battery", None)
        battery = read() if read is not None else None
        if battery is None or not math.isfinite(battery.percent):
            return None, None
        return min(max(battery.percent / 100, 0.0), 1.0), battery.power_plugged

    def _read_network(self) -> str | None:
        up = [name for name, state in self._psutil.net_if_stats().items() if state.isup]
        for kind, prefixes in _NETWORKS.items():
            if any(name.startswith(prefixes) for name in up):
                return kind
        return None


def _read_or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    # psutil lets through whatever a system's files and calls answer: OSError, RuntimeError, KeyError, ValueError ...
    except Exception as error:  # noqa: BLE001 - a device whose fan cannot be read can still train
        _LOG.debug("a reading is unknown: %s: %s", type(error).__name__, error)
        return None
