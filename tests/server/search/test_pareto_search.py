from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.search.search_cases import (
    NETWORK,
    RATES,
    SPACE,
    TARGET,
    UNIFORM,
    ListedSearch,
    Serving,
    answered,
    estimate,
    exhaustive_search,
    paper_search,
    pareto_search,
    poorer_and_richer,
    queries,
    query_at,
    run,
    stream,
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

MANY = list(enumerate(queries(40, seed=6)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "paper", [PaperSettings(), PaperSettings(epsilon=0.3, pool_limit=40), PaperSettings(epsilon=1)]
)
def test_no_client_gets_less_than_with_the_papers_search_or_the_best_uniform_width(paper: PaperSettings) -> None:
    asked = queries(150, seed=3)
    ours = run(pareto_search(SPACE, uniform=UNIFORM, settings=ParetoSettings(paper=paper, trials=8)), asked)
    theirs = run(paper_search(SPACE, paper), asked)
    uniform = run(Serving(search=ListedSearch(UNIFORM)), asked)
    drawn = [[size for size in answer.explored if size.drawn] for answer in ours]
    assert drawn == [list(answer.explored) for answer in theirs]
    for own, other, width in zip(ours, theirs, uniform, strict=True):
        assert own.parameters >= max(other.parameters, width.parameters)
    if paper.epsilon < 1:
        assert sum(one.parameters for one in ours) > sum(one.parameters for one in theirs)


def test_an_epsilon_of_one_never_explores() -> None:
    still = ParetoSettings(paper=PaperSettings(epsilon=1))
    search = pareto_search(SPACE, uniform=UNIFORM, settings=still)
    assert all(answer.explored == () for answer in run(search, queries(100)))


@pytest.mark.slow
def test_answers_have_99_percent_of_the_most_parameters_that_fit() -> None:
    search = pareto_search(SPACE, uniform=UNIFORM)
    best = exhaustive_search(SPACE)
    run(search, queries(200, seed=8))
    asked = queries(100, seed=9)
    shares = [
        own.parameters / fit.candidate.parameters
        for own, query in zip(run(search, asked, first=1000), asked, strict=True)
        if (fit := best.best(query)) is not None
    ]
    assert len(shares) > 70
    assert sum(shares) / len(shares) >= 0.99
    assert min(shares) >= 0.95


@pytest.mark.slow
def test_the_first_round_of_a_small_fleet_has_985_of_1000_parameters_that_fit() -> None:
    best, shares = exhaustive_search(SPACE), []
    for number in range(6):
        search = pareto_search(SPACE, uniform=UNIFORM)
        asked = [query_at(stream(number, 0, place).random() * 0.9, 1.0) for place in range(5)]
        for place, query in enumerate(asked):
            search.learn(search.explore(query, stream("x", number, 0, place)))
        for query in asked:
            own, most = search.best(query), best.best(query)
            if most is not None:
                shares.append((own.rank[0] if own else 0) / most.rank[0])
    assert len(shares) > 20
    assert sum(shares) / len(shares) >= 0.985
    assert min(shares) >= 0.93


def _linear(architecture: Architecture, network: Network) -> Candidate:
    """A cost estimate by which memory and parameters go apart: the first section takes memory, the last has
    parameters."""
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
def test_the_largest_is_found_where_memory_says_nothing_of_parameters() -> None:
    """Ranked by utilisation, half of the parameters were given away for a memory that was full."""
    network = network_of(Mlp(input_shape=(8,), class_count=4, widths=(32, 64), depths=(2, 2), group_size=4))
    space = search_space(network, RATES)

    @cache
    def dear(architecture: Architecture) -> Candidate:
        return _linear(architecture, network)

    best = exhaustive_search(space, dear)
    search = pareto_search(space, dear, uniform=uniform_space(network, RATES))
    low, high = (
        dear(space.architecture(genes)).training_memory_bytes["onnx"] for genes in (space.smallest, space.largest)
    )
    asked = [Query(target="onnx", limits=Budget(memory_bytes=low + (high - low) * place // 30)) for place in range(31)]
    for number in range(4):
        run(search, asked, first=100 * number)
    given, most = ([one.best(query) for query in asked] for one in (search, best))
    shares = [own.rank[0] / top.rank[0] for own, top in zip(given, most, strict=True) if own and top]
    assert len(shares) == len(asked)
    assert min(shares) >= 0.95
    # The budget that is used most is another submodel's.
    unused = [
        top
        for query, top in zip(asked, most, strict=True)
        if top
        and any(
            (fit := EstimateIndex(TARGET, [one]).best(query)) and fit.utilisation > top.utilisation
            for one in best.known
        )
    ]
    assert len(unused) > 10


@cache
def half_known() -> ParetoSearch:
    """A search that ten devices have taught."""
    serving = pareto_search(SPACE, uniform=UNIFORM)
    run(serving, queries(10, seed=7))
    assert isinstance(serving.search, ParetoSearch)
    return serving.search


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(queries=poorer_and_richer(), richer_first=st.booleans(), known=st.integers(0, 200))
def test_of_two_devices_of_a_round_the_poorer_never_gets_more_whoever_looks_first(
    queries: tuple[Query, Query], richer_first: bool, known: int
) -> None:
    """As all look before any is answered, what one comes by serves the other."""
    search = pareto_search(SPACE, uniform=UNIFORM, settings=ParetoSettings(trials=24))
    search.learn(half_known().pool[:known])
    for query in reversed(queries) if richer_first else queries:
        search.learn(search.explore(query, stream(richer_first, known)))
    poorer, richer = (search.best(query) for query in queries)
    assert poorer is None or (richer is not None and richer.rank[0] >= poorer.rank[0])


@pytest.mark.slow
def test_a_climb_serves_the_device_that_it_was_made_for() -> None:
    paper = PaperSettings(epsilon=0.9)
    climbing, best = ParetoSettings(paper=paper, samples=0), exhaustive_search(SPACE)
    pairs = [
        (
            answered(pareto_search(SPACE, settings=climbing), query, stream(place)).parameters,
            answered(paper_search(SPACE, paper), query, stream(place)).parameters,
            fit.candidate.parameters,
        )
        for place, query in MANY
        if (fit := best.best(query)) is not None
    ]
    own, other = ([pair[side] / pair[2] for pair in pairs] for side in (0, 1))
    assert sum(own) / len(own) > 0.9
    assert sum(other) / len(other) < 0.6


@pytest.mark.slow
def test_what_is_remembered_is_not_stood_in_for() -> None:
    """Nothing joins the pool beside something that takes no more and has 0.99 of its parameters, but for draws."""
    search = pareto_search(SPACE, uniform=UNIFORM)
    for place, query in MANY:
        before = EstimateIndex(TARGET, search.known)
        for one in search.explore(query, stream(place)):
            candidate = estimate(one.architecture)
            assert one.drawn or not any(
                known.parameters >= 0.99 * candidate.parameters
                and known.training_memory_bytes["onnx"] <= candidate.training_memory_bytes["onnx"]
                and known.weight_bytes <= candidate.weight_bytes
                for known in before
            )
            search.learn([one])
            before.add(candidate)
    assert len(search.pool) > 100


def test_the_pool_is_bounded_and_draws_have_their_own_room() -> None:
    small = ParetoSettings(paper=PaperSettings(epsilon=0.5, pool_limit=30), built_limit=50)
    search = pareto_search(SPACE, settings=small)
    run(search, queries(120))
    drawn = [one for one in search.pool if one.drawn]
    assert len(drawn) == 30 - 2
    assert 50 <= len(search.pool) <= 50 + 28


@pytest.mark.slow
def test_a_uniform_submodel_outside_the_space_is_given_but_no_start() -> None:
    space = search_space(NETWORK, (0.5, 1), width="network", depth="whole")
    outside = [architecture for architecture in UNIFORM if not space.holds(architecture)]
    search = pareto_search(space, uniform=outside)
    given = [answer.fit for answer in run(search, queries(60)) if answer.fit is not None]
    assert {fit.candidate.architecture.name for fit in given} & {architecture.name for architecture in outside}


def test_nobody_climbs_whose_link_carries_nothing_larger() -> None:
    search = pareto_search(SPACE, uniform=UNIFORM, settings=ParetoSettings(samples=0))
    fit = search.best(query_at(0.6, 0.6))
    assert fit is not None
    plenty = Budget(memory_bytes=2**40, downlink_bytes=fit.candidate.weight_bytes)
    assert search.explore(Query(target="onnx", limits=plenty), stream(2)) == ()
    wider = Budget(memory_bytes=2**40, downlink_bytes=2 * fit.candidate.weight_bytes)
    assert search.explore(Query(target="onnx", limits=wider), stream(2))
