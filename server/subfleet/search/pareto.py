"""Our search: the paper's, on an index of all known submodels, and climbs that make it better where it is asked.

The answer is the known submodel that fits and has the most parameters. Everything that the paper's search draws and
every submodel of a uniform space is known, so no answer has fewer parameters than that search gives with the same
draws, nor than the best uniform submodel has. What is known does not depend on the budget that is asked for: more
memory or a faster link never gives fewer parameters.

While the pool has room, every device makes the search look at a few submodels of any size and, where more may fit,
starts
climbs towards its budget: several while the pool is small and grows, then one as long as these find something, and then
one for one device in many. Of what was looked at, that joins the pool which nothing known stands in for: nothing with
0.99 of its parameters or more takes as little memory. So the pool grows along the best trade of memory for parameters,
and serves budgets that nobody has had yet.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.protocol.bounds import checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.limits import Count, Fraction
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.climbing import Climb
from subfleet.search.index import EstimateIndex
from subfleet.search.paper import PaperSearch, PaperSettings
from subfleet.search.query import CostEstimates, Explored, Fit, FoundSize, Query

__all__ = ["ParetoSearch", "ParetoSettings"]

_STARTS = 8
"""Known submodels of each kind from which a climb begins."""
_IN_VAIN = 4
"""Climbs in a row that came no higher: others would not, either."""
_STILL_GROWS = 0.5
"""Of what joined a pool lately, the share that was built, above which a small pool is one of a run's first devices."""
_RECENT = 64
"""The latest of the pool: how many of them climbs have found tells whether they still find anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ParetoSettings:
    """Settings of our search.

    Attributes:
        paper: of the search that ours begins with. An epsilon of 1 switches off all exploring, ours too.
        slack: fraction of its parameters below which a submodel is not worth to be known beside another, 0 to 1.
        trials: submodels that one climb cost estimates.
        samples: submodels of any size that are looked at for each device, and as many at the corners of the space.
        climbs: at most, for each device while the pool is small and still grows; then one.
        small_pool: submodels in the pool up to which it is small.
        built_limit: submodels in the pool beyond which it grows by the paper's draws alone, as far as those go.
    """

    paper: PaperSettings = field(default_factory=PaperSettings)
    slack: Fraction = 0.01
    trials: Count = 64
    samples: Count = 2
    climbs: Count = 8
    small_pool: Count = 768
    built_limit: Count = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParetoSearch:
    """See the module.

    Attributes:
        space: to choose from.
        estimate: of its submodels.
        targets: program targets that devices may run.
        settings: of the search.
        paper: the paper's search, which has learned the draws.
        known: every submodel that is known, with its cost estimate.
        most_parameters: of any submodel of the space.
        pool: what was learned beside the smallest, the largest and the uniform submodels.
    """

    space: SearchSpace
    estimate: CostEstimates
    targets: tuple[str, ...]
    settings: ParetoSettings
    paper: PaperSearch
    known: EstimateIndex
    most_parameters: int
    pool: tuple[FoundSize, ...] = ()

    @classmethod
    def over(
        cls,
        space: SearchSpace,
        estimate: CostEstimates,
        targets: Sequence[str],
        *,
        uniform: Sequence[Architecture] = (),
        settings: ParetoSettings | None = None,
    ) -> "ParetoSearch":
        """A search that has learned nothing yet.

        Args:
            space: to choose from.
            estimate: of its submodels.
            targets: program targets that devices may run.
            uniform: submodels of one width rate, which are known from the start; they need not be in the space.
            settings: of the search.
        """
        settings = settings or ParetoSettings()
        paper = PaperSearch.over(space, estimate, targets, settings.paper)
        return cls(
            space=space,
            estimate=estimate,
            targets=tuple(targets),
            settings=settings,
            paper=paper,
            known=EstimateIndex(targets, (*paper.known, *map(estimate, uniform))),
            most_parameters=estimate(space.architecture(space.largest)).parameters,
        )

    def best(self, query: Query) -> Fit | None:
        """The known submodel with the most parameters that fits."""
        return self.known.best(query)

    def explore(self, query: Query, rng: Random) -> Explored:
        """The paper's draws, submodels of any size, and what a climb towards the budget comes by."""
        drawn = self.paper.explore(query, rng)
        full = self.settings.paper.epsilon >= 1 or len(self.pool) >= self.settings.built_limit
        cold = len(self.pool) < self.settings.small_pool and self._yield() > _STILL_GROWS
        if full or (rng.random() >= self._yield() and not cold):
            return drawn
        drawers = (self.space.spread, self.space.corner)
        tried = [
            self.estimate(self.space.architecture(draw(rng))) for draw in drawers for _ in range(self.settings.samples)
        ]
        tried += self._climbed(tried, query, rng, most=self.settings.climbs if cold else 1)
        known = {one.architecture for one in drawn.found}
        built = [one for one in self._worth_knowing(tried, query) if one.architecture not in known]
        room = max(0, self.settings.built_limit - len(self.pool) - len(drawn.found))
        return Explored(found=(*drawn.found, *built[:room]), draws=drawn.draws, hit=drawn.hit)

    def estimated(self, estimate: CostEstimates) -> "ParetoSearch":
        """With another source of the same cost estimates."""
        return replace(self, estimate=estimate, paper=self.paper.estimated(estimate))

    def learned(self, found: Sequence[FoundSize]) -> "ParetoSearch":
        """With draws as far as the paper's search takes them, and what was built while it is below its own limit."""
        paper, known, new = self.paper, self.known.copied(), list[FoundSize]()
        for one in found:
            before = len(paper.pool), len(known)
            if one.drawn:
                paper = paper.learned([one])
            built = len(self.pool) + len(new) < self.settings.built_limit
            if one.architecture in paper.known if one.drawn else built:
                known.add(self.estimate(one.architecture))
            if before != (len(paper.pool), len(known)):
                new.append(one)
        return replace(self, paper=paper, known=known, pool=(*self.pool, *new))

    def _climbed(self, tried: Sequence[Candidate], query: Query, rng: Random, *, most: int) -> list[Candidate]:
        """What climbs look at: each begins from what is known and from what was looked at before it.

        They end where no more can fit, or where some of them in a row have come no higher.
        """
        known = self.known
        if most > 1:
            known = known.copied()
            for one in tried:
                known.add(one)
        climb = Climb(space=self.space, estimate=self.estimate, trials=self.settings.trials)
        found: list[Candidate] = []
        in_vain = 0
        for _ in range(most):
            best = known.best(query)
            if best is None or in_vain == _IN_VAIN or not self._may_grow(best, query):
                break
            looked_at = climb.tried(*self._starts(known, query), query, rng)
            found += looked_at
            if most > 1:
                for one in looked_at:
                    known.add(one)
                higher = known.best(query)
                in_vain = 0 if higher is not None and higher.rank > best.rank else in_vain + 1
        return found

    def _may_grow(self, best: Fit, query: Query) -> bool:
        """Whether a submodel may fit that has more parameters by the slack: they travel, so links bound them."""
        candidate, limits = best.candidate, query.limits
        moved = ((candidate.weight_bytes, limits.downlink_bytes), (candidate.update_bytes, limits.uplink_bytes))
        near = 1 - self.settings.slack
        return candidate.parameters < self.most_parameters and not any(
            link_bytes is not None and moved_bytes >= near * link_bytes for moved_bytes, link_bytes in moved
        )

    def _yield(self) -> float:
        """Of what joined the pool lately, the share that was built and not drawn; never 0, and 1 in the beginning."""
        recent = self.pool[-_RECENT:]
        drawn = sum(one.drawn for one in recent)
        return 1 - min(drawn, _RECENT - 1) / _RECENT

    def _starts(self, known: EstimateIndex, query: Query) -> tuple[list[Genes], list[Genes]]:
        """Genes of known submodels just within the budget, and of larger ones just beyond it."""
        within, beyond = (list(islice(self._genes_of(every), _STARTS)) for every in known.around(query, 2 * _STARTS))
        return within or [self.space.smallest], beyond

    def _genes_of(self, candidates: Iterable[Candidate]) -> Iterator[Genes]:
        """Of those that are in the space."""
        for one in candidates:
            with suppress(ConfigError):
                yield self.space.genes_of(one.architecture)

    def _worth_knowing(self, tried: Iterable[Candidate], query: Query) -> Iterable[FoundSize]:
        """Those that nothing known stands in for, nor one before them; the ones with most parameters come first."""
        new = EstimateIndex(self.targets)
        for one in sorted(tried, key=lambda one: one.order, reverse=True):
            held = (index.stands_in(one, query, self.settings.slack) for index in (self.known, new))
            if one.architecture not in self.known and not any(held):
                new.add(one)
                yield FoundSize(architecture=one.architecture, drawn=False)
