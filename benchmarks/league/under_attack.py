"""What attacks cost: each entrant's accuracy with and without them, paired over seeds."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from league.attacks import ATTACKERS
from league.rendering import TextTable, difference_text, plain_difference
from subfleet.reporting.paired import paired_difference

__all__ = ["attack_summary", "attack_tables"]

_HEADS = (
    "entrant",
    "attack",
    "seeds",
    "global %",
    "spread",
    "honest subnets %",
    "lost %",
    "lost, less FedFA's (points)",
    "backdoor %",
)

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
                attack: plain_difference(paired_difference(found, drops[rivals[name]][attack]))
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


def attack_tables(found: Mapping[str, Any]) -> Iterator[TextTable]:
    """Of an `attack_summary`."""
    rows = [
        _row(name, attack, one, found["versus"].get(name, {}).get(attack))
        for name, by_attack in found["entrants"].items()
        for attack, one in by_attack.items()
    ]
    yield TextTable(title="Under attack, means over the seeds", heads=_HEADS, rows=rows)


def _row(name: str, attack: str, one: Mapping[str, Any], versus: Mapping[str, Any] | None) -> list[str]:
    return [
        name,
        attack,
        str(one["seeds"]),
        *(f"{100 * one[figure]:.1f}" for figure in ("accuracy", "spread", "honest", "drop")),
        "" if versus is None else difference_text(versus),
        f"{100 * one['backdoor']:.1f}" if "backdoor" in one else "",
    ]
