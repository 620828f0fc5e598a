"""Budgets of devices over time, from logs of real links and real memory."""

import csv
import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from random import Random

from search_benchmark.spaces import TARGET, Case
from subfleet.protocol.readings import Budget
from subfleet.search.query import Query

__all__ = ["Share", "create_queries", "read_shares"]

_WINDOW_S = 10
_LOWEST, _HIGHEST = 0.9, 1.1
_SEED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A device at one moment: the position of its readings in the range of their logs, 0 to 1."""

    memory: float
    link: float


def read_shares() -> tuple[list[Share], str]:
    """Read devices at moments in a fixed random order, and describe their source."""
    folder = os.environ.get("SUBFLEET_DATA")
    rng = Random(_SEED)  # noqa: S311 - budgets are no secrets
    if not folder:
        return [Share(memory=rng.random(), link=rng.random()) for _ in range(20_000)], "drawn from a seed"
    links = _scale(_read_ghent(Path(folder) / "bandwidth" / "ghent_4g_lte.csv.gz"))
    memory = [*_scale(_read_phone(Path(folder) / "memory" / "nokia1_meminfo.csv"))]
    memory += _scale(_read_boards(Path(folder) / "memory" / "rpi_usage_5s.csv.gz"))
    shares = [Share(memory=rng.choice(memory), link=rng.choice(links)) for _ in range(20_000)]
    return shares, "Ghent 4G logs, free memory of a phone and of three Raspberry Pi"


def create_queries(case: Case, shares: Sequence[Share]) -> list[Query]:
    """Convert shares to budgets of a network.

    The least value of a log becomes 0.9 times the cost of the smallest submodel, the largest 1.1 times the cost of the
    whole network; between them equal steps of a log are equal factors of a budget.
    """
    smallest, largest = case.ends
    memory = (smallest.training_memory_bytes[TARGET], largest.training_memory_bytes[TARGET])
    link = (smallest.weight_bytes, largest.weight_bytes)
    return [
        Query(
            target=TARGET,
            limits=Budget(
                memory_bytes=_interpolate(*memory, share.memory),
                downlink_bytes=_interpolate(*link, share.link),
                uplink_bytes=_interpolate(*link, share.link),
            ),
        )
        for share in shares
    ]


def _interpolate(low: int, high: int, share: float) -> int:
    return int(low * _LOWEST * (high / low * _HIGHEST / _LOWEST) ** share)


def _scale(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) for value in values]


def _read_ghent(path: Path) -> list[float]:
    """Mean rates of windows of 10 seconds, in Mbit/s."""
    with gzip.open(path, "rt") as file:
        rows = [(row["trace"], float(row["t_s"]) // _WINDOW_S, float(row["dl_mbps"])) for row in csv.DictReader(file)]
    windows = [[rate for *_, rate in group] for _, group in groupby(rows, key=itemgetter(0, 1))]
    return [sum(rates) / len(rates) for rates in windows]


def _read_phone(path: Path) -> list[float]:
    """Available memory of a 1 GB phone, in kB."""
    with path.open() as file:
        return [float(row["MemAvailable_kB"]) for row in csv.DictReader(file)]


def _read_boards(path: Path) -> list[float]:
    """Fraction of unused memory on boards with 2, 4 and 8 GB."""
    with gzip.open(path, "rt") as file:
        return [100 - float(row["mem_used_pct"]) for row in csv.DictReader(file)]
