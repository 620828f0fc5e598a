"""Which updates are far from the others, who stands out most, and when a folded model has diverged."""

import math
from typing import Any

import pytest

from subfleet.rounds.suspicion import (
    ChangeSize,
    divergence,
    most_suspect,
    outsiders,
    usual_change,
)
from subfleet.settings.suspicion import SuspicionSettings

SETTINGS = SuspicionSettings()


def sizes(**weights: float) -> dict[str, ChangeSize]:
    return {name: ChangeSize(weights=value) for name, value in weights.items()}


def test_a_change_above_ten_times_the_median_of_four_is_outside() -> None:
    inside = sizes(ada=1.0, bob=1.2, cyd=0.8, dan=10.0)
    assert outsiders(inside, (), SETTINGS) == {}
    found = outsiders({**inside, "dan": ChangeSize(weights=10.01)}, (), SETTINGS)
    assert found == {"dan": "its change of weights is 10 times the median of the round, but may be 10 times at most"}


def test_of_an_even_number_the_lower_of_the_middle_two_is_the_median() -> None:
    """Else two of four could hide each other."""
    assert set(outsiders(sizes(ada=1.0, bob=1.0, eve=1e6, fay=1e6), (), SETTINGS)) == {"eve", "fay"}


@pytest.mark.parametrize(
    ("past", "found"),
    [
        ((), set()),
        ((1.0,), {"eve"}),
        ((1.0, 1e6, 2.0), {"eve"}),
        ((2e6, 2e6, 1.0), set()),
        ((0.0, 0.0, 1.0), {"eve"}),
        ((0.0,), set()),
    ],
)
def test_fewer_than_four_are_compared_with_the_rounds_before(past: tuple[float, ...], found: set[str]) -> None:
    changes = tuple(ChangeSize(weights=value) for value in past)
    here = outsiders(sizes(ada=1.0, bob=1.0, eve=1e6), changes, SETTINGS)
    assert set(here) == found
    assert all("1e+06 times that of the last rounds" in why or "5e+05 times" in why for why in here.values())


def test_four_that_mostly_moved_nothing_are_compared_with_the_rounds_before() -> None:
    still = sizes(ada=0.0, bob=0.0, cyd=0.0, dan=1.0)
    assert outsiders(still, (), SETTINGS) == {}
    assert outsiders(still, (ChangeSize(weights=1.0),), SETTINGS) == {}
    assert set(outsiders(still, (ChangeSize(weights=0.01),), SETTINGS)) == {"dan"}


@pytest.mark.parametrize("kind", ["weights", "statistics", "measured"])
def test_each_kind_has_a_median_of_its_own(kind: str) -> None:
    """Running statistics are of another magnitude, and must not hide what becomes of weights."""
    usual: dict[str, Any] = {"weights": 0.01, "statistics": 5.0, "measured": 1.0, "own": 1.0}
    round_sizes = {name: ChangeSize(**usual) for name in ("ada", "bob", "cyd")}
    round_sizes["eve"] = ChangeSize(**{**usual, kind: 20 * usual[kind]})
    assert set(outsiders(round_sizes, (), SETTINGS)) == {"eve"}


def test_what_a_client_has_to_itself_is_its_own_affair() -> None:
    round_sizes = {name: ChangeSize(own=value) for name, value in (("ada", 1.0), ("bob", 1.0), ("cyd", 1.0))}
    assert outsiders({**round_sizes, "eve": ChangeSize(own=1e6)}, (), SETTINGS) == {}


def test_a_factor_of_none_refuses_nobody() -> None:
    off = SuspicionSettings(change_factor=0)
    assert outsiders(sizes(ada=1.0, bob=1.0, cyd=1.0, eve=1e6), (), off) == {}


def test_the_usual_change_is_the_median_of_each_kind() -> None:
    changes = [ChangeSize(weights=1.0, own=4.0), ChangeSize(weights=3.0), ChangeSize(weights=2.0, own=5.0)]
    assert usual_change(changes) == ChangeSize(weights=2.0, own=4.0)
    assert usual_change([]) == ChangeSize()


def test_those_that_stand_out_most_are_the_most_suspect() -> None:
    changes = {
        "ada": ChangeSize(weights=1.0, statistics=10.0),
        "bob": ChangeSize(weights=2.0, statistics=10.0),
        "cyd": ChangeSize(weights=1.0, statistics=70.0),
        "dan": ChangeSize(weights=1.0, statistics=10.0, own=3.0),
        "eve": ChangeSize(weights=5.0, statistics=10.0),
    }
    # Nobody else has anything to itself, so that this stands out most.
    assert most_suspect(changes) == ("dan", "cyd", "eve", "bob", "ada")
    assert most_suspect(sizes(cyd=1.0, bob=1.0, ada=1.0)) == ("ada", "bob", "cyd")
    assert most_suspect(sizes(bob=0.0, ada=0.0)) == ("ada", "bob")


@pytest.mark.parametrize(
    ("loss", "last", "said"),
    [
        (math.nan, 1.0, "the model diverged to a loss of nan"),
        (math.inf, None, "the model diverged to a loss of inf"),
        (11.0, 0.5, ""),
        (10.99, None, ""),
        (23.1, 0.5, "the model diverged to a loss of 23.1, after 0.5 in the round before"),
        (23.1, None, "the model diverged to a loss of 23.1, after 2.3 of a guess"),
        (39.0, 4.0, ""),
        (41.0, 4.0, "the model diverged to a loss of 41, after 4 in the round before"),
    ],
)
def test_a_model_has_diverged_far_above_the_last_loss_and_that_of_guessing(
    loss: float, last: float | None, said: str
) -> None:
    assert divergence(loss, last, 10, SETTINGS) == said


def test_without_a_factor_only_what_is_not_finite_has_diverged() -> None:
    off = SuspicionSettings(loss_factor=0)
    assert divergence(1e9, 0.1, 10, off) == ""
    assert divergence(math.inf, 0.1, 10, off) == "the model diverged to a loss of inf"


@pytest.mark.parametrize(
    "wrong",
    [
        {"change_factor": 1.0},
        {"change_factor": -1.0},
        {"change_factor": math.inf},
        {"loss_factor": 0.5},
        {"remembered_rounds": 0},
        {"exclusion_rounds": -1},
        {"spoiled_tries": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*, but must be"):
        SuspicionSettings(**wrong)
