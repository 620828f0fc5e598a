"""Paths are drawn within their budgets and without dead ends; "exact" draws all equally often (O3, O6)."""

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


def make_places(costs: Sequence[Sequence[float | tuple[float, ...]]]) -> list[PathPlace]:
    return [
        PathPlace(
            name=f"place{index}",
            operators=tuple(f"op{number}" for number in range(len(operator_costs))),
            costs=tuple(cost if isinstance(cost, tuple) else (cost,) for cost in operator_costs),
        )
        for index, operator_costs in enumerate(costs)
    ]


def list_valid_paths(places: Sequence[PathPlace], budgets: Sequence[float]) -> set[tuple[str, ...]]:
    paths = set()
    for chosen in product(*(range(len(place.operators)) for place in places)):
        totals = [
            sum(place.costs[operator][resource] for place, operator in zip(places, chosen, strict=True))
            for resource in range(len(budgets))
        ]
        if all(total <= limit for total, limit in zip(totals, budgets, strict=True)):
            paths.add(tuple(place.operators[operator] for place, operator in zip(places, chosen, strict=True)))
    return paths


def count_draws(sampler: PathSampler, budget: float, draws: int) -> Counter[tuple[str, ...]]:
    drawer, rng = PathDrawer(make_places(TOY), [budget], sampler), np.random.default_rng(7)
    return Counter(drawer.draw(rng) for _ in range(draws))


@pytest.mark.slow
@examples(25)
@given(data=st.data(), sampler=st.sampled_from(SAMPLERS), resources=st.integers(1, 2))
def test_what_is_drawn_is_valid_and_something_always_is(
    data: st.DataObject, sampler: PathSampler, resources: int
) -> None:
    cost = st.tuples(*[st.integers(0, 12)] * resources)
    places = make_places(data.draw(st.lists(st.lists(cost, min_size=1, max_size=4), min_size=1, max_size=5)))
    budgets = data.draw(st.lists(st.integers(0, 30), min_size=resources, max_size=resources))
    valid = list_valid_paths(places, budgets)
    if not valid:
        with pytest.raises(ConfigError, match="no path fits"):
            PathDrawer(places, budgets, sampler)
        return
    drawer, rng = PathDrawer(places, budgets, sampler), np.random.default_rng(data.draw(st.integers(0, 99)))
    assert {drawer.draw(rng) for _ in range(20)} <= valid


def test_a_draw_does_not_reach_a_dead_end() -> None:
    # Two layers cost 3 or 5 each, and the budget is 7: without a reserve, half of the draws take 5 and cannot continue.
    drawer, rng = PathDrawer(make_places([(3, 5), (3, 5)]), [7], "greedy"), np.random.default_rng(0)
    assert {drawer.draw(rng) for _ in range(200)} == {("op0", "op0")}


def test_a_budget_that_a_path_takes_whole_is_enough() -> None:
    drawer, rng = PathDrawer(make_places([(3, 5), (3, 5)]), [8], "greedy"), np.random.default_rng(0)
    assert {drawer.draw(rng) for _ in range(200)} == {("op0", "op0"), ("op0", "op1"), ("op1", "op0")}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["exact", "reject"])
def test_every_valid_path_is_drawn_equally_often(sampler: PathSampler) -> None:
    from scipy.stats import chisquare

    counts, valid = count_draws(sampler, 14, 20_000), list_valid_paths(make_places(TOY), [14])
    assert counts.keys() == valid
    assert chisquare([counts[path] for path in sorted(valid)]).pvalue > 0.001


@pytest.mark.slow
def test_where_two_resources_bind_every_valid_path_is_drawn_equally_often() -> None:
    """Costs have many digits, so that budgets are not whole steps; paths close to the budgets are drawn too."""
    from scipy.stats import chisquare

    costs = [[(1013, 7001), (3011, 2003), (4007, 5009), (6029, 997)]] * 5
    places, budgets = make_places(costs), [19_501, 19_009]
    valid = list_valid_paths(places, budgets)
    assert 100 < len(valid) < 900
    drawer, rng = PathDrawer(places, budgets, "exact"), np.random.default_rng(5)
    counts = Counter(drawer.draw(rng) for _ in range(60 * len(valid)))
    assert counts.keys() == valid
    assert chisquare([counts[path] for path in sorted(valid)]).pvalue > 0.001


@pytest.mark.slow
def test_greedy_reaches_every_valid_path_but_not_equally_often() -> None:
    from scipy.stats import chisquare

    counts, valid = count_draws("greedy", 14, 20_000), list_valid_paths(make_places(TOY), [14])
    assert counts.keys() == valid
    distance = sum(abs(counts[path] / 20_000 - 1 / len(valid)) for path in valid) / 2
    assert distance > 0.1
    assert chisquare([counts[path] for path in sorted(valid)]).pvalue < 1e-6


def test_costs_that_are_no_whole_steps_never_exceed_the_budget() -> None:
    places = make_places([(0.0, 1e9 / 3, 1e9 / 7)] * 5)
    drawer, rng = PathDrawer(places, [1e9], "exact"), np.random.default_rng(0)
    valid = list_valid_paths(places, [1e9])
    assert {drawer.draw(rng) for _ in range(300)} <= valid


def test_two_resources_whose_cheapest_paths_differ_are_both_kept() -> None:
    # The operator that is cheap in one resource is expensive in the other: only mixed paths fit.
    places = make_places([[(0, 10), (10, 0)]] * 4)
    for sampler in SAMPLERS:
        drawer, rng = PathDrawer(places, [20, 20], sampler), np.random.default_rng(1)
        assert {Counter(drawer.draw(rng))["op0"] for _ in range(50)} == {2}


def test_operators_that_cost_infinity_are_never_drawn() -> None:
    places = make_places([(0, math.inf), (1, 2)])
    drawer, rng = PathDrawer(places, [None], "greedy"), np.random.default_rng(0)
    assert {drawer.draw(rng) for _ in range(50)} == {("op0", "op0"), ("op0", "op1")}
    with pytest.raises(ConfigError, match="no operator that can be run"):
        PathDrawer(make_places([(math.inf,)]), [None], "greedy")


def test_places_without_a_free_operator_are_drawn_first() -> None:
    # If it were drawn last, the third place would almost never have enough budget left for its expensive operator.
    places = make_places([(0, 6), (0, 6), (4, 10)])
    drawer, rng = PathDrawer(places, [10], "greedy"), np.random.default_rng(0)
    counts = Counter(drawer.draw(rng)[2] for _ in range(400))
    assert 140 < counts["op1"] < 260


@examples(8)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_same_stream_draws_the_same(seed: int) -> None:
    drawer = PathDrawer(make_places(TOY), [14], "greedy")
    first = [drawer.draw(np.random.default_rng(seed)) for _ in range(2)]
    assert first[0] == first[1]


def test_the_only_fitting_path_is_drawn_even_if_it_takes_the_whole_budget() -> None:
    places = make_places([(1e9 / 3, 1e9), (1e9 / 7, 1e9)])
    drawer = PathDrawer(places, [1e9 / 3 + 1e9 / 7], "exact")
    assert drawer.draw(np.random.default_rng(0)) == ("op0", "op0")
