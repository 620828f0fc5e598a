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
        yield "row_column is empty, but must name the column that row_with and row_without are about"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_rows)
class MemoryTable:
    """Measured free memory in a table of its own form.

    Attributes:
        file: a CSV file or its gzip; a relative path begins at the folder of data (SUBFLEET_DATA).
        columns: whose sum, times `unit_bytes`, is the memory, 1 or more.
        unit_bytes: of one unit of these columns, 1 or more.
        used_percent: a column with the fraction of that memory which is used, in percent; empty where all of it is
            free.
        row_column: the column that tells whose a row is; empty takes every row.
        row_with: what that column's text must contain.
        row_without: what it must not contain; empty forbids nothing.
        every: rows of the file for one step of the population, 1 or more.
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
    """Measured links: traces in the form that `subfleet.device_profiles.ghent` reads.

    Attributes:
        file: as for `MemoryTable`.
        traces: how many, by their names' order; 0 takes all.
        uplink_fraction: the uplink as a fraction of the downlink, which alone was measured, above 0.
    """

    file: str
    traces: Annotated[int, Range(least=0, words="0 for all, or above 0")] = 0
    uplink_fraction: PositiveAmount = 0.2


def _check_source(
    logs: tuple[str, ...], links: tuple[str, ...], memory: MemoryTable | None, link: LinkTable | None
) -> Iterator[str]:
    if bool(logs) == (memory is not None) or (memory is None) != (link is None):
        yield "a kind of device must have logs, or else memory and link"
    if links and not logs:
        yield "links are named beside a link, but only those of logs can be replaced; leave links out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_source)
class Kind:
    """A kind of device in a population.

    Attributes:
        name: under which its devices' results are summed up.
        weight: its fraction of the devices, as a number beside those of the other kinds, above 0.
        profile: a shipped device profile's name, or a TOML file.
        logs: resource logs, shipped ones by name or CSV files; each device replays one of them.
        links: resource logs whose links take the place of those in `logs`; each device has one of them.
        memory: in place of `logs`, with `link`: measured memory.
        link: in place of `links`: measured links.
        median_budget_bytes: in place of the profile's fraction of free memory that share, at most all, whose median
            over the memory is this much, above 0.

    Raises:
        ValueError: it has both kinds of memory or none, or a number is out of its range.
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
        title: it in words.
        kinds: of devices, 1 or more, with different names.
        dealing: "drawn" draws each device by the run's seed: its kind, its logs, and where these begin; "even" deals
            kinds out in their shares and in their order, their logs one after the other, and begins at points that are
            equally far apart, whatever the seed.
        step_s: seconds between two rows of the logs that are made of tables, above 0.
        source: where the figures of tables come from.
        licence: of them.
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
        ConfigError: the text is not TOML, or fields are missing, unknown or out of their range; all of them are named.
    """
    try:
        plain = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"the population {where} is not valid TOML: {error}") from error
    return validate(Population, plain, f"the population {where}")


def load_population(name_or_path: str) -> Population:
    """Load a shipped population by name, or any by the path of its TOML file.

    Raises:
        ConfigError: there is no such population, or its content is wrong.
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
