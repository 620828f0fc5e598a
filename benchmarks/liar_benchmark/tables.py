"""Results of games as rows of tables, and their problems."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from liar_benchmark.games import GameResult

__all__ = ["MOST_LOST", "ProcessRow", "Row", "build_process_table", "build_row", "build_table", "find_problems"]

MOST_LOST = 0.02
"""Mean accuracy over seeds that honest members may lose by liars."""
_HEADS = (
    *("method", "without liars %", "with liars %", "difference (points)", "worst seed (points)", "rounds", "seeds"),
    *("all rounds closed", "failed attempts", "restarts"),
)


class ProcessRow(Protocol):
    """A method's runs in processes, as a table row."""

    @property
    def cells(self) -> Sequence[str]:
        """The cells of its row, below `PROCESS_HEADS`."""
        ...


PROCESS_HEADS = (
    *("method", "without liars %", "with liars %", "difference (points)", "worst seed (points)", "rounds", "seeds"),
    *("all ended by themselves", "failed attempts", "restarts", "minutes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A method's games.

    Attributes:
        without: accuracy of only the honest members, the mean over seeds.
        beside: their accuracy with liars.
        differences: the change of accuracy by liars, by seed; below 0 if honest members lost.
        rounds: rounds of a run.
        closed: whether every run ended with all of its rounds.
        failed_attempts: failed attempts of rounds with liars, over all seeds.
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
        """The mean difference of accuracies over seeds."""
        return self.beside - self.without

    @property
    def problems(self) -> Iterator[str]:
        """The problems of the games as sentences."""
        for failure in self.failures:
            yield f"{self.method}: a run did not end: {failure}"
        if not self.closed and not self.failures:
            yield f"{self.method}: not all rounds closed"
        if self.difference < -MOST_LOST:
            yield f"{self.method}: honest members lost {-100 * self.difference:.1f} points, but may lose 2 at most"


def build_row(method: str, without: Sequence[GameResult], beside: Sequence[GameResult]) -> Row:
    """Combine a method's games, seed by seed, without liars and with them."""
    runs = (*without, *beside)
    return Row(
        method=method,
        without=statistics.fmean(result.accuracy for result in without),
        beside=statistics.fmean(result.accuracy for result in beside),
        differences=tuple(lied_to.accuracy - honest.accuracy for honest, lied_to in zip(without, beside, strict=True)),
        rounds=beside[0].planned_rounds,
        closed=all(result.rounds == result.planned_rounds for result in runs),
        failed_attempts=sum(result.failed_attempts for result in beside),
        failures=tuple(result.failure for result in runs if result.failure),
    )


def find_problems(rows: Sequence[Row]) -> list[str]:
    """List the problems of all games as sentences."""
    return [problem for row in rows for problem in row.problems]


def build_table(rows: Sequence[Row]) -> list[str]:
    """A row for each method, then the worst method and the median difference."""
    ordered = sorted(rows, key=lambda row: row.difference)
    median = statistics.median(row.difference for row in rows)
    summary = (
        f"Worst: {ordered[0].method}, {_format_points(ordered[0].difference)} points; "
        f"median of all {_format_points(median)} points."
    )
    return [*_format_table(_HEADS, [_format_cells(row) for row in rows]), "", summary]


def build_process_table(rows: Sequence[ProcessRow]) -> list[str]:
    """A row for each run of processes."""
    return _format_table(PROCESS_HEADS, [row.cells for row in rows])


def _format_cells(row: Row) -> tuple[str, ...]:
    worst = min(row.differences)
    shares = (
        f"{100 * row.without:.1f}",
        f"{100 * row.beside:.1f}",
        _format_points(row.difference),
        _format_points(worst),
    )
    closed = "yes" if row.closed else "**no**"
    # Server and members are in one process: what would need a restart ends the run.
    return (row.method, *shares, str(row.rounds), str(len(row.differences)), closed, str(row.failed_attempts), "0")


def _format_points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
