"""What attacks cost: each entrant's accuracy with and without them, paired over seeds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from league.attacks import ATTACKERS
from subfleet.emulation.paired import PairedDifference, paired_difference

__all__ = ["attack_summary", "print_attacks"]

Games = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""By entrant and attack, one result for each seed, in the same order."""


LAST_ROUNDS = 5
"""Accuracies are means over so many: attackers are drawn for some rounds and not for others."""


def attack_summary(games: Games, *, rivals: Mapping[str, str]) -> dict[str, Any]:
    """Everything as one plain object.

    Args:
        games: the results; every entrant has those without an attack.
        rivals: whose losses are compared with whose.

    Returns:
        `entrants`: by name and attack, the mean over the seeds of `accuracy` (the whole model's, or for methods that
        have none the mean of all clients' own; over the last rounds), `honest` (the mean of the honest clients'
        subnets, on the server's samples) and `backdoor` where there is one; and of `drop`, the share of the accuracy
        without an attack that it costs. `versus`: by name and attack, the paired difference of the drop from the
        rival's.
    """
    drops = {name: _drops(by_attack) for name, by_attack in games.items()}
    return {
        "rivals": dict(rivals),
        "entrants": {
            name: {attack: {**_means(results), "drop": _mean(drops[name][attack])} for attack, results in one.items()}
            for name, one in games.items()
        },
        "versus": {
            name: {
                attack: _plain(paired_difference(found, drops[rivals[name]][attack]))
                for attack, found in by_attack.items()
                if attack != "honest" and len(found) > 1
            }
            for name, by_attack in drops.items()
            if rivals.get(name) in drops
        },
    }


def _drops(by_attack: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    before = [_accuracy(result) for result in by_attack["honest"]]
    return {
        attack: [1 - _accuracy(result) / clean for result, clean in zip(results, before, strict=True)]
        for attack, results in by_attack.items()
    }


def _accuracy(result: Mapping[str, Any]) -> float:
    return _mean([float(one["accuracy"]) for one in result["rounds"][-LAST_ROUNDS:]])


def _means(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    honest = [_mean([value for tier, value in one["tiers"].items() if tier != ATTACKERS]) for one in results]
    accuracies = [_accuracy(one) for one in results]
    found = {"seeds": len(results), "accuracy": _mean(accuracies), "honest": _mean(honest)}
    if "backdoor" in results[0]:
        found["backdoor"] = _mean([float(one["backdoor"]) for one in results])
    return {**found, "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _plain(found: PairedDifference) -> dict[str, Any]:
    return {"mean": found.mean, "low": found.low, "high": found.high, "pairs": found.pairs, "tie": found.tie}


def print_attacks(found: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table(title="Under attack: means over the seeds")
    heads = (
        "entrant",
        "attack",
        "global %",
        "spread",
        "honest subnets %",
        "lost %",
        "drop less FedFA's",
        "backdoor %",
    )
    for head in heads:
        table.add_column(head, justify="left" if head in ("entrant", "attack") else "right")
    for name, by_attack in found["entrants"].items():
        for attack, one in by_attack.items():
            versus = found["versus"].get(name, {}).get(attack)
            table.add_row(
                name,
                attack,
                *(f"{100 * one[figure]:.1f}" for figure in ("accuracy", "spread", "honest", "drop")),
                "" if versus is None else _cell(versus),
                f"{100 * one['backdoor']:.1f}" if "backdoor" in one else "",
            )
    console.print(table)


def _cell(one: Mapping[str, Any]) -> str:
    span = f"{100 * one['mean']:+.1f} ({100 * one['low']:+.1f} to {100 * one['high']:+.1f})"
    return f"{span} tie" if one["tie"] else span
