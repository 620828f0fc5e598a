import pytest
from server.search.search_cases import NETWORK, SPACE, TARGETS, UNIFORM, price, queries, run, stream

from subfleet.elastic.spaces import search_space
from subfleet.protocol.errors import ConfigError
from subfleet.server.search.index import PriceIndex
from subfleet.server.search.listed import ListedSearch, exhaustive_search
from subfleet.server.search.paper import PaperSearch, PaperSettings
from subfleet.server.search.pareto import ParetoSearch, ParetoSettings
from subfleet.server.search.query import Choice

MANY = list(enumerate(queries(40, seed=6)))


def _share(choice: Choice) -> float:
    return choice.fit.utilisation if choice.fit is not None else -1.0


@pytest.mark.parametrize(
    "paper", [PaperSettings(), PaperSettings(epsilon=0.3, pool_limit=40), PaperSettings(epsilon=1)]
)
def test_no_client_uses_less_than_with_the_papers_search_or_the_best_uniform_width(paper: PaperSettings) -> None:
    asked = queries(150, seed=3)
    ours = run(
        ParetoSearch(SPACE, price, TARGETS, uniform=UNIFORM, settings=ParetoSettings(paper=paper, trials=8)), asked
    )
    theirs = run(PaperSearch(SPACE, price, TARGETS, paper), asked)
    uniform = run(ListedSearch(UNIFORM, price, TARGETS, goal=1), asked)
    assert [one.draws for one in ours] == [one.draws for one in theirs]
    for own, other, width in zip(ours, theirs, uniform, strict=True):
        assert _share(own) >= max(_share(other), _share(width))
    if paper.epsilon < 1:
        assert sum(map(_share, ours)) > sum(map(_share, theirs))


def test_an_epsilon_of_one_never_explores() -> None:
    settings = ParetoSettings(paper=PaperSettings(epsilon=1))
    search = ParetoSearch(SPACE, price, TARGETS, uniform=UNIFORM, settings=settings)
    assert all(choice.found == () for choice in run(search, queries(100)))


def test_clients_reach_97_percent_of_the_exhaustive_optimum() -> None:
    search = ParetoSearch(SPACE, price, TARGETS, uniform=UNIFORM)
    best = exhaustive_search(SPACE, price, TARGETS, goal=1)
    run(search, queries(400, seed=8))
    asked = queries(100, seed=9)
    shares = [
        _share(own) / _share(optimum)
        for own, optimum in zip(run(search, asked, first=1000), run(best, asked), strict=True)
        if optimum.fit is not None
    ]
    assert len(shares) > 70
    assert sum(shares) / len(shares) >= 0.99
    assert min(shares) >= 0.97


def test_a_climb_serves_the_device_that_it_was_made_for() -> None:
    paper = PaperSettings(epsilon=0.9)
    ours = ParetoSearch(SPACE, price, TARGETS, settings=ParetoSettings(paper=paper, samples=0))
    theirs = PaperSearch(SPACE, price, TARGETS, paper)
    # Nothing is learned from one to the next.
    pairs = [(ours.choose(query, stream(place)), theirs.choose(query, stream(place))) for place, query in MANY]
    own, other = ([_share(pair[side]) for pair in pairs if pair[0].fit is not None] for side in (0, 1))
    assert sum(own) / len(own) > 0.9
    assert sum(other) / len(other) < 0.6


def test_beyond_the_goal_parameters_count() -> None:
    index = PriceIndex(TARGETS, map(price, UNIFORM))
    asked = queries(60)
    for goal in (0.0, 0.5, 1.0):
        for query in asked:
            fit = index.best(query, goal=goal)
            fitting = [index.best(query, goal=other) for other in (0.0, 1.0)]
            if fit is None:
                assert fitting == [None, None]
                continue
            assert fit.rank(goal) == max(other.rank(goal) for other in (*fitting, fit) if other is not None)
            floored = index.best(query, goal=goal, floor=fit.utilisation + 1e-9)
            assert floored is None or floored.utilisation > fit.utilisation


def test_the_pool_is_bounded_and_draws_have_their_own_room() -> None:
    settings = ParetoSettings(paper=PaperSettings(epsilon=0.5, pool_limit=30), built_limit=50)
    search = ParetoSearch(SPACE, price, TARGETS, settings=settings)
    run(search, queries(120))
    drawn = [one for one in search.pool if one.drawn]
    assert len(drawn) == 30 - 2
    assert 50 <= len(search.pool) <= 50 + 28


def test_a_uniform_subnet_outside_the_space_is_a_floor_but_no_start() -> None:
    space = search_space(NETWORK, (0.5, 1), width="network", depth="whole")
    outside = [spec for spec in UNIFORM if not space.holds(spec)]
    search = ParetoSearch(space, price, TARGETS, uniform=outside)
    given = [choice.fit for choice in run(search, queries(60)) if choice.fit is not None]
    assert {fit.candidate.spec.name for fit in given} & {spec.name for spec in outside}


@pytest.mark.parametrize("wrong", [{"goal": 1.1}, {"trials": -1}, {"built_limit": -1}, {"samples": -1}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        ParetoSettings(**wrong)  # type: ignore[arg-type]
