"""The searches of dynamic model selection: the paper's, and ours, which includes and improves it.

The paper's (Yao and Li, "Dynamic Model Selection", section 3.2 and algorithm 2): the pool begins with the smallest and
the largest submodel. A device gets the largest submodel of the pool that fits. Before that, with probability
1 - epsilon a random submodel joins the pool (the printed intersection is a misprint for a union), again and again until
epsilon ends it or there are more than T_max draws. The printed binary search cannot serve two budgets, so the whole
pool is searched.

Ours keeps an index of all known submodels, and climbs that improve it for the budgets it is asked. The answer is the
known submodel with the most parameters that fits. Everything that the paper's search draws and every submodel of a
uniform space is known. So no answer has fewer parameters than that search would give with the same draws, or than the
best uniform submodel. What is known does not depend on the budget of a query: more memory or a faster link never gives
fewer parameters.

While the pool has room, our search looks at a few submodels of any size for every device and, if more may fit, climbs
towards its budget: several times while the pool is small and grows, then once as long as climbs still find something,
and then for one device in many. A submodel joins the pool unless a known one stands in for it, with at least 0.99 of
its parameters and no more memory. So the pool grows along the best trade of memory for parameters, and serves budgets
that no device has had yet.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate, list_limits
from subfleet.search.query import CostEstimates, EstimateIndex, Fit, FoundSize, Query, satisfies

_STARTS = 8
"""Known submodels of each kind that a climb may start from."""
_FAILED_CLIMBS = 4
"""Consecutive climbs without an improvement after which a search stops climbing."""
_STILL_GROWS = 0.5
"""A small pool is cold while more than this fraction of its latest submodels were built."""
_RECENT = 64
"""Latest submodels of the pool; how many of them climbs have built shows whether climbing is still worth it."""
_LOWERED = 2
_RAISED = 3
_FROM_ABOVE = 0.4
"""Genes that a climb lowers and raises at most, and the fraction of climbs that start from a submodel too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSettings:
    """Settings of the paper's search, with its defaults (section 5.1.1).

    Attributes:
        epsilon: probability to take the best of the pool, 0 to 1; 1 never explores.
        t_max: a search ends after more draws than this, 0 or more, as in algorithm 2, line 17.
        pool_limit: the most submodels in the pool, 2 or more; further draws are discarded.
    """

    epsilon: float = 0.8
    t_max: int = 5
    pool_limit: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperSearch:
    """The paper's search, as a value.

    Attributes:
        space: the submodels to draw from.
        estimate: the cost estimates of its submodels.
        settings: of the search.
        known: the pool with the smallest and the largest submodel, and their cost estimates.
        pool: what was learned in addition to these two.
    """

    space: SearchSpace
    estimate: CostEstimates
    settings: PaperSettings
    known: EstimateIndex
    pool: tuple[FoundSize, ...] = ()

    @classmethod
    def begin(cls, space: SearchSpace, estimate: CostEstimates, target: str, settings: PaperSettings) -> "PaperSearch":
        """A search that has learned nothing yet, for devices with this target."""
        ends = (estimate(space.architecture(genes)) for genes in (space.smallest, space.largest))
        return cls(space=space, estimate=estimate, settings=settings, known=EstimateIndex(target, ends))

    def explore(self, query: Query, rng: Random) -> tuple[FoundSize, ...]:
        """Draw submodels until the stream ends it; the draws do not depend on the budget."""
        sizes: list[FoundSize] = []
        while len(sizes) <= self.settings.t_max and rng.random() > self.settings.epsilon:
            sizes.append(FoundSize(architecture=self.space.architecture(self.space.random(rng)), drawn=True))
        new = [size for size in dict.fromkeys(sizes) if size.architecture not in self.known]
        room = max(0, self.settings.pool_limit - len(self.known))
        return tuple(new[:room])

    def with_estimates(self, estimate: CostEstimates) -> "PaperSearch":
        """The search with another source of the same cost estimates."""
        return replace(self, estimate=estimate)

    def learn(self, sizes: Sequence[FoundSize]) -> "PaperSearch":
        """The search that also knows these draws, up to the limit of its pool."""
        known, new = self.known.copy(), list[FoundSize]()
        for size in sizes:
            if len(known) < self.settings.pool_limit and known.add(self.estimate(size.architecture)):
                new.append(size)
        return replace(self, known=known, pool=(*self.pool, *new))

    def best(self, query: Query) -> Fit | None:
        """The largest submodel of the pool that fits."""
        return self.known.best(query)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoSettings:
    """Settings of our search.

    Attributes:
        paper: of the paper's search, which ours includes. An epsilon of 1 switches off all exploration.
        slack: a submodel with at most this fraction more parameters than another is not worth knowing, 0 to 1.
        trials: submodels that one climb looks at.
        samples: submodels of any size to look at for each device, and as many at the corners of the space.
        climbs: the most climbs for a device while the pool is small and still grows; then one.
        small_pool: up to this many submodels the pool is small.
        built_limit: beyond this many submodels the pool grows by the paper's draws alone.
    """

    paper: PaperSettings = field(default_factory=PaperSettings)
    slack: float = 0.01
    trials: int = 64
    samples: int = 2
    climbs: int = 8
    small_pool: int = 768
    built_limit: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParetoSearch:
    """Our search, as a value.

    Attributes:
        settings: of the search.
        paper: the paper's search on the same space, which has learned the draws.
        known: every known submodel with its cost estimate.
        most_parameters: of any submodel of the space.
        pool: what was learned in addition to the smallest, the largest and the uniform submodels.
    """

    settings: ParetoSettings
    paper: PaperSearch
    known: EstimateIndex
    most_parameters: int
    pool: tuple[FoundSize, ...] = ()

    @classmethod
    def begin(
        cls,
        space: SearchSpace,
        estimate: CostEstimates,
        target: str,
        *,
        uniform: Sequence[Architecture],
        settings: ParetoSettings,
    ) -> "ParetoSearch":
        """A search that has learned nothing yet.

        Args:
            space: the submodels to choose from.
            estimate: the cost estimates of its submodels.
            target: program target of the devices.
            uniform: submodels of one width rate, which are known from the start and need not be in the space.
            settings: of the search.
        """
        paper = PaperSearch.begin(space, estimate, target, settings.paper)
        return cls(
            settings=settings,
            paper=paper,
            known=EstimateIndex(target, (*paper.known, *map(estimate, uniform))),
            most_parameters=estimate(space.architecture(space.largest)).parameters,
        )

    def best(self, query: Query) -> Fit | None:
        """The known submodel with the most parameters that fits."""
        return self.known.best(query)

    def explore(self, query: Query, rng: Random) -> tuple[FoundSize, ...]:
        """The paper's draws, submodels of any size, and what climbs towards the budget find."""
        drawn = self.paper.explore(query, rng)
        full = self.settings.paper.epsilon >= 1 or len(self.pool) >= self.settings.built_limit
        cold = len(self.pool) < self.settings.small_pool and self._built_fraction() > _STILL_GROWS
        if full or (rng.random() >= self._built_fraction() and not cold):
            return drawn
        space, estimate = self.paper.space, self.paper.estimate
        seen = [
            estimate(space.architecture(generate(rng)))
            for generate in (space.spread, space.corner)
            for _ in range(self.settings.samples)
        ]
        seen += self._climb(seen, query, rng, most=self.settings.climbs if cold else 1)
        known = {size.architecture for size in drawn}
        built = [size for size in self._select_useful(seen, query) if size.architecture not in known]
        room = max(0, self.settings.built_limit - len(self.pool) - len(drawn))
        return (*drawn, *built[:room])

    def with_estimates(self, estimate: CostEstimates) -> "ParetoSearch":
        """The search with another source of the same cost estimates."""
        return replace(self, paper=self.paper.with_estimates(estimate))

    def learn(self, sizes: Sequence[FoundSize]) -> "ParetoSearch":
        """The search that also knows draws, as the paper's search takes them, and built submodels up to its limit."""
        paper, known, new = self.paper, self.known.copy(), list[FoundSize]()
        for size in sizes:
            before = len(paper.pool), len(known)
            if size.drawn:
                paper = paper.learn([size])
            has_room = len(self.pool) + len(new) < self.settings.built_limit
            if size.architecture in paper.known if size.drawn else has_room:
                known.add(self.paper.estimate(size.architecture))
            if before != (len(paper.pool), len(known)):
                new.append(size)
        return replace(self, paper=paper, known=known, pool=(*self.pool, *new))

    def _climb(self, samples: Sequence[Candidate], query: Query, rng: Random, *, most: int) -> list[Candidate]:
        """Everything that climbs look at; each starts from what is known and from what the climbs before it saw.

        They end when no larger submodel can fit, or when several in a row have found nothing better.
        """
        known = self.known
        if most > 1:
            known = known.copy()
            for candidate in samples:
                known.add(candidate)
        estimated: list[Candidate] = []
        failed = 0
        for _ in range(most):
            best = known.best(query)
            if best is None or failed == _FAILED_CLIMBS or not self._may_grow(best, query):
                break
            climb = _Climb(self.paper.space, self.paper.estimate, query, rng, left=self.settings.trials)
            seen = climb.run(*self._find_starts(known, query))
            estimated += seen
            if most > 1:
                for candidate in seen:
                    known.add(candidate)
                better = known.best(query)
                failed = 0 if better is not None and better.rank > best.rank else failed + 1
        return estimated

    def _may_grow(self, best: Fit, query: Query) -> bool:
        """Whether a submodel may fit that is larger by the slack: parameters travel, so links bound their number."""
        return best.candidate.parameters < self.most_parameters and not any(
            limit == "link" and getattr(best.candidate, cost) >= (1 - self.settings.slack) * most
            for limit, cost, most in list_limits(query.limits)
        )

    def _built_fraction(self) -> float:
        """The fraction of the latest submodels of the pool that were built, not drawn: above 0, and 1 at first."""
        drawn = sum(size.drawn for size in self.pool[-_RECENT:])
        return 1 - min(drawn, _RECENT - 1) / _RECENT

    def _find_starts(self, known: EstimateIndex, query: Query) -> tuple[list[Genes], list[Genes]]:
        """Genes of known submodels just within the budget, and of larger ones just beyond it."""
        within, beyond = (
            list(islice(self._list_genes(near), _STARTS)) for near in known.find_starts(query, 2 * _STARTS)
        )
        return within or [self.paper.space.smallest], beyond

    def _list_genes(self, candidates: Iterable[Candidate]) -> Iterator[Genes]:
        """The genes of the candidates that are in the space."""
        for candidate in candidates:
            with suppress(ConfigError):
                yield self.paper.space.genes_of(candidate.architecture)

    def _select_useful(self, candidates: Iterable[Candidate], query: Query) -> Iterator[FoundSize]:
        """The candidates that neither a known submodel nor a larger candidate stands in for, the largest first."""
        new = EstimateIndex(self.known.target)
        for candidate in sorted(candidates, key=lambda candidate: candidate.order, reverse=True):
            replaced = any(index.stands_in(candidate, query, self.settings.slack) for index in (self.known, new))
            if candidate.architecture not in self.known and not replaced:
                new.add(candidate)
                yield FoundSize(architecture=candidate.architecture, drawn=False)


@dataclass(slots=True)
class _Climb:
    """Looks for larger submodels near known ones: lowers a few genes, and raises others as far as the budget allows.

    A larger gene makes a submodel that costs more of everything, so the most that it can grow is found by bisection.
    Submodels that are slightly too large are as good starts as submodels that fit: often the optimum is a submodel that
    is too large without a part that takes much memory and has few parameters.

    Attributes:
        space: of the genes.
        estimate: the cost estimates of its submodels.
        query: of the device.
        rng: the source of all choices.
        left: how many more submodels may be estimated.
        seen: the submodels that were estimated, whether they fit or not.
        known: by genes, whether their submodel fits.
    """

    space: SearchSpace
    estimate: CostEstimates
    query: Query
    rng: Random
    left: int
    seen: dict[Architecture, Candidate] = field(default_factory=dict)
    known: dict[Genes, bool] = field(default_factory=dict)

    def run(self, below: Sequence[Genes], above: Sequence[Genes]) -> list[Candidate]:
        """Climb, and return every submodel that was looked at, whether it fits or not.

        Args:
            below: starts that fit, the best first; one or more.
            above: starts that do not fit.
        """
        starts, rng = list(below), self.rng
        for _ in range(self.left):  # a known submodel costs no trial
            if not self.left:
                break
            start = rng.choice(above) if above and rng.random() < _FROM_ABOVE else rng.choice(starts)
            end = self._exchange(start)
            if end is not None and end not in starts:
                starts.append(end)
        return list(self.seen.values())

    def _exchange(self, start: Genes) -> Genes | None:
        genes, order, rng = list(start), list(range(len(start))), self.rng
        rng.shuffle(order)
        lowered = rng.randint(0, _LOWERED)
        for done, gene in enumerate(order):
            if done >= lowered and self._fits(genes):
                break
            if most := genes[gene]:  # each power-of-two fraction of the gene is an equally likely step
                genes[gene] -= max(1, most >> rng.randrange(most.bit_length()))
        if not self._fits(genes):
            return None
        rng.shuffle(order)
        for gene in order[:_RAISED]:
            genes[gene] = self._find_most(genes, gene)
        return tuple(genes)

    def _find_most(self, genes: Sequence[int], gene: int) -> int:
        """The largest option of a gene with which a submodel fits that fits with its present one."""
        low, high, step = genes[gene], self.space.largest[gene], 1
        while low < high and self.left:
            middle = min(high, low + step)
            if self._fits([*genes[:gene], middle, *genes[gene + 1 :]]):
                low, step = middle, 2 * step
            else:
                high, step = middle - 1, max(1, (middle - low) // 2)
        return low

    def _fits(self, genes: Sequence[int]) -> bool:
        key = tuple(genes)
        if key not in self.known:
            candidate = self.estimate(self.space.architecture(key))
            if candidate.architecture not in self.seen:
                self.seen[candidate.architecture] = candidate
                self.left = max(0, self.left - 1)
            self.known[key] = satisfies(candidate, self.query)
        return self.known[key]
