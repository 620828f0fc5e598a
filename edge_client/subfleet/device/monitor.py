"""Live readings of the resources that this process may use."""

import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import TypeVar

from subfleet.device.control_groups import ControlGroups
from subfleet.device.meters import Direction, TransferRate
from subfleet.device.process_limits import process_room_bytes
from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.readings import Reading

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

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
