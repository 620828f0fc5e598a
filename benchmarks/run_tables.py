"""Markdown tables of runs, and where they stand among results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from subfleet.reporting.comparison import Entrant, measure_difference

__all__ = ["Figures", "compare_entrants", "format_table", "list_shared_seeds", "replace_tables"]

Figures = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""What a run comes to, by its summary."""


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))


def list_shared_seeds(first: Entrant, other: Entrant) -> list[int]:
    """Of both, where they are enough for an interval; else none."""
    seeds = sorted(first.runs.keys() & other.runs.keys())
    return seeds if len(seeds) > 1 else []


def compare_entrants(
    first: Entrant, others: Sequence[Entrant], figures: Figures, names: Sequence[str]
) -> Iterator[list[str]]:
    """What the first has on each other one in some figures, in points, paired over the seeds that both have."""
    for other in others:
        seeds = list_shared_seeds(first, other)
        if not seeds:
            continue
        ours, theirs = ([figures(one.runs[seed]) for seed in seeds] for one in (first, other))
        cells = []
        for name in names:
            found = measure_difference([one[name] for one in ours], [one[name] for one in theirs])
            tie = " tie" if found.tie else ""
            cells.append(f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f}){tie}")
        yield [other.name, str(len(seeds)), *cells]


def replace_tables(tables: str, results: Path, task: str) -> None:
    """Put tables in the place of those of a task, between comments that name it.

    Raises:
        ValueError: the results have no such task.
    """
    begin, end = f"<!-- {task} -->\n", f"<!-- end of {task} -->\n"
    before, found, rest = results.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{results.name} has no place for the tables of {task!r}")
    results.write_text(f"{before}{begin}\n{tables}\n{end}{after}", encoding="utf-8")
