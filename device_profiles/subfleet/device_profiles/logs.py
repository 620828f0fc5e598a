"""Resource logs: the resources of a device over time, as a text file for people and tools.

    # subfleet-log 1
    # device: raspberry_pi_4
    # source: who recorded or generated it
    # licence: of the content
    # note: any number of these
    t_s,memory_free_bytes,cgroup_limit_bytes,downlink_bps,...
    0.0,912345088,,15200000,...

Units are in the column names, an empty cell is an unknown value, booleans are 0 and 1, and times increase.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from subfleet.protocol.bounds import Condition, Length, checked
from subfleet.protocol.disks import write_atomically
from subfleet.protocol.errors import FileError
from subfleet.protocol.limits import Amount
from subfleet.protocol.readings import Reading

FORMAT_VERSION = 1
MAX_LOG_BYTES = 256 * 2**20
_MAGIC = "# subfleet-log "
_NETWORK = re.compile(r"[A-Za-z0-9_.-]{1,32}")
Cell = int | float | bool | str
Line = Annotated[
    str,
    Condition(
        accepts=lambda text: bool(text) and text == text.strip() and len(text.splitlines()) == 1,
        words="one line that neither starts nor ends blank",
    ),
]


def _check_network(reading: Reading) -> Iterator[str]:
    if reading.network is not None and _NETWORK.fullmatch(reading.network) is None:
        yield f"network is {reading.network!r:.80}, but must be 1 to 32 letters, digits, '_', '.' or '-'"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_network)
class LogRow:
    """One sample.

    Attributes:
        t_s: seconds since the log's own zero, 0 or more.
        reading: the device's resources at that time.
    """

    t_s: Amount
    reading: Reading


def _check_order(rows: tuple[LogRow, ...]) -> Iterator[str]:
    for earlier, later in itertools.pairwise(rows):
        if later.t_s <= earlier.t_s:
            yield f"t_s is {later.t_s} after {earlier.t_s}, but must grow from row to row"
            return


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_order)
class ResourceLog:
    """A log and its source.

    Attributes:
        device: name of the device or its profile.
        source: who recorded it, or the generator and its seed.
        licence: of the content.
        notes: further remarks, one line each.
        rows: one or more, with increasing times.
    """

    device: Line
    source: Line
    licence: Line
    notes: tuple[Line, ...] = ()
    rows: Annotated[tuple[LogRow, ...], Length(least=1)]


def _read_bool(cell: str) -> bool:
    if cell not in ("0", "1"):
        raise ValueError("not 0 or 1")
    return cell == "1"


def _read_float(cell: str) -> float:
    # float() also takes "1_0", " 1" and "nan": a log must be readable by other tools, so those are refused.
    if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", cell) is None:
        raise ValueError("not a number")
    return float(cell)


def _read_int(cell: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,18}", cell) is None:
        raise ValueError("not a whole number")
    return int(cell)


COLUMNS: Mapping[str, tuple[str, Callable[[str], Cell]]] = MappingProxyType(
    {
        "t_s": ("a number", _read_float),
        "memory_free_bytes": ("a whole number or empty", _read_int),
        "cgroup_limit_bytes": ("a whole number or empty", _read_int),
        "downlink_bps": ("a number or empty", _read_float),
        "uplink_bps": ("a number or empty", _read_float),
        "latency_s": ("a number or empty", _read_float),
        "cpu_load": ("a number or empty", _read_float),
        "temperature_c": ("a number or empty", _read_float),
        "battery_fraction": ("a number or empty", _read_float),
        "charging": ("0, 1 or empty", _read_bool),
        "network": ("a word or empty", str),
        "available": ("0 or 1", _read_bool),
    }
)
"""By column, the valid cells in words, and the function that reads a cell."""


def encode_header(*, device: str, source: str, licence: str, notes: tuple[str, ...] = ()) -> str:
    """Encode the header lines and the column names."""
    lines = [f"{_MAGIC}{FORMAT_VERSION}", f"# device: {device}", f"# source: {source}", f"# licence: {licence}"]
    lines += [f"# note: {note}" for note in notes]
    return "\n".join([*lines, ",".join(COLUMNS)]) + "\n"


def encode_row(row: LogRow) -> str:
    """Encode a row; `parse_log` reads the same bits."""
    cells = [row.t_s if name == "t_s" else getattr(row.reading, name) for name in COLUMNS]
    return ",".join(_encode_cell(cell) for cell in cells) + "\n"


def _encode_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(int(cell))
    return cell if isinstance(cell, str) else repr(cell)


def write_log(path: Path, log: ResourceLog) -> None:
    """Write a log atomically.

    Raises:
        FileError: the file cannot be written.
    """
    header = encode_header(device=log.device, source=log.source, licence=log.licence, notes=log.notes)
    try:
        write_atomically(path, [header.encode(), *(encode_row(row).encode() for row in log.rows)])
    except OSError as error:
        raise FileError(f"the resource log {str(path)!r} cannot be written: {error}") from error


def read_log(path: Path) -> ResourceLog:
    """Read a log.

    Raises:
        FileError: the file cannot be read, or is not a resource log; the message names file, line and column.
    """
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise FileError(f"the resource log {str(path)!r} is above {MAX_LOG_BYTES} bytes; split it")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the resource log {str(path)!r} cannot be read: {error}") from error
    return parse_log(text, str(path))


def parse_log(text: str, where: str) -> ResourceLog:
    """Read a log from text; `where` names it in errors.

    Raises:
        FileError: the text is not a resource log.
    """
    lines = text.splitlines()
    header, start = _parse_header(lines, where)
    _check_columns(lines, start, where)
    rows: list[LogRow] = []
    for number, line in enumerate(lines[start + 1 :], start=start + 2):
        row = _parse_row(line, f"{where} line {number}")
        if rows and row.t_s <= rows[-1].t_s:
            raise FileError(f"{where} line {number} column t_s is {row.t_s}, but must be above {rows[-1].t_s}")
        rows.append(row)
    try:
        return ResourceLog(
            device=header["device"][0],
            source=header["source"][0],
            licence=header["licence"][0],
            notes=tuple(header["note"]),
            rows=tuple(rows),
        )
    except ValueError as error:
        raise FileError(f"{where} cannot be used: {error}") from error


def _parse_header(lines: list[str], where: str) -> tuple[dict[str, list[str]], int]:
    first = lines[0] if lines else ""
    if first != f"{_MAGIC}{FORMAT_VERSION}":
        raise FileError(f"{where} line 1 is {first!r:.80}, but must be '{_MAGIC}{FORMAT_VERSION}'")
    header: dict[str, list[str]] = {"device": [], "source": [], "licence": [], "note": []}
    at = 1
    while at < len(lines) and lines[at].startswith("#"):
        key, _, value = lines[at].removeprefix("#").strip().partition(": ")
        if key not in header:
            raise FileError(f"{where} line {at + 1} names {key!r:.80}, but must be one of {list(header)}")
        header[key].append(value.strip())
        at += 1
    for key in ("device", "source", "licence"):
        if len(header[key]) != 1:
            raise FileError(f"{where} has {len(header[key])} lines '# {key}: ...', but must have exactly 1")
    return header, at


def _check_columns(lines: list[str], at: int, where: str) -> None:
    names = lines[at].split(",") if at < len(lines) else []
    if names != list(COLUMNS):
        raise FileError(f"{where} line {at + 1} must name the columns {','.join(COLUMNS)}")


def _parse_cell(name: str, cell: str, where: str) -> Cell | None:
    expected, read = COLUMNS[name]
    try:
        return None if not cell and "empty" in expected else read(cell)
    except ValueError:
        raise FileError(f"{where} column {name} is {cell!r:.80}, but must be {expected}") from None


def _parse_row(line: str, where: str) -> LogRow:
    cells = line.split(",")
    if len(cells) != len(COLUMNS):
        raise FileError(f"{where} has {len(cells)} cells, but must have {len(COLUMNS)}")
    values = {name: _parse_cell(name, cell, where) for name, cell in zip(COLUMNS, cells, strict=True)}
    t_s = values.pop("t_s")
    try:
        return LogRow(t_s=t_s, reading=Reading(**values))  # type: ignore[arg-type]  # COLUMNS gave each its type
    except ValueError as error:
        raise FileError(f"{where}: {error}") from error
