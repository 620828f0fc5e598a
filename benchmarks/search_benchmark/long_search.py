"""A long search for the largest submodel of one budget, which shares no code with the judged search."""

from collections.abc import Sequence
from random import Random

from search_benchmark.spaces import Case
from subfleet.elastic.spaces import Genes, SearchSpace
from subfleet.search.query import Query, satisfies

__all__ = ["find_most_parameters"]

_MOST_MUTATIONS = 6
_CROSSED = 0.3


def find_most_parameters(
    case: Case, query: Query, starts: Sequence[Genes], *, trials: int, survivors: int, rng: Random
) -> int:
    """The most parameters within the budget that an evolution finds by random changes; 0 if nothing fits.

    Args:
        case: the space.
        query: one device's query.
        starts: submodels of the first generation.
        trials: number of submodels to try.
        survivors: number of submodels with the most parameters that are changed further.
        rng: source of all random choices.
    """
    space = case.space
    population: dict[Genes, int] = {}

    def consider(genes: Genes) -> None:
        candidate = case.estimate(space.architecture(genes))
        if satisfies(candidate, query):
            population[genes] = candidate.parameters
            if len(population) > 2 * survivors:
                for worst in sorted(population, key=population.__getitem__)[: len(population) - survivors]:
                    del population[worst]

    for genes in (space.smallest, *starts):
        consider(genes)
    for _ in range(trials):
        if not population:
            return 0
        known = list(population)
        genes = rng.choice(known)
        if rng.random() < _CROSSED:
            genes = tuple(rng.choice(pair) for pair in zip(genes, rng.choice(known), strict=True))
        for _ in range(rng.randint(1, _MOST_MUTATIONS)):
            genes = _mutate(space, genes, rng)
        consider(space.canonical(genes))
    return max(population.values())


def _mutate(space: SearchSpace, genes: Genes, rng: Random) -> Genes:
    """Move a random gene that has several options one step up or down."""
    open_genes = [index for index, gene in enumerate(space.genes) if len(gene.options) > 1]
    if not open_genes:
        return genes
    position = rng.choice(open_genes)
    steps = [step for step in (-1, 1) if 0 <= genes[position] + step < len(space.genes[position].options)]
    return (*genes[:position], genes[position] + rng.choice(steps), *genes[position + 1 :])
