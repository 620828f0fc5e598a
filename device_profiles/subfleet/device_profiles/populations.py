"""Populations: TOML files with the profiles and logs of an emulated fleet's devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from subfleet.protocol.bounds import Each, Length, Range, checked
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.limits import Positive, PositiveAmount
from subfleet.protocol.schema import validate
from subfleet.protocol.suggestion import suggest
from subfleet.protocol.toml import parse_toml

POPULATIONS: Mapping[str, str] = MappingProxyType({name: f"{name}.toml" for name in ("league", "mixed")})
"""The shipped populations: name to file in the package's `data/populations` folder."""


def _check_rows(row_column: str, row_with: str, row_without: str) -> Iterator[str]:
    if (row_with or row_without) and not row_column:
        yield "row_column is empty, but row_with and row_without select rows by it; set it"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_rows)
class MemoryTable:
    """Measured free memory in a CSV file of any form.

    Attributes:
        file: a CSV file, which may be gzipped; relative paths start at the data folder (SUBFLEET_DATA).
        columns: one or more; their sum, times `unit_bytes`, is the memory.
        unit_bytes: bytes of one unit of these columns, at least 1.
        used_percent: column with the percentage of that memory that is in use; empty if all of it is free.
        row_column: column by which rows are selected; empty selects every row.
        row_with: text that the column must contain.
        row_without: text that it must not contain; empty for no such text.
        every: every n-th selected row is a step of the population, at least 1.
    """

    file: str
    columns: Annotated[tuple[str, ...], Length(least=1)]
    unit_bytes: Positive = 1
    used_percent: str = ""
    row_column: str = ""
    row_with: str = ""
    row_without: str = ""
    every: Positive = 1


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LinkTable:
    """Measured links: traces in the format of `subfleet.device_profiles.ghent`.

    Attributes:
        file: see `MemoryTable`.
        traces: number of traces, in the order of their names; 0 takes all.
        uplink_fraction: the uplink as a fraction of the measured downlink, above 0.
    """

    file: str
    traces: Annotated[int, Range(least=0, words="0 for all, or above 0")] = 0
    uplink_fraction: PositiveAmount = 0.2


def _check_source(
    logs: tuple[str, ...], links: tuple[str, ...], memory: MemoryTable | None, link: LinkTable | None
) -> Iterator[str]:
    if bool(logs) == (memory is not None) or (memory is None) != (link is None):
        yield "a kind of device must have either logs or both memory and link"
    if links and not logs:
        yield "links are set without logs, but they replace the links of logs; leave links out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_source)
class Kind:
    """A kind of device in a population.

    Attributes:
        name: of the kind, by which results are grouped.
        weight: relative frequency among the kinds, above 0.
        profile: name of a shipped device profile, or path of a TOML file.
        logs: resource logs: names of shipped ones, or paths of CSV files; each device replays one of them.
        links: resource logs with links that replace those of `logs`; each device has one of them.
        memory: measured memory, with `link` and instead of `logs`.
        link: measured links.
        median_budget_bytes: replaces the profile's fraction of free memory by the fraction that gives this median
            budget, above 0; it must not exceed the median of free memory.

    Raises:
        ValueError: it has both logs and tables, or neither, or a number is out of range.
    """

    name: Annotated[str, Length(least=1)]
    weight: PositiveAmount = 1.0
    profile: str = "generic"
    logs: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    memory: MemoryTable | None = None
    link: LinkTable | None = None
    median_budget_bytes: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Population:
    """A population of devices.

    Attributes:
        name: of the population.
        title: a description in words.
        kinds: of devices, one or more, with different names.
        dealing: "drawn" draws kind, log and start in the log for each device by the run's seed; "even" assigns kinds by
            weight and in order, logs in turn, and evenly spaced starts, independent of the seed.
        step_s: seconds between rows of logs that are made from tables, above 0.
        source: of the figures in tables.
        licence: of the tables.
    """

    name: str
    title: str
    kinds: Annotated[tuple[Kind, ...], Length(least=1), Each(key=attrgetter("name"))]
    dealing: Literal["drawn", "even"] = "drawn"
    step_s: PositiveAmount = 5.0
    source: str = "none"
    licence: str = "none"


def parse_population(text: str, where: str) -> Population:
    """Read a population from TOML text; `where` names it in errors.

    Raises:
        ConfigError: the text is not TOML, or fields are missing, unknown or out of range; all are listed.
    """
    try:
        plain = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"the population {where} is not valid TOML: {error}") from error
    return validate(Population, plain, f"the population {where}")


def load_population(name_or_path: str) -> Population:
    """Load a shipped population by name, or any population by the path of its TOML file.

    Raises:
        ConfigError: there is no such population, or it is invalid.
        FileError: the file cannot be read.
    """
    if name_or_path in POPULATIONS:
        shipped = resources.files("subfleet.device_profiles") / "data" / "populations" / POPULATIONS[name_or_path]
        return parse_population(shipped.read_text(encoding="utf-8"), name_or_path)
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ConfigError(
            f"the population is {name_or_path!r}, but must be one of {sorted(POPULATIONS)} or the path of a .toml file"
            f"{suggest(name_or_path, POPULATIONS)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the population {name_or_path!r} cannot be read: {error}") from error
    return parse_population(text, name_or_path)
