"""Draws devices from a population, each with a profile and a resource log. The same seed gives the same devices."""

import csv
import gzip
import io
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeVar

from subfleet.device_profiles.ghent import BandwidthSample, join_rows, list_traces, read_ghent
from subfleet.device_profiles.logs import ResourceLog
from subfleet.device_profiles.populations import Kind, LinkTable, MemoryTable, Population
from subfleet.device_profiles.profiles import DeviceProfile, load_profile
from subfleet.device_profiles.replay import ReplayedLog, rotate_log
from subfleet.device_profiles.shipped import load_log
from subfleet.protocol.errors import ConfigError, FileError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationDevice:
    """A device of a population.

    Attributes:
        profile: of the device, with the name of its kind.
        log: replayed by the device.
    """

    profile: DeviceProfile
    log: ResourceLog


def draw_devices(population: Population, count: int, *, seed: str, data: Path | None) -> tuple[PopulationDevice, ...]:
    """Draw devices from a population; with dealing "drawn", a larger count gives the same first devices.

    Args:
        population: of the devices.
        count: number of devices, at least 1.
        seed: of the draw; not used with dealing "even".
        data: folder of tables; None if there is none.

    Raises:
        ConfigError: a table needs the data folder, and there is none; or the median budget of a kind is too large.
        FileError: a file is missing, or has another format.
    """
    kinds = {kind.name: _read(kind, population, data) for kind in population.kinds}
    dealt = _deal(population, count) if population.dealing == "even" else _draw_kinds(population, count, seed)
    return tuple(kinds[name](share) for name, share in dealt)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The choices of one device: an item of a list, and the start in a series."""

    item: Callable[[int], int]
    start: Callable[[int], int]

    def choose(self, items: Sequence[T]) -> T:
        return items[self.item(len(items))]


_Make = Callable[[_Share], PopulationDevice]


def _deal(population: Population, count: int) -> Iterator[tuple[str, _Share]]:
    ends = list(accumulate(kind.weight for kind in population.kinds))
    names = [_find_kind((number + 0.5) / count * ends[-1], ends, population.kinds) for number in range(count)]
    for number, name in enumerate(names):
        position, alike = number - names.index(name), names.count(name)
        yield name, _Share(item=partial(_take_turn, number), start=partial(_find_part, position, alike))


def _take_turn(number: int, length: int) -> int:
    return number % length


def _find_part(position: int, count: int, length: int) -> int:
    return position * length // count


def _draw_kinds(population: Population, count: int, seed: str) -> Iterator[tuple[str, _Share]]:
    ends = list(accumulate(kind.weight for kind in population.kinds))
    for number in range(count):
        random = Random(f"{seed}/{number}")  # noqa: S311 - a reproducible draw, no secret
        name = _find_kind(random.random() * ends[-1], ends, population.kinds)
        draw = partial(_draw, random)
        yield name, _Share(item=draw, start=draw)


def _draw(random: Random, length: int) -> int:
    return int(random.random() * length)


def _find_kind(point: float, ends: Sequence[float], kinds: Sequence[Kind]) -> str:
    return next((kind.name for kind, end in zip(kinds, ends, strict=True) if point < end), kinds[-1].name)


def _read(kind: Kind, population: Population, data: Path | None) -> _Make:
    """Return the factory of a kind's devices; files are read once."""
    if kind.memory is None or kind.link is None:
        return partial(
            _make_from_logs, kind, [load_log(name) for name in kind.logs], [load_log(name) for name in kind.links]
        )
    series = _memory(kind.memory, _resolve_path(kind.memory.file, population, data))
    traces = _Traces(_resolve_path(kind.link.file, population, data), kind.link)
    return partial(_make_from_tables, kind, population, series, traces)


def _make_from_logs(
    kind: Kind, logs: Sequence[ResourceLog], links: Sequence[ResourceLog], share: _Share
) -> PopulationDevice:
    log = share.choose(logs)
    profile = _make_profile(kind, [row.reading.memory_free_bytes or 0 for row in log.rows])
    log = rotate_log(log, share.start(len(log.rows)))
    if links:
        log = _merge_links(log, share.choose(links), share)
    return PopulationDevice(profile=profile, log=log)


def _merge_links(log: ResourceLog, link: ResourceLog, share: _Share) -> ResourceLog:
    """Replace the links of a log by those of another log at the same times."""
    replayed = ReplayedLog(rotate_log(link, share.start(len(link.rows))))
    rows = []
    for row in log.rows:
        reading = replayed.read(row.t_s)
        rates = {name: getattr(reading, name) for name in ("downlink_bps", "uplink_bps", "latency_s", "network")}
        rows.append(replace(row, reading=replace(row.reading, **rates)))
    source = f"{log.source}; links: {link.source}"
    return replace(log, rows=tuple(rows), source=source, licence=f"{log.licence}; links: {link.licence}")


def _make_from_tables(
    kind: Kind, population: Population, series: Sequence[int], traces: "_Traces", share: _Share
) -> PopulationDevice:
    samples = traces.of(share)
    start = share.start(len(series))
    turned = [*series[start:], *series[:start]]
    # The log ends with the trace, so that no row lacks a link.
    count = min(len(turned), int((samples[-1].t_s + samples[-1].duration_s) // population.step_s))
    rows = join_rows(samples, turned[:count], step_s=population.step_s, uplink_fraction=traces.table.uplink_fraction)
    log = ResourceLog(device=kind.name, source=population.source, licence=population.licence, rows=rows)
    return PopulationDevice(profile=_make_profile(kind, series), log=log)


class _Traces:
    """The traces of a table of links, each read on first use."""

    def __init__(self, path: Path, table: LinkTable) -> None:
        self._path = path
        self.table = table
        self._names = list_traces(path)[: table.traces or None]

    def of(self, share: _Share) -> tuple[BandwidthSample, ...]:
        return read_ghent(self._path, share.choose(self._names))


def _make_profile(kind: Kind, memory_bytes: Sequence[int]) -> DeviceProfile:
    profile = replace(load_profile(kind.profile), name=kind.name)
    if kind.median_budget_bytes is None:
        return profile
    median = statistics.median(memory_bytes)
    if median < kind.median_budget_bytes:
        raise ConfigError(
            f"median_budget_bytes of {kind.name!r} is {kind.median_budget_bytes}, but the median of its free "
            f"memory is {median:.0f} bytes; set it to that at most"
        )
    return replace(profile, memory_fraction=kind.median_budget_bytes / median)


def _resolve_path(file: str, population: Population, data: Path | None) -> Path:
    path = Path(file)
    if not path.is_absolute():
        if data is None:
            raise ConfigError(
                f"the population {population.name!r} needs {file}, but SUBFLEET_DATA is not set; set it to a "
                "folder that contains the file, or choose another population"
            )
        path = data / file
    if not path.exists():
        raise FileError(f"the population {population.name!r} needs {path}, which is missing; add that file")
    return path


def _memory(table: MemoryTable, path: Path) -> list[int]:
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [row for row in csv.DictReader(io.StringIO(text.decode())) if _is_selected(table, row)]
        series = [_read_free_bytes(table, row) for row in rows][:: table.every]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError, TypeError) as error:
        raise FileError(f"the memory file {str(path)!r} cannot be read: {error}") from error
    except KeyError as error:
        raise FileError(f"the memory file {str(path)!r} has no column {error}; choose one of its first line") from error
    if not series:
        raise FileError(f"the memory file {str(path)!r} has no row with {table.row_with!r} in {table.row_column!r}")
    return series


def _is_selected(table: MemoryTable, row: Mapping[str, str]) -> bool:
    if not table.row_column:
        return True
    text = row[table.row_column]
    return table.row_with in text and not (table.row_without and table.row_without in text)


def _read_free_bytes(table: MemoryTable, row: Mapping[str, str]) -> int:
    total = sum(float(row[name]) for name in table.columns) * table.unit_bytes
    return int(total * (1 - float(row[table.used_percent]) / 100) if table.used_percent else total)
