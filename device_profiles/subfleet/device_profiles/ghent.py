"""Reads the Ghent 4G/LTE bandwidth traces, and joins a trace with a series of free memory to one resource log.

The traces were measured by van der Hooft et al., "HTTP/2-Based Adaptive Streaming of HEVC Video over 4G/LTE Networks",
IEEE Communications Letters 20(11), 2016. They are read from a CSV file with the columns `trace,t_s,dur_s,dl_mbps`.
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

_COLUMNS = ["trace", "t_s", "dur_s", "dl_mbps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthSample:
    """A constant rate over a period.

    Attributes:
        t_s: start of the period, in seconds.
        duration_s: length of the period, above 0.
        downlink_bps: bits per second towards the device.
    """

    t_s: float
    duration_s: float
    downlink_bps: float


def read_ghent(path: Path, trace: str) -> tuple[BandwidthSample, ...]:
    """Read one trace, such as "report_bus_0001", from the CSV file, which may be gzipped.

    Raises:
        FileError: the file cannot be read, has another format, or lacks the trace.
    """
    reader = _open(path)
    samples = tuple(_parse(cells, f"{path} line {reader.line_num}") for cells in reader if cells and cells[0] == trace)
    if not samples:
        raise FileError(f"{path} has no trace {trace!r}; its first column lists the names")
    return samples


def list_traces(path: Path) -> tuple[str, ...]:
    """List the names of all traces of a file, in order.

    Raises:
        FileError: see `read_ghent`.
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
        raise FileError(
            f"{where} has duration {duration_s} and rate {rate_mbps}, but the duration must be above 0 "
            "and the rate 0 or more"
        )
    return sample


def average_bps(samples: Iterable[BandwidthSample], start_s: float, end_s: float) -> float | None:
    """Average the rate between two times, weighted by duration; None if no sample overlaps them."""
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
    """Join a trace, averaged over each step, with a series of free memory to the rows of a log.

    Args:
        samples: of one trace.
        memory_free_bytes: one value per step, and one row for each.
        start_s: time within the trace at which the log begins.
        step_s: seconds between two rows, above 0.
        uplink_fraction: the uplink as a fraction of the downlink; the traces contain only the downlink.
        network: kind of link, written into each row.
    """
    rows = []
    for index, free in enumerate(memory_free_bytes):
        at_s = start_s + index * step_s
        rate_bps = average_bps(samples, at_s, at_s + step_s)
        reading = Reading(
            memory_free_bytes=free,
            downlink_bps=None if rate_bps is None else float(round(rate_bps)),
            uplink_bps=None if rate_bps is None else float(round(rate_bps * uplink_fraction)),
            network=network,
        )
        rows.append(LogRow(t_s=index * step_s, reading=reading))
    return tuple(rows)
