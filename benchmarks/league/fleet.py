"""The league's fleet: six kinds of device with measured memory, each client on a measured 4G link.

Free memory is that of a phone under memory pressure and of the same without, of a 1 GB phone while it plays video, and
of Raspberry Pis of 2, 4 and 8 GB. The link is a trace of the Ghent 4G/LTE logs, another one for each client; they have
the downlink alone, and the uplink is taken as a fifth of it.

One thing is scaled. The devices' memory differs by a factor of 100, the league's subnets by one of 6, and nobody trains
a network of 600,000 parameters on a device's whole memory. So each kind gives that share of its free memory whose
median over its log is `median_budget_bytes`: from what carries the smallest subnets to what carries the whole network.
How memory moves around that median is the log's own. Links are not scaled; a client gives `COMMUNICATION_S` seconds of
its link to a round, in which a good moment moves the whole network and a bad one does not.
"""

import csv
import gzip
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from subfleet.device_profiles import DeviceProfile, ResourceLog
from subfleet.device_profiles.ghent import CITATION, BandwidthSample, join_rows, read_ghent
from subfleet.protocol.readings import Reading

__all__ = ["CLIENTS", "COMMUNICATION_S", "KINDS", "Kind", "LeagueDevice", "devices", "without_limits"]

CLIENTS = 50
COMMUNICATION_S = 4.0
STEP_S = 5.0
"""Seconds between two rows of the logs."""
_TRACES = 40
_KIB, _MIB = 2**10, 2**20
_PLENTY = 10**12
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of device.

    Attributes:
        name: its tier in the tables.
        file: of its memory log, below `memory/`.
        free_bytes: a row of that file to free memory; None where the row is another kind's.
        every: rows of the file for one of our steps, as they are 1, 1.75 or 5 seconds apart.
        clients: how many there are.
        median_budget_bytes: what it gives to training at the median of its log.
    """

    name: str
    file: str
    free_bytes: Callable[[Row], float | None]
    every: int
    clients: int
    median_budget_bytes: int


def _pressed(row: Row) -> float | None:
    return None if "_n" in row["run"] else _phone_bytes(row)


def _calm(row: Row) -> float | None:
    return _phone_bytes(row) if "_n" in row["run"] else None


def _phone_bytes(row: Row) -> float:
    return sum(float(row[f"{part}_MiB"]) for part in ("mem_free", "buffers", "cached")) * _MIB


def _nokia(row: Row) -> float:
    return float(row["MemAvailable_kB"]) * _KIB


def _raspberry(device: str) -> Callable[[Row], float | None]:
    def free_bytes(row: Row) -> float | None:
        if not row["device"].startswith(device):
            return None
        return float(row["ram_MiB"]) * _MIB * (1 - float(row["mem_used_pct"]) / 100)

    return free_bytes


_PHONE, _NOKIA, _PIS = "phone_top_1s.csv", "nokia1_meminfo.csv", "rpi_usage_5s.csv.gz"
KINDS = (
    Kind(name="phone, pressed", file=_PHONE, free_bytes=_pressed, every=5, clients=10, median_budget_bytes=3_400_000),
    Kind(name="phone, video", file=_NOKIA, free_bytes=_nokia, every=3, clients=10, median_budget_bytes=4_400_000),
    Kind(name="phone", file=_PHONE, free_bytes=_calm, every=5, clients=8, median_budget_bytes=5_600_000),
    Kind(name="pi, 2 GB", file=_PIS, free_bytes=_raspberry("RPi2"), every=1, clients=8, median_budget_bytes=7_600_000),
    Kind(name="pi, 4 GB", file=_PIS, free_bytes=_raspberry("RPi4"), every=1, clients=7, median_budget_bytes=11_000_000),
    Kind(name="pi, 8 GB", file=_PIS, free_bytes=_raspberry("RPi8"), every=1, clients=7, median_budget_bytes=20_000_000),
)
"""Medians follow the planned peaks of the league's subnets on ONNX Runtime with batches of 32: 2.2 MB for the smallest,
14.5 MB for the whole network. Methods with more in their programs, such as FedProx's anchors, plan more: 17 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeagueDevice:
    """One client's device and its log.

    Attributes:
        tier: what it counts to in the tables; here the name of its kind.
    """

    client_id: str
    tier: str
    profile: DeviceProfile
    log: ResourceLog


def devices(data: Path) -> tuple[LeagueDevice, ...]:
    """The fleet, the same always.

    Args:
        data: the folder with `bandwidth/` and `memory/`.

    Raises:
        FileError: a log is missing or is not of its form.
    """
    memory = {kind.name: _memory(data / "memory" / kind.file, kind) for kind in KINDS}
    bandwidth = data / "bandwidth" / "ghent_4g_lte.csv.gz"
    traces = _traces(bandwidth)
    found = []
    for kind in KINDS:
        for place in range(kind.clients):
            number = len(found)
            samples = read_ghent(bandwidth, traces[number % len(traces)])
            series = _from(memory[kind.name], place, kind.clients)
            found.append(_device(f"client-{number:02d}", kind, samples, series))
    return tuple(found)


def without_limits(log: ResourceLog) -> ResourceLog:
    """A log of the same times with memory and link beyond every use."""
    plenty = Reading(memory_free_bytes=_PLENTY, downlink_bps=float(_PLENTY), uplink_bps=float(_PLENTY))
    return replace(log, rows=tuple(replace(row, reading=plenty) for row in log.rows))


def _device(name: str, kind: Kind, samples: Sequence[BandwidthSample], series: Sequence[int]) -> LeagueDevice:
    share = kind.median_budget_bytes / statistics.median(series)
    profile = DeviceProfile(name=kind.name, title=kind.name, memory_share=share, runtimes=("onnx",))
    # The log ends with the trace, so that no row lacks a link.
    count = min(len(series), int((samples[-1].t_s + samples[-1].duration_s) // STEP_S))
    log = ResourceLog(
        device=kind.name,
        source=f"{CITATION}; memory of {kind.file}",
        licence="for benchmarks alone",
        rows=join_rows(samples, series[:count], step_s=STEP_S),
    )
    return LeagueDevice(client_id=name, tier=kind.name, profile=profile, log=log)


def _from(series: Sequence[int], place: int, places: int) -> list[int]:
    """The series from another point on for each client of the kind; it goes on at its beginning."""
    start = place * len(series) // places
    return [*series[start:], *series[:start]]


def _memory(path: Path, kind: Kind) -> list[int]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = csv.DictReader(io.StringIO(text.decode()))
    return [int(free) for free in map(kind.free_bytes, rows) if free is not None][:: kind.every]


def _traces(path: Path) -> list[str]:
    rows = csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))
    return sorted({row["trace"] for row in rows})[:_TRACES]
