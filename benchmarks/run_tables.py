"""Markdown tables of runs, and their place in pages of results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from subfleet.reporting.comparison import Entrant, measure_difference

__all__ = ["Figures", "compare_entrants", "format_table", "list_shared_seeds", "replace_tables"]

Figures = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Computes the figures of a run from its summary."""


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))


def list_shared_seeds(first: Entrant, other: Entrant) -> list[int]:
    """The seeds of both entrants; empty if there are too few for an interval."""
    seeds = sorted(first.runs.keys() & other.runs.keys())
    return seeds if len(seeds) > 1 else []


def compare_entrants(
    first: Entrant, others: Sequence[Entrant], figures: Figures, names: Sequence[str]
) -> Iterator[list[str]]:
    """The first entrant minus each other one, in points, paired over the seeds that both have."""
    for other in others:
        seeds = list_shared_seeds(first, other)
        if not seeds:
            continue
        first_figures, other_figures = ([figures(entrant.runs[seed]) for seed in seeds] for entrant in (first, other))
        cells = []
        for name in names:
            difference = measure_difference([run[name] for run in first_figures], [run[name] for run in other_figures])
            tie = " tie" if difference.tie else ""
            cells.append(
                f"{100 * difference.mean:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f}){tie}"
            )
        yield [other.name, str(len(seeds)), *cells]


def replace_tables(tables: str, results: Path, task: str) -> None:
    """Replace the tables of a task, which stand between comments with its name.

    Raises:
        ValueError: the results have no such task.
    """
    begin, end = f"<!-- {task} -->\n", f"<!-- end of {task} -->\n"
    before, opened, rest = results.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"{results.name} has no place for the tables of {task!r}")
    results.write_text(f"{before}{begin}\n{tables}\n{end}{after}", encoding="utf-8")
