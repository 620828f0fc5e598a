from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.search.search_cases import (
    RATES,
    TARGET,
    ListedSearch,
    Serving,
    answer_query,
    estimate,
    exhaustive_search,
    network,
    paper_search,
    pareto_search,
    queries,
    query_at,
    run,
    stream,
    tight_and_loose_queries,
    uniform_sizes,
    whole_space,
)

from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import search_space, uniform_space
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.query import EstimateIndex, Query
from subfleet.search.searches import PaperSettings, ParetoSearch, ParetoSettings


@pytest.mark.slow
@pytest.mark.parametrize(
    "paper", [PaperSettings(), PaperSettings(epsilon=0.3, pool_limit=40), PaperSettings(epsilon=1)]
)
def test_no_client_gets_less_than_with_the_papers_search_or_the_best_uniform_width(paper: PaperSettings) -> None:
    device_queries = queries(150, seed=3)
    pareto = run(
        pareto_search(whole_space(), uniform=uniform_sizes(), settings=ParetoSettings(paper=paper, trials=8)),
        device_queries,
    )
    plain = run(paper_search(whole_space(), paper), device_queries)
    uniform = run(Serving(search=ListedSearch(uniform_sizes())), device_queries)
    drawn = [[size for size in answer.explored if size.drawn] for answer in pareto]
    assert drawn == [list(answer.explored) for answer in plain]
    for answer, plain_answer, uniform_answer in zip(pareto, plain, uniform, strict=True):
        assert answer.parameters >= max(plain_answer.parameters, uniform_answer.parameters)
    if paper.epsilon < 1:
        assert sum(answer.parameters for answer in pareto) > sum(answer.parameters for answer in plain)


def test_an_epsilon_of_one_never_explores() -> None:
    still = ParetoSettings(paper=PaperSettings(epsilon=1))
    search = pareto_search(whole_space(), uniform=uniform_sizes(), settings=still)
    assert all(answer.explored == () for answer in run(search, queries(100)))


@pytest.mark.slow
def test_answers_have_99_percent_of_the_most_parameters_that_fit() -> None:
    search = pareto_search(whole_space(), uniform=uniform_sizes())
    best = exhaustive_search(whole_space())
    run(search, queries(200, seed=8))
    test_queries = queries(100, seed=9)
    shares = [
        answer.parameters / fit.candidate.parameters
        for answer, query in zip(run(search, test_queries, first=1000), test_queries, strict=True)
        if (fit := best.best(query)) is not None
    ]
    assert len(shares) > 70
    assert sum(shares) / len(shares) >= 0.99
    assert min(shares) >= 0.95


@pytest.mark.slow
def test_the_first_round_of_a_small_fleet_has_985_of_1000_parameters_that_fit() -> None:
    best, shares = exhaustive_search(whole_space()), []
    for number in range(6):
        search = pareto_search(whole_space(), uniform=uniform_sizes())
        round_queries = [query_at(stream(number, 0, index).random() * 0.9, 1.0) for index in range(5)]
        for index, query in enumerate(round_queries):
            search.learn(search.explore(query, stream("x", number, 0, index)))
        for query in round_queries:
            fit, optimum = search.best(query), best.best(query)
            if optimum is not None:
                shares.append((fit.rank[0] if fit else 0) / optimum.rank[0])
    assert len(shares) > 20
    assert sum(shares) / len(shares) >= 0.985
    assert min(shares) >= 0.93


def _estimate_linear(architecture: Architecture, network: Network) -> Candidate:
    """Estimate costs for which memory and parameters are unrelated: the first section takes the memory, the last has
    most parameters."""
    sizes = network.shapes(architecture)
    first = sum(shape[0] for name, shape in sizes.items() if name.startswith("section0") and len(shape) > 1)
    parameters = network.parameter_count(architecture)
    return Candidate(
        architecture=architecture,
        parameters=parameters,
        forward_macs=parameters,
        weight_bytes=4 * parameters,
        update_bytes=4 * parameters,
        training_memory_bytes={"onnx": 4096 * first + parameters},
    )


@pytest.mark.slow
def test_the_largest_is_found_where_memory_and_parameters_are_unrelated() -> None:
    """A ranking by utilisation lost half of the parameters to submodels that filled the memory."""
    network = network_of(Mlp(input_shape=(8,), class_count=4, widths=(32, 64), depths=(2, 2), group_size=4))
    space = search_space(network, RATES)

    @cache
    def linear_estimate(architecture: Architecture) -> Candidate:
        return _estimate_linear(architecture, network)

    best = exhaustive_search(space, linear_estimate)
    search = pareto_search(space, linear_estimate, uniform=uniform_space(network, RATES))
    low, high = (
        linear_estimate(space.architecture(genes)).training_memory_bytes["onnx"]
        for genes in (space.smallest, space.largest)
    )
    device_queries = [
        Query(target="onnx", limits=Budget(memory_bytes=low + (high - low) * index // 30)) for index in range(31)
    ]
    for number in range(4):
        run(search, device_queries, first=100 * number)
    fits, optima = ([source.best(query) for query in device_queries] for source in (search, best))
    shares = [fit.rank[0] / optimum.rank[0] for fit, optimum in zip(fits, optima, strict=True) if fit and optimum]
    assert len(shares) == len(device_queries)
    assert min(shares) >= 0.95
    # Queries for which a smaller submodel uses more of the budget.
    alone = [EstimateIndex(TARGET, [candidate]) for candidate in best.known]
    unused = [
        optimum
        for query, optimum in zip(device_queries, optima, strict=True)
        if optimum and any((fit := index.best(query)) and fit.utilisation > optimum.utilisation for index in alone)
    ]
    assert len(unused) > 10


@cache
def half_trained_search() -> ParetoSearch:
    """A search that has learned from ten devices."""
    serving = pareto_search(whole_space(), uniform=uniform_sizes())
    run(serving, queries(10, seed=7))
    assert isinstance(serving.search, ParetoSearch)
    return serving.search


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(queries=tight_and_loose_queries(), richer_first=st.booleans(), known=st.integers(0, 200))
def test_the_poorer_of_two_devices_never_gets_more_whichever_explores_first(
    queries: tuple[Query, Query], richer_first: bool, known: int
) -> None:
    """All devices explore before any is answered, so each profits from the submodels that the others found."""
    search = pareto_search(whole_space(), uniform=uniform_sizes(), settings=ParetoSettings(trials=24))
    search.learn(half_trained_search().pool[:known])
    for query in reversed(queries) if richer_first else queries:
        search.learn(search.explore(query, stream(richer_first, known)))
    poorer, richer = (search.best(query) for query in queries)
    assert poorer is None or (richer is not None and richer.rank[0] >= poorer.rank[0])


@pytest.mark.slow
def test_a_climb_serves_the_device_that_it_was_made_for() -> None:
    paper = PaperSettings(epsilon=0.9)
    climbing, best = ParetoSettings(paper=paper, samples=0), exhaustive_search(whole_space())
    pairs = [
        (
            answer_query(pareto_search(whole_space(), settings=climbing), query, stream(index)).parameters,
            answer_query(paper_search(whole_space(), paper), query, stream(index)).parameters,
            fit.candidate.parameters,
        )
        for index, query in enumerate(queries(40, seed=6))
        if (fit := best.best(query)) is not None
    ]
    pareto, plain = ([pair[side] / pair[2] for pair in pairs] for side in (0, 1))
    assert sum(pareto) / len(pareto) > 0.9
    assert sum(plain) / len(plain) < 0.6


@pytest.mark.slow
def test_the_pool_holds_no_submodel_that_another_replaces() -> None:
    """Except for draws, no submodel joins the pool where a known one costs no more and has 0.99 of its parameters."""
    search = pareto_search(whole_space(), uniform=uniform_sizes())
    for index, query in enumerate(queries(40, seed=6)):
        before = EstimateIndex(TARGET, search.known)
        for size in search.explore(query, stream(index)):
            candidate = estimate(size.architecture)
            assert size.drawn or not any(
                known.parameters >= 0.99 * candidate.parameters
                and known.training_memory_bytes["onnx"] <= candidate.training_memory_bytes["onnx"]
                and known.weight_bytes <= candidate.weight_bytes
                for known in before
            )
            search.learn([size])
            before.add(candidate)
    assert len(search.pool) > 100


def test_the_pool_is_bounded_and_draws_have_their_own_room() -> None:
    small = ParetoSettings(paper=PaperSettings(epsilon=0.5, pool_limit=30), built_limit=50)
    search = pareto_search(whole_space(), settings=small)
    run(search, queries(120))
    drawn = [size for size in search.pool if size.drawn]
    assert len(drawn) == 30 - 2
    assert 50 <= len(search.pool) <= 50 + 28


@pytest.mark.slow
def test_a_uniform_submodel_outside_the_space_is_given_but_no_start() -> None:
    space = search_space(network(), (0.5, 1), width="network", depth="whole")
    outside = [architecture for architecture in uniform_sizes() if not space.holds(architecture)]
    search = pareto_search(space, uniform=outside)
    fits = [answer.fit for answer in run(search, queries(60)) if answer.fit is not None]
    assert {fit.candidate.architecture.name for fit in fits} & {architecture.name for architecture in outside}


def test_a_device_whose_link_carries_nothing_larger_explores_nothing() -> None:
    search = pareto_search(whole_space(), uniform=uniform_sizes(), settings=ParetoSettings(samples=0))
    fit = search.best(query_at(0.6, 0.6))
    assert fit is not None
    plenty = Budget(memory_bytes=2**40, downlink_bytes=fit.candidate.weight_bytes)
    assert search.explore(Query(target="onnx", limits=plenty), stream(2)) == ()
    wider = Budget(memory_bytes=2**40, downlink_bytes=2 * fit.candidate.weight_bytes)
    assert search.explore(Query(target="onnx", limits=wider), stream(2))
