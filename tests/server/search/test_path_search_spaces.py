"""Subspaces within a budget of bytes, tiers of multiplications, and the search among a tier's paths (O3, O7)."""

import itertools
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subfleet.protocol.errors import ConfigError
from subfleet.search.supernets import (
    EvolutionSettings,
    Path,
    Tier,
    draw_subspace,
    find_best,
    find_tier,
    kendall_tau,
    list_tiers,
    propose_paths,
)

CHOICES = [("a", "b", "c")] * 6
COSTS = {"a": 0, "b": 3, "c": 7}
TIER = Tier(number=2, low_macs=10, high_macs=25)


def count_macs(path: Path) -> int:
    return sum(COSTS[choice] for choice in path)


SCORES = {path: Random(str(path)).random() for path in itertools.product(*CHOICES)}


def search_paths(settings: EvolutionSettings, seed: int = 3) -> list[tuple[Path, float]]:
    scores: list[tuple[Path, float]] = []
    while paths := propose_paths(settings, CHOICES, count_macs, TIER, scores, seed=seed):
        scores += [(path, SCORES[path]) for path in paths]
    return scores


@given(
    sizes=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), min_size=1, max_size=5),
    budget=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_a_subspace_keeps_to_its_bytes_and_is_as_large_as_they_allow(
    sizes: list[list[int]], budget: int, seed: int
) -> None:
    choices = {
        f"c{index}": {f"o{option}": size for option, size in enumerate(options)} for index, options in enumerate(sizes)
    }
    subspace = draw_subspace(choices, budget, Random(seed))
    least = sum(min(options.values()) for options in choices.values() if 0 not in options.values())
    assert (subspace is None) == (least > budget)
    if subspace is None:
        return
    used_bytes = sum(choices[name][option] for name, options in subspace.items() for option in options)
    assert used_bytes <= budget
    assert all(options for options in subspace.values())
    assert all(
        option in subspace[name] for name, options in choices.items() for option, size in options.items() if not size
    )
    left_out = [
        size for name, options in choices.items() for option, size in options.items() if option not in subspace[name]
    ]
    assert all(size > budget - used_bytes for size in left_out)


def test_a_choice_without_anything_that_can_be_run_leaves_no_subspace() -> None:
    assert draw_subspace({"c": {}, "d": {"o": 0}}, 100, Random(0)) is None


@pytest.mark.slow
def test_operators_of_one_size_are_kept_equally_often() -> None:
    from scipy.stats import chisquare

    choices = {name: {"none": 0, "x": 5, "y": 5} for name in "abcd"}
    counts: Counter[str] = Counter()
    for seed in range(3000):
        subspace = draw_subspace(choices, 20, Random(seed)) or {}
        counts.update(
            f"{name}.{option}" for name, options in subspace.items() for option in options if option != "none"
        )
    assert len(counts) == 8
    assert chisquare([*counts.values()]).pvalue > 0.001


@given(
    macs=st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), min_size=1, max_size=4),
    count=st.integers(1, 6),
)
@settings(deadline=None, max_examples=20)
def test_every_path_is_of_one_tier(macs: list[list[int]], count: int) -> None:
    choices = tuple(map(tuple, macs))
    tiers = list_tiers(100, choices, count, 0)
    assert [tier.number for tier in tiers] == [*range(1, count + 1)]
    totals = {100 + sum(path) for path in itertools.product(*choices)}
    assert (tiers[0].low_macs, tiers[-1].high_macs) == (min(totals), max(totals))
    for total in totals:
        assert sum(tier.holds(total) for tier in tiers) == 1
        if total < max(totals):
            assert find_tier(tiers, total).high_macs <= total or find_tier(tiers, total).number == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tiers_are_the_brackets_of_the_paper(count: int) -> None:
    """Evenly spaced up to the 95 % quantile of all paths (linspace(fixed, q95, tiers)); the last holds the rest."""
    choices = ((3, 7, 11, 40), (2, 5, 9, 31), (1, 6, 8, 50), (0, 4, 12, 27), (5, 10, 15, 20))
    totals = sorted(100 + sum(path) for path in itertools.product(*choices))
    upper = totals[int(0.95 * len(totals))]  # exact, while the tiers estimate it from a sample of paths
    tiers = list_tiers(100, choices, count, 0)
    lows = [tier.low_macs for tier in tiers]
    expected = [totals[0] + index * (upper - totals[0]) / max(count - 1, 1) for index in range(count)]
    assert lows == pytest.approx(expected, abs=2)
    assert [tier.high_macs for tier in tiers] == [*lows[1:], totals[-1]]
    if count > 1:
        assert 0.03 < sum(tiers[-1].holds(total) for total in totals) / len(totals) < 0.06


def test_where_no_path_would_be_above_tiers_are_spaced_up_to_the_most_expensive() -> None:
    tiers = list_tiers(0, ((10, 20), (10, 20)), 2, 0)  # one path of four is the most expensive
    assert [(tier.low_macs, tier.high_macs) for tier in tiers] == [(20, 30), (30, 40)]


def test_devices_are_of_the_highest_tier_whose_paths_they_can_all_take() -> None:
    tiers = (Tier(number=1, low_macs=0, high_macs=10), Tier(number=2, low_macs=10, high_macs=20))
    assert [find_tier(tiers, macs).number for macs in (5, 10, 19, 20)] == [1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("objectives", ["accuracy", "accuracy_macs"])
def test_the_search_proposes_each_path_of_its_tier_once_and_finds_the_best(objectives: str) -> None:
    scores = search_paths(EvolutionSettings(evaluations=300, population=32, offspring=16, objectives=objectives))  # type: ignore[arg-type]
    paths = [path for path, _ in scores]
    assert len(paths) == 300 == len(set(paths))
    assert all(TIER.holds(count_macs(path)) for path in paths)
    inside = [path for path in SCORES if TIER.holds(count_macs(path))]
    ranked = sorted((SCORES[path] for path in inside), reverse=True)
    # A random sample of 300 would miss the best one in as large a fraction of cases.
    assert find_best(scores, count_macs)[1] >= ranked[2]


@pytest.mark.slow
def test_the_search_goes_on_with_the_same_paths_wherever_it_is_taken_up() -> None:
    options = EvolutionSettings(evaluations=80, population=16, offspring=8)
    scores = search_paths(options)
    for end in (16, 24, 64):
        again = propose_paths(options, CHOICES, count_macs, TIER, scores[:end], seed=3)
        assert again == tuple(path for path, _ in scores[end : end + 8])
    assert [path for path, _ in search_paths(options, seed=4)] != [path for path, _ in scores]


@pytest.mark.slow
def test_a_tier_of_few_paths_is_searched_to_its_end() -> None:
    narrow = Tier(number=3, low_macs=34, high_macs=42)
    scores: list[tuple[Path, float]] = []
    while paths := propose_paths(EvolutionSettings(), CHOICES, count_macs, narrow, scores, seed=0):
        scores += [(path, SCORES[path]) for path in paths]
    assert {path for path, _ in scores} == {path for path in SCORES if narrow.holds(count_macs(path))}


def test_a_search_ends_at_its_target() -> None:
    options = EvolutionSettings(target=0.5)
    assert propose_paths(options, CHOICES, count_macs, TIER, [(("b",) * 6, 0.5)], seed=0) == ()


def test_of_equally_good_paths_the_cheapest_is_best() -> None:
    scores = [(("c",) * 6, 0.5), (("a",) * 6, 0.5), (("b",) * 6, 0.4)]
    assert find_best(scores, count_macs) == (("a",) * 6, 0.5)


@pytest.mark.slow
def test_with_two_objectives_cheap_paths_are_kept() -> None:
    # With a second objective equal for all paths, the crowding distance had no effect (a published defect).
    options = EvolutionSettings(evaluations=200, population=16, offspring=16, objectives="accuracy_macs")
    scores: list[tuple[Path, float]] = []
    while paths := propose_paths(options, CHOICES, count_macs, TIER, scores, seed=1):
        scores += [(path, count_macs(path) / 100) for path in paths]  # more expensive is better
    spread = [count_macs(path) for path, _ in scores[100:]]
    assert min(spread) <= 13
    assert max(spread) == 24  # the most expensive path


@pytest.mark.slow
def test_kendalls_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [1, 2, 3, 4]) == pytest.approx(1)
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)  # two pairs of three agree
    assert kendall_tau([1, 1, 1], [1, 3, 2]) is None
    assert kendall_tau([1], [1]) is None


@pytest.mark.parametrize("setting", [{"evaluations": 0}, {"population": 1}, {"offspring": 0}, {"mutation": 1.5}])
def test_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        EvolutionSettings(**setting)  # type: ignore[arg-type]
    assert math.isfinite(EvolutionSettings().mutation)
