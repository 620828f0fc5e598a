"""Which searched subnets become programs, and what a device gets until its own is ready. Pure, plain data.

A task needs an exported program whose exact plan fits. A search finds more subnets than can be exported, so a round
starts a limited number of exports, those first whose lack loses most utilisation over all devices. Until its subnet is
exported, a device gets the best exported one that fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.search.index import PriceIndex
from subfleet.server.search.query import Fit, PriceList, Query

__all__ = ["ExportQueue", "Exported", "Given", "RoundExports", "Wanted", "given_now"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A written program.

    Attributes:
        planned_peak_bytes: its exact planned peak.
    """

    spec: SubnetSpec
    target: str
    planned_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A program that devices of this round would use.

    Attributes:
        lost: utilisation that they lose together without it.
    """

    spec: SubnetSpec
    target: str
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a device gets now.

    Attributes:
        fit: the best exported subnet, with its exact plan as its memory; None where no exported one fits.
        lost: utilisation of the subnet that the search chose, less that of the given one; 0 or more.
    """

    fit: Fit | None
    lost: float


def given_now(chosen: Fit, query: Query, programs: PriceIndex) -> Given:
    """What a device gets in place of a chosen subnet: the largest whose program there is and fits exactly."""
    fit = programs.best(query)
    return Given(fit=fit, lost=max(0.0, chosen.utilisation - (0.0 if fit is None else fit.utilisation)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundExports:
    """One round in figures.

    Attributes:
        devices: that were given a subnet, or would have been.
        lost: utilisation that they lost, summed.
        started: exports that were started.
        left: wanted programs beyond the limit. They are forgotten: the next round's budgets want others.
    """

    devices: int = 0
    lost: float = 0.0
    started: int = 0
    left: int = 0

    @property
    def mean_lost(self) -> float:
        """Utilisation that a device lost on average."""
        return self.lost / self.devices if self.devices else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportQueue:
    """Programs that there are and that are wanted.

    Attributes:
        limit: exports that one round starts at most.
        worth: utilisation that a device must lose before its subnet is wanted: nearly the same program is no gain.
        exported: programs by "target/subnet's id", the oldest first.
        failed: those that could not be written, by the same key, with the reason. They are not tried again.
        wanted: of the open round, by the same key.
        figures: of the open round.
    """

    limit: int = 8
    worth: float = 0.01
    exported: Mapping[str, Exported] = field(default_factory=lambda: MappingProxyType({}))
    failed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    wanted: Mapping[str, Wanted] = field(default_factory=lambda: MappingProxyType({}))
    figures: RoundExports = field(default_factory=RoundExports)

    def __post_init__(self) -> None:
        if self.limit < 0 or not 0 <= self.worth <= 1:
            raise ConfigError(f"limit is {self.limit} and worth {self.worth}, but must be 0 or more, and from 0 to 1")

    def programs(self, target: str, price: PriceList) -> PriceIndex:
        """The programs for a target, with their exact plans in place of estimates; made once for all devices."""
        return PriceIndex(
            [target],
            (
                replace(price(one.spec), training_memory_bytes={target: one.planned_peak_bytes})
                for one in self.exported.values()
                if one.target == target
            ),
        )

    def asked(self, chosen: Fit, target: str, given: Given) -> "ExportQueue":
        """With the wish of one device counted."""
        key = f"{target}/{chosen.candidate.spec.spec_id}"
        figures = replace(self.figures, devices=self.figures.devices + 1, lost=self.figures.lost + given.lost)
        if given.lost < self.worth or key in self.exported or key in self.failed:
            return replace(self, figures=figures)
        before = self.wanted[key].lost if key in self.wanted else 0.0
        wish = Wanted(spec=chosen.candidate.spec, target=target, lost=before + given.lost)
        return replace(self, figures=figures, wanted=MappingProxyType({**self.wanted, key: wish}))

    def started(self) -> tuple["ExportQueue", tuple[Wanted, ...]]:
        """Close the round's wishes: the exports to start, those that lose most first."""
        ranked = sorted(self.wanted.items(), key=lambda pair: (-pair[1].lost, pair[0]))
        chosen = tuple(wish for _, wish in ranked[: self.limit])
        figures = replace(self.figures, started=len(chosen), left=len(ranked) - len(chosen))
        return replace(self, wanted=MappingProxyType({}), figures=figures), chosen

    def written(self, program: Exported) -> "ExportQueue":
        """With a program that is ready."""
        key = f"{program.target}/{program.spec.spec_id}"
        return replace(self, exported=MappingProxyType({**self.exported, key: program}))

    def broken(self, spec: SubnetSpec, target: str, reason: str) -> "ExportQueue":
        """With a program that could not be written."""
        return replace(self, failed=MappingProxyType({**self.failed, f"{target}/{spec.spec_id}": reason}))

    def next_round(self) -> "ExportQueue":
        """With new figures."""
        return replace(self, wanted=MappingProxyType({}), figures=RoundExports())
