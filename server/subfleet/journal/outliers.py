"""Whose updates a run found unlike the others, and what it did with them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.journal.records import ClientRow, RoundRecord

_MOST_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierCounts:
    """In how many rounds what was done with the updates of each client, by its id; without those of none.

    Attributes:
        scaled: they counted less.
        left_out: they did not count: refused when they came or when they were judged, or their client had to wait.
        reported: it was said, and they counted as they were.
        rounds: that the run had.
    """

    scaled: Mapping[str, int]
    left_out: Mapping[str, int]
    reported: Mapping[str, int]
    rounds: int

    @property
    def altered(self) -> tuple[str, ...]:
        """In what the run differs for it from one that counts every update as it is."""
        return tuple(self._told({"updates scaled down": self.scaled, "updates left out": self.left_out}))

    @property
    def lines(self) -> tuple[str, ...]:
        """The same for people, with what was only reported."""
        reported = {"updates far from the others, which counted as they are": self.reported}
        return (*self.altered, *self._told(reported))

    def _told(self, kinds: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
        for what, counts in kinds.items():
            if counts:
                yield f"{what}: {_join_names(counts)} (of {self.rounds} rounds)"


def count_outliers(rounds: Iterable[RoundRecord]) -> OutlierCounts:
    """What the rounds of a run tell of it."""
    found: dict[str, dict[str, int]] = {"scaled": {}, "left_out": {}, "reported": {}}
    count = 0
    for record in rounds:
        count += 1
        for row in record.clients:
            if row.outlier:
                kind = found[_classify(row)]
                kind[row.client_id] = kind.get(row.client_id, 0) + 1
    ordered = {kind: MappingProxyType(dict(sorted(counts.items()))) for kind, counts in found.items()}
    return OutlierCounts(rounds=count, **ordered)


def _classify(row: ClientRow) -> str:
    if row.status != "aggregated":
        return "left_out"
    return "scaled" if row.scale < 1 else "reported"


def _join_names(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    told = [f"{name} in {counts[name]}" for name in ordered[:_MOST_NAMES]]
    rest = len(ordered) - _MOST_NAMES
    return ", ".join(told) + (f" and {rest} more clients" if rest > 0 else "")
