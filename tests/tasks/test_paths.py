"""Paths are drawn within their budgets: never beyond, never in vain, and by "exact" all equally often (O3, O6)."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.paths import PathSampler
from subfleet.tasks.path_drawing import PathDrawer, PathPlace

SAMPLERS: tuple[PathSampler, ...] = ("greedy", "exact", "reject")
TOY = [(1, 2, 4, 8), (0, 3, 5, 9), (2, 3, 6, 7), (0, 1, 4, 10)]


def places_of(costs: Sequence[Sequence[float | tuple[float, ...]]]) -> list[PathPlace]:
    return [
        PathPlace(
            name=f"place{at}",
            operators=tuple(f"op{one}" for one in range(len(own))),
            costs=tuple(cost if isinstance(cost, tuple) else (cost,) for cost in own),
        )
        for at, own in enumerate(costs)
    ]


def valid_paths(places: Sequence[PathPlace], budgets: Sequence[float]) -> set[tuple[str, ...]]:
    found = set()
    for chosen in product(*(range(len(place.operators)) for place in places)):
        totals = [
            sum(place.costs[one][at] for place, one in zip(places, chosen, strict=True)) for at in range(len(budgets))
        ]
        if all(total <= limit for total, limit in zip(totals, budgets, strict=True)):
            found.add(tuple(place.operators[one] for place, one in zip(places, chosen, strict=True)))
    return found


def frequencies(sampler: PathSampler, budget: float, draws: int) -> Counter[tuple[str, ...]]:
    drawn, rng = PathDrawer(places_of(TOY), [budget], sampler), np.random.default_rng(7)
    return Counter(drawn.draw(rng) for _ in range(draws))


@pytest.mark.slow
@examples(25)
@given(data=st.data(), sampler=st.sampled_from(SAMPLERS), resources=st.integers(1, 2))
def test_what_is_drawn_is_valid_and_something_always_is(
    data: st.DataObject, sampler: PathSampler, resources: int
) -> None:
    cost = st.tuples(*[st.integers(0, 12)] * resources)
    places = places_of(data.draw(st.lists(st.lists(cost, min_size=1, max_size=4), min_size=1, max_size=5)))
    budgets = data.draw(st.lists(st.integers(0, 30), min_size=resources, max_size=resources))
    valid = valid_paths(places, budgets)
    if not valid:
        with pytest.raises(ConfigError, match="no path fits"):
            PathDrawer(places, budgets, sampler)
        return
    drawn, rng = PathDrawer(places, budgets, sampler), np.random.default_rng(data.draw(st.integers(0, 99)))
    assert {drawn.draw(rng) for _ in range(20)} <= valid


def test_a_draw_does_not_end_where_nothing_fits_any_more() -> None:
    # Two layers that cost 3 or 5, of 7: without a reserve half of the draws begin with 5, and end there.
    drawn, rng = PathDrawer(places_of([(3, 5), (3, 5)]), [7], "greedy"), np.random.default_rng(0)
    assert {drawn.draw(rng) for _ in range(200)} == {("op0", "op0")}


def test_a_budget_that_a_path_takes_whole_is_enough() -> None:
    drawn, rng = PathDrawer(places_of([(3, 5), (3, 5)]), [8], "greedy"), np.random.default_rng(0)
    assert {drawn.draw(rng) for _ in range(200)} == {("op0", "op0"), ("op0", "op1"), ("op1", "op0")}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["exact", "reject"])
def test_every_valid_path_is_drawn_equally_often(sampler: PathSampler) -> None:
    from scipy.stats import chisquare

    found, valid = frequencies(sampler, 14, 20_000), valid_paths(places_of(TOY), [14])
    assert found.keys() == valid
    assert chisquare([found[path] for path in sorted(valid)]).pvalue > 0.001


@pytest.mark.slow
def test_where_two_resources_bind_every_valid_path_is_drawn_equally_often() -> None:
    """Costs of many digits, so that budgets have no whole steps: what is close to them is drawn, too."""
    from scipy.stats import chisquare

    costs = [[(1013, 7001), (3011, 2003), (4007, 5009), (6029, 997)]] * 5
    places, budgets = places_of(costs), [19_501, 19_009]
    valid = valid_paths(places, budgets)
    assert 100 < len(valid) < 900
    drawn, rng = PathDrawer(places, budgets, "exact"), np.random.default_rng(5)
    found = Counter(drawn.draw(rng) for _ in range(60 * len(valid)))
    assert found.keys() == valid
    assert chisquare([found[path] for path in sorted(valid)]).pvalue > 0.001


@pytest.mark.slow
def test_greedy_reaches_every_valid_path_but_not_equally_often() -> None:
    from scipy.stats import chisquare

    found, valid = frequencies("greedy", 14, 20_000), valid_paths(places_of(TOY), [14])
    assert found.keys() == valid
    distance = sum(abs(found[path] / 20_000 - 1 / len(valid)) for path in valid) / 2
    assert distance > 0.1
    assert chisquare([found[path] for path in sorted(valid)]).pvalue < 1e-6


def test_costs_that_are_no_whole_steps_never_exceed_the_budget() -> None:
    places = places_of([(0.0, 1e9 / 3, 1e9 / 7)] * 5)
    drawn, rng = PathDrawer(places, [1e9], "exact"), np.random.default_rng(0)
    valid = valid_paths(places, [1e9])
    assert {drawn.draw(rng) for _ in range(300)} <= valid


def test_two_resources_whose_cheapest_paths_differ_are_both_kept() -> None:
    # What is cheap in the one is dear in the other: only mixed paths fit.
    places = places_of([[(0, 10), (10, 0)]] * 4)
    for sampler in SAMPLERS:
        drawn, rng = PathDrawer(places, [20, 20], sampler), np.random.default_rng(1)
        assert {Counter(drawn.draw(rng))["op0"] for _ in range(50)} == {2}


def test_operators_that_cost_infinity_are_never_drawn() -> None:
    places = places_of([(0, math.inf), (1, 2)])
    drawn, rng = PathDrawer(places, [None], "greedy"), np.random.default_rng(0)
    assert {drawn.draw(rng) for _ in range(50)} == {("op0", "op0"), ("op0", "op1")}
    with pytest.raises(ConfigError, match="no operator that can be run"):
        PathDrawer(places_of([(math.inf,)]), [None], "greedy")


def test_places_without_a_free_operator_are_drawn_first() -> None:
    # Drawn last, the dear one would find no room for its own dear operator nearly always.
    places = places_of([(0, 6), (0, 6), (4, 10)])
    drawn, rng = PathDrawer(places, [10], "greedy"), np.random.default_rng(0)
    found = Counter(drawn.draw(rng)[2] for _ in range(400))
    assert 140 < found["op1"] < 260


@examples(8)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_same_stream_draws_the_same(seed: int) -> None:
    drawn = PathDrawer(places_of(TOY), [14], "greedy")
    first = [drawn.draw(np.random.default_rng(seed)) for _ in range(2)]
    assert first[0] == first[1]


def test_where_only_a_path_fits_that_takes_all_it_is_drawn() -> None:
    places = places_of([(1e9 / 3, 1e9), (1e9 / 7, 1e9)])
    drawn = PathDrawer(places, [1e9 / 3 + 1e9 / 7], "exact")
    assert drawn.draw(np.random.default_rng(0)) == ("op0", "op0")
