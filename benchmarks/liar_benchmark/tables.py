"""What games come to, as rows of tables, and what is wrong with them."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from liar_benchmark.games import Played

__all__ = ["MOST_LOST", "ProcessPlayed", "Row", "problems_of", "process_table", "row_of", "table"]

MOST_LOST = 0.02
"""Of accuracy, that honest members may lose by liars: the mean over seeds."""
_HEADS = (
    *("method", "without liars %", "with liars %", "difference (points)", "worst seed (points)", "rounds", "seeds"),
    *("all rounds closed", "failed attempts", "restarts"),
)


class ProcessPlayed(Protocol):
    """A run of processes, as a row tells it."""

    @property
    def cells(self) -> Sequence[str]:
        """Those of its row, below `PROCESS_HEADS`."""
        ...


PROCESS_HEADS = (
    *("method", "without liars %", "with liars %", "difference (points)", "worst seed (points)", "rounds", "seeds"),
    *("all ended by themselves", "failed attempts", "restarts", "minutes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A method's games.

    Attributes:
        without: accuracy of honest members alone, the mean over seeds.
        beside: of the same with liars beside them.
        differences: what liars added to it, by seed; below 0 where honest members lost.
        rounds: of a run.
        closed: whether every run ended with all of its rounds.
        failed_attempts: of rounds, over all seeds, with liars.
        failures: why runs did not end.
    """

    method: str
    without: float
    beside: float
    differences: tuple[float, ...]
    rounds: int
    closed: bool
    failed_attempts: int
    failures: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Of accuracies, the mean over seeds."""
        return self.beside - self.without

    @property
    def problems(self) -> Iterator[str]:
        """What is wrong with it, in sentences."""
        for failure in self.failures:
            yield f"{self.method}: a run did not end: {failure}"
        if not self.closed and not self.failures:
            yield f"{self.method}: not all rounds closed"
        if self.difference < -MOST_LOST:
            yield f"{self.method}: honest members lost {-100 * self.difference:.1f} points, but may lose 2 at most"


def row_of(method: str, without: Sequence[Played], beside: Sequence[Played]) -> Row:
    """A method's games, seed by seed, without liars and with them."""
    runs = (*without, *beside)
    return Row(
        method=method,
        without=statistics.fmean(one.accuracy for one in without),
        beside=statistics.fmean(one.accuracy for one in beside),
        differences=tuple(two.accuracy - one.accuracy for one, two in zip(without, beside, strict=True)),
        rounds=beside[0].wanted,
        closed=all(one.rounds == one.wanted for one in runs),
        failed_attempts=sum(one.failed_attempts for one in beside),
        failures=tuple(one.failure for one in runs if one.failure),
    )


def problems_of(rows: Sequence[Row]) -> list[str]:
    """What is wrong with games, in sentences; nothing where all is as it has to be."""
    return [problem for row in rows for problem in row.problems]


def table(rows: Sequence[Row]) -> list[str]:
    """A row for each method, and behind them the worst one and the median of differences."""
    ordered = sorted(rows, key=lambda row: row.difference)
    median = statistics.median(row.difference for row in rows)
    told = (
        f"Worst: {ordered[0].method}, {_points(ordered[0].difference)} points; median of all {_points(median)} points."
    )
    return [*_markdown(_HEADS, [_cells(row) for row in rows]), "", told]


def process_table(rows: Sequence[ProcessPlayed]) -> list[str]:
    """A row for each run of processes."""
    return _markdown(PROCESS_HEADS, [row.cells for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    worst = min(row.differences)
    shares = (f"{100 * row.without:.1f}", f"{100 * row.beside:.1f}", _points(row.difference), _points(worst))
    closed = "yes" if row.closed else "**no**"
    # Server and members are in one process: what would need a restart ends the run.
    return (row.method, *shares, str(row.rounds), str(len(row.differences)), closed, str(row.failed_attempts), "0")


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
