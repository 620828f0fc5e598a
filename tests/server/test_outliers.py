"""Which updates are far from the others, which stand out most, and when an aggregated model has diverged."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.rounds.outliers import (
    MOST_GROWTH,
    ChangeSize,
    compute_usual_change,
    explain_divergence,
    find_outliers,
    rank_outliers,
    travel,
)
from subfleet.settings.sections import OutlierSettings

SETTINGS = OutlierSettings()


def sizes(**weights: float) -> dict[str, ChangeSize]:
    return {name: ChangeSize(weights=value) for name, value in weights.items()}


def test_a_change_above_five_times_the_median_of_four_is_outside() -> None:
    inside = sizes(ada=1.0, bob=1.2, cyd=0.8, dan=5.0)
    assert find_outliers(inside, (), SETTINGS) == {}
    outliers = find_outliers({**inside, "dan": ChangeSize(weights=10.0)}, (), SETTINGS)
    assert outliers["dan"].why == "its change of weights is 10 times the median of the round; the limit is 5 times"
    assert outliers["dan"].scale == 0.0625
    assert set(outliers) == {"dan"}


@given(times=st.floats(1, 1e12))
def test_an_update_moves_the_model_less_the_further_off_it_is(times: float) -> None:
    """The weight is continuous at the limit; beyond it, a larger change moves the model less."""
    (near, far) = (
        find_outliers(sizes(ada=1.0, bob=1.0, cyd=1.0, eve=5 * factor), (), SETTINGS) for factor in (times, 2 * times)
    )
    assert ("eve" in near) == (5 * times > 5)
    scale = near["eve"].scale if near else 1.0
    assert scale == pytest.approx(max(times**-4, 2.0**-100))
    assert 2 * far["eve"].scale < scale or far["eve"].scale == 2.0**-100
    assert 0 < far["eve"].scale < 1


def test_a_longer_training_explains_a_larger_change() -> None:
    short, long = ChangeSize(weights=1.0, travel=1.0), ChangeSize(weights=18.0, travel=9.0)
    four = {"ada": short, "bob": short, "cyd": short, "dan": long}
    assert find_outliers(four, (), SETTINGS) == {}
    assert set(find_outliers({**four, "dan": replace(long, weights=19.0)}, (), SETTINGS)) == {"dan"}
    # A client that trains less than the others may move as far as they do.
    assert find_outliers({**four, "dan": replace(long, weights=5.0, travel=0.01)}, (), SETTINGS) == {}
    # Earlier rounds show how far a training of that length moves weights.
    assert find_outliers({"dan": long}, (short,), SETTINGS) == {}
    assert set(find_outliers({"dan": replace(long, travel=1.0)}, (short,), SETTINGS)) == {"dan"}


def test_claimed_training_raises_the_limit_by_a_bounded_factor() -> None:
    honest = dict.fromkeys(("ada", "bob", "cyd"), ChangeSize(weights=1.0, statistics=1.0, travel=1.0))
    for claimed in (1e4, 1e15):
        inside = ChangeSize(weights=5 * MOST_GROWTH, statistics=5 * MOST_GROWTH, travel=claimed)
        assert find_outliers({**honest, "eve": inside}, (), SETTINGS) == {}
        for kind in ("weights", "statistics"):
            outside = replace(inside, **{kind: 5.1 * MOST_GROWTH})
            assert set(find_outliers({**honest, "eve": outside}, (), SETTINGS)) == {"eve"}


def test_measuring_takes_no_steps() -> None:
    honest = dict.fromkeys(("ada", "bob", "cyd"), ChangeSize(measured=1.0, travel=1.0))
    assert set(find_outliers({**honest, "eve": ChangeSize(measured=6.0, travel=100.0)}, (), SETTINGS)) == {"eve"}


@pytest.mark.parametrize("kind", ["weights", "statistics"])
@pytest.mark.parametrize("much", [{"samples": 40.0}, {"travel": 5.0}])
def test_a_long_training_with_a_change_below_the_weights_is_not_far(kind: str, much: dict[str, float]) -> None:
    """Most clients have learned their few samples, and hardly move."""
    few = {"samples": 8.0, "travel": 1.0, f"held_{kind}": 1.0}
    still = dict.fromkeys(("ada", "bob", "cyd"), ChangeSize(**{**few, kind: 1e-4}))
    moves = ChangeSize(**{**few, **much, kind: 0.99})
    assert find_outliers({**still, "dan": moves}, (), SETTINGS) == {}
    outliers = find_outliers({**still, "dan": replace(moves, **{kind: 2.0})}, (), SETTINGS)
    assert outliers["dan"].scale == 0.0625
    for short in ({"samples": 39.0}, {"travel": 4.9}):
        assert find_outliers({**still, "dan": replace(moves, **{**few, **short})}, (), SETTINGS).keys() == {"dan"}


@pytest.mark.parametrize("kind", ["weights", "statistics"])
def test_one_client_of_many_moves_the_model_by_at_most_a_fifth_of_its_weights(kind: str) -> None:
    """Late in a run an honest change is a hundredth of the weights: thirty times as much is below them, but far."""
    honest = ChangeSize(**{kind: 0.01, f"held_{kind}": 1.0}, samples=40.0, travel=5.0)
    for count in (3, 9, 19):
        honest_sizes = dict.fromkeys((f"c{index}" for index in range(count)), honest)
        outliers = find_outliers({**honest_sizes, "eve": replace(honest, **{kind: 0.3})}, [honest] * 5, SETTINGS)
        assert outliers.keys() == {"eve"}
        assert outliers["eve"].scale == pytest.approx(1.5**-4)
        jumps = replace(honest, **{kind: 0.19})
        assert find_outliers({**honest_sizes, "dan": jumps}, [honest] * 5, SETTINGS) == {}, "as honest changes may"


def test_with_fewer_than_four_clients_a_change_below_the_weights_is_not_far() -> None:
    honest = ChangeSize(weights=0.01, held_weights=1.0, samples=40.0, travel=5.0)
    three = {"ada": honest, "bob": honest, "eve": replace(honest, weights=0.3)}
    assert find_outliers(three, [honest] * 5, SETTINGS) == {}
    assert find_outliers({**three, "eve": replace(honest, weights=1.1)}, [honest] * 5, SETTINGS).keys() == {"eve"}


def test_among_still_clients_a_change_below_the_weights_is_not_far() -> None:
    still = ChangeSize(held_weights=1.0, samples=40.0, travel=5.0)
    four = {**dict.fromkeys(("ada", "bob", "cyd"), still), "dan": replace(still, weights=0.3)}
    past = [replace(still, weights=0.01)] * 5
    assert find_outliers(four, past, SETTINGS) == {}
    assert find_outliers({**four, "dan": replace(still, weights=1.1)}, past, SETTINGS).keys() == {"dan"}


def test_the_kind_that_is_further_off_decides() -> None:
    usual = ChangeSize(weights=1.0, statistics=1.0)
    eve = ChangeSize(weights=20.0, statistics=100.0)
    outliers = find_outliers({"ada": usual, "bob": usual, "cyd": usual, "eve": eve}, (), SETTINGS)
    assert outliers["eve"].scale == pytest.approx(0.05**4)
    assert outliers["eve"].why.startswith("its change of running statistics is 100 times")


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize(("samples", "epochs"), [(1, 1), (8, 1), (9, 3), (800, 2)])
def test_travel_is_what_sgd_moves_a_weight_by_along_gradients_of_one(
    momentum: float, samples: int, epochs: int
) -> None:
    optimiser = OptimiserSettings(momentum=momentum)
    settings = TrainingSettings(epochs=epochs, batch_size=8, learning_rate=0.1, optimiser=optimiser)
    velocity = moved = 0.0
    for _ in range(epochs * -(-samples // 8)):
        velocity = momentum * velocity + 1.0
        moved += 0.1 * velocity
    assert travel(settings, samples) == pytest.approx(moved)


def test_a_step_of_adam_moves_a_weight_by_its_rate() -> None:
    settings = TrainingSettings(epochs=3, batch_size=8, learning_rate=0.01, optimiser=OptimiserSettings(name="adam"))
    assert travel(settings, 20) == pytest.approx(9 * 0.01)
    assert travel(replace(settings, learning_rate=0.0), 20) == travel(settings, 0) == 0


def test_the_median_of_an_even_number_is_the_lower_middle_one() -> None:
    """Otherwise two of four could hide each other."""
    assert set(find_outliers(sizes(ada=1.0, bob=1.0, eve=1e6, fay=1e6), (), SETTINGS)) == {"eve", "fay"}


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ((), set()),
        ((1.0,), {"eve"}),
        ((1.0, 1e6, 2.0), {"eve"}),
        ((2e6, 2e6, 1.0), set()),
        ((0.0, 0.0, 1.0), {"eve"}),
        ((0.0,), set()),
    ],
)
def test_fewer_than_four_are_compared_with_the_rounds_before(past: tuple[float, ...], expected: set[str]) -> None:
    changes = tuple(ChangeSize(weights=value) for value in past)
    outliers = find_outliers(sizes(ada=1.0, bob=1.0, eve=1e6), changes, SETTINGS)
    assert set(outliers) == expected
    assert all("times that of the last rounds" in outlier.why for outlier in outliers.values())


def test_four_mostly_still_clients_are_compared_with_the_rounds_before() -> None:
    still = sizes(ada=0.0, bob=0.0, cyd=0.0, dan=1.0)
    assert find_outliers(still, (), SETTINGS) == {}
    assert find_outliers(still, (ChangeSize(weights=1.0),), SETTINGS) == {}
    assert set(find_outliers(still, (ChangeSize(weights=0.01),), SETTINGS)) == {"dan"}


@pytest.mark.parametrize("kind", ["weights", "statistics", "measured"])
def test_each_kind_has_a_median_of_its_own(kind: str) -> None:
    """Running statistics are of another magnitude, and must not hide changes of weights."""
    usual: dict[str, Any] = {"weights": 0.01, "statistics": 5.0, "measured": 1.0, "own": 1.0}
    round_sizes = {name: ChangeSize(**usual) for name in ("ada", "bob", "cyd")}
    round_sizes["eve"] = ChangeSize(**{**usual, kind: 20 * usual[kind]})
    assert set(find_outliers(round_sizes, (), SETTINGS)) == {"eve"}


def test_changes_of_tensors_of_one_client_alone_are_not_compared() -> None:
    round_sizes = {name: ChangeSize(own=value) for name, value in (("ada", 1.0), ("bob", 1.0), ("cyd", 1.0))}
    assert find_outliers({**round_sizes, "eve": ChangeSize(own=1e6)}, (), SETTINGS) == {}


def test_the_usual_change_is_the_median_of_each_kind() -> None:
    changes = [ChangeSize(weights=1.0, own=4.0), ChangeSize(weights=3.0), ChangeSize(weights=2.0, own=5.0)]
    assert compute_usual_change(changes) == ChangeSize(weights=2.0, own=4.0)
    assert compute_usual_change([]) == ChangeSize()


def test_clients_are_ranked_by_how_far_they_stand_out() -> None:
    changes = {
        "ada": ChangeSize(weights=1.0, statistics=10.0),
        "bob": ChangeSize(weights=2.0, statistics=10.0),
        "cyd": ChangeSize(weights=1.0, statistics=70.0),
        "dan": ChangeSize(weights=1.0, statistics=10.0, own=3.0),
        "eve": ChangeSize(weights=5.0, statistics=10.0),
    }
    # No other client has tensors of its own, so that this change stands out most.
    assert rank_outliers(changes) == ("dan", "cyd", "eve", "bob", "ada")
    # A change that longer training explains stands out less than one that nothing explains.
    trained = {name: replace(size, own=0.0, statistics=1.0, travel=1.0) for name, size in changes.items()}
    assert rank_outliers({**trained, "bob": ChangeSize(weights=12.0, travel=9.0)})[:2] == ("eve", "bob")
    assert rank_outliers(sizes(cyd=1.0, bob=1.0, ada=1.0)) == ("ada", "bob", "cyd")
    assert rank_outliers(sizes(bob=0.0, ada=0.0)) == ("ada", "bob")


@pytest.mark.parametrize(
    ("loss", "last", "message"),
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
    loss: float, last: float | None, message: str
) -> None:
    assert explain_divergence(loss, last, math.log(10), SETTINGS) == message


def test_without_a_factor_only_what_is_not_finite_has_diverged() -> None:
    off = OutlierSettings(loss_factor=0)
    assert explain_divergence(1e9, 0.1, 10, off) == ""
    assert explain_divergence(math.inf, 0.1, 10, off) == "the model diverged to a loss of inf"


@pytest.mark.parametrize("outliers", ["report", "off"])
def test_a_finite_loss_is_no_divergence_unless_clients_are_left_out(outliers: Any) -> None:
    assert explain_divergence(1e9, 0.1, 10, OutlierSettings(outliers=outliers)) == ""
    assert (
        explain_divergence(math.nan, 0.1, 10, OutlierSettings(outliers=outliers))
        == "the model diverged to a loss of nan"
    )


@pytest.mark.parametrize(
    ("setting", "attacked", "meant"),
    [
        ("auto", False, "report"),
        ("auto", True, "auto"),
        ("scale", False, "scale"),
        ("off", False, "off"),
        ("exclude", True, "exclude"),
    ],
)
def test_an_emulated_fleet_without_attackers_is_honest_unless_its_file_says_otherwise(
    setting: Any, attacked: bool, meant: str
) -> None:
    assert OutlierSettings(outliers=setting).for_emulation(attacked=attacked).outliers == meant


@pytest.mark.parametrize(
    "wrong",
    [
        {"change_factor": 0.0},
        {"change_factor": 1.0},
        {"change_factor": -1.0},
        {"change_factor": math.inf},
        {"loss_factor": 0.5},
        {"remembered_rounds": 0},
        {"exclusion_rounds": -1},
        {"spoiled_attempts": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*, but must be"):
        OutlierSettings(**wrong)


def test_tiny_updates_make_no_honest_client_an_outlier() -> None:
    """One client of two sends such updates, or two of five: honest changes are smaller than what they change."""
    honest, tiny = ChangeSize(weights=0.05, held_weights=1.0), ChangeSize(weights=1e-9, held_weights=1.0)
    past = [tiny] * 5
    assert find_outliers({"ada": honest, "eve": tiny}, past, OutlierSettings()) == {}
    sizes = {"ada": honest, "bob": honest, "cyd": honest, "eve": tiny, "eva": tiny}
    assert find_outliers(sizes, past, OutlierSettings()) == {}
    far = ChangeSize(weights=50.0, held_weights=1.0)
    assert find_outliers({"ada": honest, "eve": far}, [honest] * 5, OutlierSettings()).keys() == {"eve"}
