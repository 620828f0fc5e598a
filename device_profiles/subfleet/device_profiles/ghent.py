"""Importer of the Ghent 4G/LTE logs, and the join of a bandwidth trace with a memory series into one resource log.

The logs were measured by van der Hooft et al., "HTTP/2-Based Adaptive Streaming of HEVC Video over 4G/LTE Networks",
IEEE Communications Letters 20(11), 2016. They are read as a CSV with the columns `trace,t_s,dur_s,dl_mbps`.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.device_profiles.logs import LogRow
from subfleet.protocol.errors import FileError
from subfleet.protocol.readings import Reading

CITATION = (
    "van der Hooft et al. 2016, HTTP/2-Based Adaptive Streaming of HEVC Video over 4G/LTE Networks, "
    "IEEE Communications Letters"
)
_COLUMNS = ["trace", "t_s", "dur_s", "dl_mbps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthSample:
    """A rate that held for a while.

    Attributes:
        t_s: when it began.
        duration_s: how long it held, above 0.
        downlink_bps: bits per second towards the device.
    """

    t_s: float
    duration_s: float
    downlink_bps: float


def read_ghent(path: Path, trace: str) -> tuple[BandwidthSample, ...]:
    """Read one trace, such as "report_bus_0001", from the CSV or its gzip.

    Raises:
        FileError: the file cannot be read, is not of that form, or has no such trace.
    """
    reader = _open(path)
    samples = tuple(_parse(cells, f"{path} line {reader.line_num}") for cells in reader if cells and cells[0] == trace)
    if not samples:
        raise FileError(f"{path} has no trace {trace!r}; look into its first column for the names that it has")
    return samples


def list_traces(path: Path) -> tuple[str, ...]:
    """List the names of all traces of a file, in order.

    Raises:
        FileError: as `read_ghent`.
    """
    return tuple(sorted({cells[0] for cells in _open(path) if cells}))


def _open(path: Path) -> Any:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise FileError(f"the bandwidth file {str(path)!r} cannot be read: {error}") from error
    reader = csv.reader(io.StringIO(text))
    if next(reader, None) != _COLUMNS:
        raise FileError(f"{path} line 1 must name the columns {','.join(_COLUMNS)}")
    return reader


def _parse(cells: Sequence[str], where: str) -> BandwidthSample:
    try:
        _, t_s, duration_s, rate_mbps = cells
        sample = BandwidthSample(t_s=float(t_s), duration_s=float(duration_s), downlink_bps=float(rate_mbps) * 1e6)
    except ValueError as error:
        raise FileError(f"{where} must hold a name and three numbers: {error}") from error
    if not (sample.duration_s > 0 and sample.downlink_bps >= 0):
        raise FileError(f"{where} has duration {duration_s} and rate {rate_mbps}, but must have above 0 and 0 or more")
    return sample


def average_bps(samples: Iterable[BandwidthSample], start_s: float, end_s: float) -> float | None:
    """Average the rate between two times, weighted by time; None if no sample covers them."""
    covered_s = 0.0
    bits = 0.0
    for sample in samples:
        overlap_s = min(end_s, sample.t_s + sample.duration_s) - max(start_s, sample.t_s)
        if overlap_s > 0:
            covered_s += overlap_s
            bits += overlap_s * sample.downlink_bps
    return bits / covered_s if covered_s else None


def join_rows(
    samples: Sequence[BandwidthSample],
    memory_free_bytes: Sequence[int],
    *,
    start_s: float = 0.0,
    step_s: float = 5.0,
    uplink_fraction: float = 0.2,
    network: str = "cellular",
) -> tuple[LogRow, ...]:
    """Join a trace from `start_s` on, averaged over each step, with a memory series to rows of a log.

    Args:
        samples: of one trace.
        memory_free_bytes: one value a step; their number is the number of rows.
        start_s: where in the trace the log begins.
        step_s: seconds between two rows, above 0.
        uplink_fraction: the uplink as a fraction of the downlink, where the trace measured only the downlink.
        network: kind of link that the rows name.
    """
    rows = []
    for place, free in enumerate(memory_free_bytes):
        at_s = start_s + place * step_s
        rate_bps = average_bps(samples, at_s, at_s + step_s)
        reading = Reading(
            memory_free_bytes=free,
            downlink_bps=None if rate_bps is None else float(round(rate_bps)),
            uplink_bps=None if rate_bps is None else float(round(rate_bps * uplink_fraction)),
            network=network,
        )
        rows.append(LogRow(t_s=place * step_s, reading=reading))
    return tuple(rows)
