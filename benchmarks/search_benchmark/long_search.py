"""A long search for the largest submodel of one budget, which shares nothing with the search that it judges."""

from collections.abc import Sequence
from random import Random

from search_benchmark.spaces import Case
from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.search.query import Query, measure_fit

__all__ = ["find_most_parameters"]

_MOST_MUTATIONS = 6
_CROSSED = 0.3


def find_most_parameters(
    case: Case, query: Query, starts: Sequence[Genes], *, trials: int, kept: int, rng: Random
) -> int:
    """The most parameters that an evolution over random changes comes by within the budget; 0 where nothing fits.

    Args:
        case: the space.
        query: of one device.
        starts: of the first generation.
        trials: submodels that are looked at.
        kept: of them those with the most parameters are changed further.
        rng: decides everything.
    """
    space = case.space
    everyone: dict[Genes, int] = {}

    def look(genes: Genes) -> None:
        fit = measure_fit(case.estimate(space.architecture(genes)), query)
        if fit is not None:
            everyone[genes] = fit.candidate.parameters
            if len(everyone) > 2 * kept:
                for worst in sorted(everyone, key=everyone.__getitem__)[: len(everyone) - kept]:
                    del everyone[worst]

    for genes in (space.smallest, *starts):
        look(genes)
    for _ in range(trials):
        if not everyone:
            return 0
        known = list(everyone)
        genes = rng.choice(known)
        if rng.random() < _CROSSED:
            genes = tuple(rng.choice(pair) for pair in zip(genes, rng.choice(known), strict=True))
        for _ in range(rng.randint(1, _MOST_MUTATIONS)):
            genes = _mutate(space, genes, rng)
        look(space.canonical(genes))
    return max(everyone.values())


def _mutate(space: SearchSpace, genes: Genes, rng: Random) -> Genes:
    """Move a random gene that has several options one step up or down."""
    open_genes = [index for index, gene in enumerate(space.genes) if len(gene.options) > 1]
    if not open_genes:
        return genes
    chosen = rng.choice(open_genes)
    steps = [step for step in (-1, 1) if 0 <= genes[chosen] + step < len(space.genes[chosen].options)]
    return (*genes[:chosen], genes[chosen] + rng.choice(steps), *genes[chosen + 1 :])
