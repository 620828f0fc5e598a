"""Counts of the outliers among a run's updates, by client and treatment."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.journal.records import ClientRow, RoundRecord

_MOST_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierCounts:
    """The number of rounds in which a client's update was an outlier, by client; without clients that have none.

    Attributes:
        scaled: the update counted less.
        left_out: the update did not count: it was refused, or its client was excluded.
        reported: the outlier was reported, and the update counted in full.
        rounds: number of rounds of the run.
    """

    scaled: Mapping[str, int]
    left_out: Mapping[str, int]
    reported: Mapping[str, int]
    rounds: int

    @property
    def altered(self) -> tuple[str, ...]:
        """How the run differs from one that counts every update in full."""
        return tuple(self._describe({"updates scaled down": self.scaled, "updates left out": self.left_out}))

    @property
    def lines(self) -> tuple[str, ...]:
        """The same, with outliers that were only reported."""
        reported = {"updates far from the others, which counted in full": self.reported}
        return (*self.altered, *self._describe(reported))

    def _describe(self, kinds: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
        for what, counts in kinds.items():
            if counts:
                yield f"{what}: {_join_names(counts)} (of {self.rounds} rounds)"


def count_outliers(rounds: Iterable[RoundRecord]) -> OutlierCounts:
    """Count the outliers in the rounds of a run."""
    records = tuple(rounds)
    counts: dict[str, Counter[str]] = {"scaled": Counter(), "left_out": Counter(), "reported": Counter()}
    for row in (row for record in records for row in record.clients if row.outlier):
        counts[_classify(row)][row.client_id] += 1
    ordered = {kind: MappingProxyType(dict(sorted(counted.items()))) for kind, counted in counts.items()}
    return OutlierCounts(rounds=len(records), **ordered)


def _classify(row: ClientRow) -> str:
    if row.status != "aggregated":
        return "left_out"
    return "scaled" if row.scale < 1 else "reported"


def _join_names(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    parts = [f"{name} in {counts[name]}" for name in ordered[:_MOST_NAMES]]
    rest = len(ordered) - _MOST_NAMES
    return ", ".join(parts) + (f" and {rest} more clients" if rest > 0 else "")
