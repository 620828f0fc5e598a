"""Counts and describes the outliers among a run's updates, by client and treatment."""

from collections import Counter
from collections.abc import Mapping, Sequence

from subfleet.journal.records import ClientRow, RoundRecord

_MOST_NAMES = 3


def count_outliers(rounds: Sequence[RoundRecord]) -> dict[str, dict[str, int]]:
    """The number of rounds in which a client's update was an outlier, by treatment and client.

    Returns:
        scaled: the update counted less.
        left_out: the update did not count: it was refused, or its client was excluded.
        reported: the outlier was reported, and the update counted in full.
    """
    counts: dict[str, Counter[str]] = {"scaled": Counter(), "left_out": Counter(), "reported": Counter()}
    for row in (row for record in rounds for row in record.clients if row.outlier):
        counts[_classify(row)][row.client_id] += 1
    return {treatment: dict(sorted(counted.items())) for treatment, counted in counts.items()}


def describe_outliers(rounds: Sequence[RoundRecord], *, reported: bool = True) -> tuple[str, ...]:
    """The outliers in a sentence for each treatment; without those that were only reported if that is not wanted."""
    words = {"scaled": "updates scaled down", "left_out": "updates left out"}
    if reported:
        words["reported"] = "updates far from the others, which counted in full"
    counts = count_outliers(rounds)
    return tuple(
        f"{text}: {_join_names(counts[treatment])} (of {len(rounds)} rounds)"
        for treatment, text in words.items()
        if counts[treatment]
    )


def _classify(row: ClientRow) -> str:
    if row.status != "aggregated":
        return "left_out"
    return "scaled" if row.scale < 1 else "reported"


def _join_names(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    parts = [f"{name} in {counts[name]}" for name in ordered[:_MOST_NAMES]]
    rest = len(ordered) - _MOST_NAMES
    return ", ".join(parts) + (f" and {rest} more clients" if rest > 0 else "")
