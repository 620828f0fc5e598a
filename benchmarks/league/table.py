"""The league's tables: each entrant's figures over its seeds, and its paired differences from the others."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from subfleet.emulation.paired import PairedDifference, paired_difference

__all__ = ["print_league", "summary"]

FIGURES = ("accuracy", "worst_tier", "own_mean", "own_worst")
"""What entrants are compared in: the more, the better."""
COSTS = ("bytes_down", "bytes_up", "macs", "utilisation", "served", "over_link")

Games = Mapping[str, Sequence[Mapping[str, Any]]]
"""By entrant, one result for each seed, in the same order."""


def summary(games: Games, *, baseline: str) -> dict[str, Any]:
    """Everything as one plain object.

    Args:
        games: the results.
        baseline: the entrant that the others are compared with.

    Returns:
        `entrants`: by name, the mean over the seeds of every figure, `tiers` and the sum of `violations`; `versus`: by
        name and figure, the paired difference from the baseline, where there are two seeds or more.
    """
    return {
        "baseline": baseline,
        "entrants": {name: _means(results) for name, results in games.items()},
        "versus": {
            name: {figure: _plain(found) for figure, found in _versus(games, name, baseline).items()}
            for name in games
            if name != baseline
        },
    }


def _means(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return statistics.fmean(float(result[name]) for result in results)

    tiers = {name: statistics.fmean(float(one["tiers"][name]) for one in results) for name in results[0]["tiers"]}
    return {
        "seeds": len(results),
        **{name: mean(name) for name in (*FIGURES, *COSTS)},
        "violations": sum(int(result["violations"]) for result in results),
        "tiers": tiers,
    }


def _versus(games: Games, name: str, baseline: str) -> Mapping[str, PairedDifference]:
    if len(games[name]) < 2 or baseline not in games:
        return {}
    return {
        figure: paired_difference(
            [float(one[figure]) for one in games[name]], [float(one[figure]) for one in games[baseline]]
        )
        for figure in FIGURES
    }


def _plain(found: PairedDifference) -> dict[str, Any]:
    return {"mean": found.mean, "low": found.low, "high": found.high, "pairs": found.pairs, "tie": found.tie}


def print_league(found: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    table = Table(title="The league: means over the seeds")
    heads = ("entrant", "global %", "worst tier %", "own %", "own worst %", "MB down", "MB up", "GMAC", "use %")
    for head in (*heads, "served %", "violations"):
        table.add_column(head, justify="left" if head == "entrant" else "right")
    entrants = sorted(found["entrants"].items(), key=lambda item: -float(item[1]["accuracy"]))
    for name, one in entrants:
        table.add_row(
            name,
            *(f"{100 * one[figure]:.2f}" for figure in FIGURES),
            *(f"{one[figure] / 1e6:.0f}" for figure in ("bytes_down", "bytes_up")),
            f"{one['macs'] / 1e9:.0f}",
            *(f"{100 * one[figure]:.1f}" for figure in ("utilisation", "served")),
            str(one["violations"]),
        )
    console.print(table)
    if any(found["versus"].values()):
        console.print(_differences(found))


def _differences(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"Paired differences from {found['baseline']}, in points, with 95 % intervals")
    for head in ("entrant", *FIGURES):
        table.add_column(head, justify="left" if head == "entrant" else "right")
    for name, figures in found["versus"].items():
        table.add_row(name, *(_cell(figures[figure]) for figure in FIGURES))
    return table


def _cell(one: Mapping[str, Any]) -> str:
    span = f"{100 * one['mean']:+.2f} ({100 * one['low']:+.2f} to {100 * one['high']:+.2f})"
    return f"{span} tie" if one["tie"] else span
