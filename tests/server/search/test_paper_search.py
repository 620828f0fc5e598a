import pytest
from server.search.search_cases import (
    RATES,
    ListedSearch,
    answer_query,
    ends,
    estimate,
    exhaustive_search,
    network,
    paper_search,
    pareto_search,
    queries,
    query_at,
    run,
    stream,
    whole_space,
)

from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.search.candidates import fits, order_candidates
from subfleet.search.query import FoundSize, Search
from subfleet.search.searches import PaperSettings


def test_the_pool_begins_with_the_smallest_and_the_largest() -> None:
    search = paper_search(whole_space())
    assert [candidate.architecture for candidate in search.known] == [candidate.architecture for candidate in ends()]
    run(search, queries(200))
    assert {candidate.architecture for candidate in ends()} < {candidate.architecture for candidate in search.known}
    assert (
        len(search.known)
        == len(search.pool) + 2
        == len({candidate.architecture.architecture_id for candidate in search.known})
    )


@pytest.mark.slow
def test_an_epsilon_of_one_never_explores() -> None:
    search = paper_search(whole_space(), PaperSettings(epsilon=1))
    assert {answer.explored for answer in run(search, queries(300))} == {()}
    assert search.pool == ()


def test_an_epsilon_of_zero_always_ends_after_t_max() -> None:
    search = paper_search(whole_space(), PaperSettings(epsilon=0, t_max=3))
    assert {len(search.explore(query, stream(index))) for index, query in enumerate(queries(20))} == {4}


@pytest.mark.slow
def test_the_limit_is_reached_as_often_as_consecutive_draws_are_likely() -> None:
    search = paper_search(whole_space(), PaperSettings(epsilon=0.3, t_max=1))
    hits = sum(len(search.explore(query_at(0.5, 0.5), stream(index))) == 2 for index in range(2000))
    # t_max + 1 draws, each with probability 0.7: 0.49; four standard deviations of 2000 are 0.045.
    assert hits / 2000 == pytest.approx(0.7**2, abs=0.045)


def test_a_draw_joins_the_pool_whether_it_fits_or_not_and_a_larger_one_is_taken() -> None:
    low = estimate(whole_space().architecture(whole_space().smallest)).training_memory_bytes["onnx"]
    tight = answer_query(paper_search(whole_space(), PaperSettings(epsilon=0)), query_at(0.12, 1), stream(1))
    explored = tight.explored
    assert tight.fit is not None
    assert any(estimate(size.architecture).training_memory_bytes["onnx"] > 3 * low for size in explored)
    assert all(size.drawn for size in explored)
    wide = answer_query(paper_search(whole_space(), PaperSettings(epsilon=0)), query_at(0.9, 0.9), stream(1))
    assert wide.explored == tight.explored, "what is drawn does not depend on the budget"
    assert wide.fit is not None
    assert wide.fit.candidate.architecture in {size.architecture for size in explored}


def test_the_largest_of_the_pool_is_the_one_with_most_parameters() -> None:
    search = paper_search(whole_space(), PaperSettings(epsilon=1))
    search.learn(
        [
            FoundSize(architecture=whole_space().architecture(whole_space().random(stream(index))), drawn=True)
            for index in range(300)
        ]
    )
    for query in queries(50):
        fit = search.best(query)
        fitting = [candidate.parameters for candidate in search.known if fits(candidate, "onnx", query.limits)]
        assert (fit.candidate.parameters if fit else None) == (max(fitting) if fitting else None)


def test_a_full_pool_does_not_grow() -> None:
    search = paper_search(whole_space(), PaperSettings(epsilon=0.2, pool_limit=10))
    answers = run(search, queries(60))
    assert len(search.known) == 10
    assert {answer.explored for answer in answers[-3:]} == {()}


def test_uniform_ratios_reproduce_heterofl_exactly() -> None:
    space = search_space(network(), RATES, width="network", depth="whole")
    every = [space.architecture(genes) for genes in space.enumerate()]
    listed = [
        architecture
        for architecture in uniform_space(network(), RATES)
        if len(architecture.blocks) == len(network().blocks)
    ]
    paper = paper_search(space)
    paper.learn([FoundSize(architecture=architecture, drawn=True) for architecture in every])
    searches: list[Search] = [
        paper.search,
        pareto_search(space, uniform=listed).search,
        exhaustive_search(space),
        ListedSearch(listed),
    ]
    candidates = order_candidates([estimate(architecture) for architecture in listed])
    for query in queries(200):
        expected = next(
            (candidate for candidate in reversed(candidates) if fits(candidate, "onnx", query.limits)), None
        )
        for search in searches:
            fit = search.best(query)
            assert (fit.candidate.architecture.architecture_id if fit else None) == (
                expected.architecture.architecture_id if expected else None
            )
