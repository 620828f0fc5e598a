"""The league's tables: each entrant's figures over its seeds, and its paired differences from a baseline."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from league.entrants import ENTRANTS
from league.fleet import CLIENTS, KINDS
from league.rendering import TextTable, difference_text, plain_difference
from subfleet.reporting.paired import PairedDifference, paired_difference

__all__ = ["league_tables", "summary"]

FIGURES = ("accuracy", "subnets", "worst_tier", "own_mean", "own_worst")
"""What entrants are compared in: the more, the better."""
_SHARES = ("utilisation", "parameters_lost", "participation", "least_participation")
COSTS = ("bytes_down", "bytes_up", "macs", *_SHARES, "never_folded", "programs_written", "over_link")
_HEADS = ("entrant", "seeds", "global %", "spread", "subnets %", "worst tier %", "own %", "own worst %")
_COST_HEADS = (
    "MB down",
    "MB up",
    "GMAC",
    "use %",
    "lost %",
    "took part %",
    "worst round %",
    "never",
    "programs",
    "violations",
)
_DIFFERENCE_HEADS = ("entrant", "global", "subnets", "worst tier", "own", "own worst")
_CLIENTS_OF = {kind.name: kind.clients for kind in KINDS}

Games = Mapping[str, Sequence[Mapping[str, Any]]]
"""By entrant, one result for each seed, in the same order."""


def summary(games: Games, *, baseline: str) -> dict[str, Any]:
    """Everything as one plain object.

    Args:
        games: the results.
        baseline: the entrant that the others are compared with.

    Returns:
        `entrants`: by name, the mean over the seeds of every figure, the `spread` of the accuracy (its standard
        deviation; None of one seed), `tiers` and the sum of `violations`; `versus`: by name and figure, the paired
        difference from the baseline, where both have as many seeds, and two or more.
    """
    games = {name: [_judged(name, result) for result in results] for name, results in games.items()}
    return {
        "baseline": baseline,
        "entrants": {name: _means(results) for name, results in games.items()},
        "versus": {
            name: {figure: plain_difference(found) for figure, found in _versus(games, name, baseline).items()}
            for name in games
            if name != baseline
        },
    }


def _judged(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """With the mean accuracy of all clients' subnets on the server's samples, 0 for kinds that never took part.

    It is the accuracy of an entrant that trains no more than one small subnet: the rest of its model is untrained.
    """
    tiers = result["tiers"]
    subnets = sum(_CLIENTS_OF[tier] * float(found) for tier, found in tiers.items()) / CLIENTS
    return {**result, "subnets": subnets, "accuracy": subnets if ENTRANTS[name].one_subnet else result["accuracy"]}


def _means(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return statistics.fmean(float(result[name]) for result in results)

    tiers = {name: statistics.fmean(float(one["tiers"][name]) for one in results) for name in results[0]["tiers"]}
    return {
        "seeds": len(results),
        **{name: mean(name) for name in (*FIGURES, *COSTS)},
        "spread": statistics.stdev(float(one["accuracy"]) for one in results) if len(results) > 1 else None,
        "violations": sum(int(result["violations"]) for result in results),
        "tiers": tiers,
    }


def _versus(games: Games, name: str, baseline: str) -> Mapping[str, PairedDifference]:
    if len(games[name]) < 2 or len(games[name]) != len(games.get(baseline, ())):
        return {}
    return {
        figure: paired_difference(
            [float(one[figure]) for one in games[name]], [float(one[figure]) for one in games[baseline]]
        )
        for figure in FIGURES
    }


def league_tables(found: Mapping[str, Any]) -> Iterator[TextTable]:
    """Of a `summary`."""
    entrants = sorted(found["entrants"].items(), key=lambda item: -float(item[1]["accuracy"]))
    accuracies = [_accuracies(name, one) for name, one in entrants]
    yield TextTable(title="Accuracy, means over the seeds", heads=_HEADS, rows=accuracies)
    costs = [_costs(name, one) for name, one in entrants]
    yield TextTable(title="Cost, means over the seeds", heads=("entrant", *_COST_HEADS), rows=costs)
    versus = [(name, found["versus"][name]) for name, _ in entrants if found["versus"].get(name)]
    if versus:
        title = f"Paired differences from {found['baseline']}, in points, with 95 % intervals"
        rows = [[name, *(difference_text(figures[figure]) for figure in FIGURES)] for name, figures in versus]
        yield TextTable(title=title, heads=_DIFFERENCE_HEADS, rows=rows)


def _accuracies(name: str, one: Mapping[str, Any]) -> list[str]:
    spread = "" if one["spread"] is None else f"{100 * one['spread']:.1f}"
    accuracy, *others = (f"{100 * one[figure]:.1f}" for figure in FIGURES)
    return [name, str(one["seeds"]), accuracy, spread, *others]


def _costs(name: str, one: Mapping[str, Any]) -> list[str]:
    return [
        name,
        *(f"{one[figure] / 1e6:.0f}" for figure in ("bytes_down", "bytes_up")),
        f"{one['macs'] / 1e9:.0f}",
        *(f"{100 * one[figure]:.1f}" for figure in _SHARES),
        f"{one['never_folded']:.0f}",
        f"{one['programs_written']:.0f}",
        str(one["violations"]),
    ]
