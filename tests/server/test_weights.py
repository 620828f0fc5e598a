"""An update counts no more samples than its client's profile has, and no more than a fraction of the round."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS, context_of, scaled, training, update

from subfleet.methods.aggregator import count_samples
from subfleet.rounds.state import AcceptedUpdate, ClientState
from subfleet.rounds.weights import find_fraction_limit, weigh_round

PLAN = context_of()
WEIGHTS = st.lists(st.floats(min_value=2.0**-20, max_value=2.0**40), min_size=1, max_size=12)
SHARES = st.integers(min_value=1, max_value=100).map(lambda percent: percent / 100)


def _clients(known: dict[str, int], claimed: dict[str, int]) -> list[ClientState]:
    state = training(PLAN)
    return [
        replace(
            state.clients[name],
            stage="done",
            offer=replace(state.clients[name].offer, sample_count=count),
            trained=AcceptedUpdate(update=replace(update(PLAN, state, name), sample_count=claimed[name])),
        )
        for name, count in known.items()
    ]


def _cap(weights: list[float], max_fraction: float) -> list[Fraction]:
    limit = find_fraction_limit(weights, max_fraction)
    return [Fraction(weight) if limit is None else min(Fraction(weight), limit) for weight in weights]


@given(WEIGHTS, SHARES)
def test_no_client_has_more_than_the_fraction_of_the_capped_weights(weights: list[float], max_fraction: float) -> None:
    capped = _cap(weights, max_fraction)
    share = Fraction(str(max_fraction))
    if len(weights) * share <= 1:
        assert set(capped) == {Fraction(min(weights))}
    else:
        assert max(capped) <= share * sum(capped)


@pytest.mark.slow
@given(WEIGHTS, SHARES)
def test_weights_are_lowered_no_further_than_the_fraction_requires(weights: list[float], max_fraction: float) -> None:
    share, limit = Fraction(str(max_fraction)), find_fraction_limit(weights, max_fraction)
    if limit is None:
        assert max(weights) <= share * sum(map(Fraction, weights)) or len(set(weights)) == 1
        return
    capped = _cap(weights, max_fraction)
    assert any(weight > limit for weight in weights)
    assert all(after == min(weight, limit) for weight, after in zip(weights, capped, strict=True))
    if len(weights) * share > 1:
        # The heaviest have exactly the permitted fraction.
        assert limit == share * sum(capped)


@pytest.mark.slow
@given(WEIGHTS, SHARES, st.randoms())
def test_the_limit_does_not_depend_on_the_order(weights: list[float], max_fraction: float, random: object) -> None:
    shuffled = list(weights)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    assert find_fraction_limit(shuffled, max_fraction) == find_fraction_limit(weights, max_fraction)


@given(WEIGHTS)
def test_a_share_of_one_lowers_nothing(weights: list[float]) -> None:
    assert find_fraction_limit(weights, 1.0) is None


@pytest.mark.slow
@given(WEIGHTS, SHARES)
def test_capped_weights_are_not_capped_again(weights: list[float], max_fraction: float) -> None:
    capped = [float(weight) for weight in _cap(weights, max_fraction)]
    limit = find_fraction_limit(capped, max_fraction)
    # Only rounding to floats may remain.
    assert limit is None or float(limit) == pytest.approx(max(capped), rel=1e-15)


@pytest.mark.parametrize(
    ("weights", "max_fraction", "limit"),
    [
        ([1, 1, 2**40], 0.5, 2),
        ([3, 4, 100, 200], 0.4, 14),
        ([60, 10, 10, 10, 10], 0.5, 40),
        ([50, 20, 20, 10], 0.5, None),
        ([7, 5], 0.5, 5),
        ([7], 0.5, None),
        ([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0.1, 1),
        ([0, 0, 8, 2], 0.5, 2),
        ([0], 0.5, None),
        ([], 0.5, None),
    ],
)
def test_limits_worked_out_by_hand(weights: list[float], max_fraction: float, limit: int | None) -> None:
    assert find_fraction_limit(weights, max_fraction) == limit


def test_an_update_counts_no_more_samples_than_its_profile() -> None:
    clients = _clients({"ada": 30, "bob": 30, "cyd": 40}, {"ada": 30, "bob": 2**40, "cyd": 20})
    weights = weigh_round(count_samples, clients, 0.5)
    assert {name: weight.counted for name, weight in weights.items()} == {"ada": 30, "bob": 30, "cyd": 20}
    assert weights["bob"].lowered == "it claims 1099511627776 samples, but its profile has 30"
    assert (weights["ada"].lowered, weights["cyd"].lowered) == ("", "")
    assert weights["ada"].share == 0.375


def test_what_a_profile_claims_is_capped_too() -> None:
    most = 2**40
    weights = weigh_round(count_samples, _clients({"ada": 10, "bob": 10, "cyd": most}, dict.fromkeys(CLIENTS, 10)), 0.5)
    assert {weight.counted for weight in weights.values()} == {10}
    clients = _clients({"ada": 10, "bob": 10, "cyd": most}, {"ada": 10, "bob": 10, "cyd": most})
    weights = weigh_round(count_samples, clients, 0.5)
    assert {name: weight.share for name, weight in weights.items()} == {"ada": 0.25, "bob": 0.25, "cyd": 0.5}
    assert weights["cyd"].lowered == "its share is capped at 0.5 of the round"
    off = weigh_round(count_samples, clients, 1.0)
    assert off["cyd"].counted == most


def test_a_scaled_update_weighs_less_before_shares_are_capped() -> None:
    clients = _clients({"ada": 10, "bob": 10, "cyd": 80}, {"ada": 10, "bob": 10, "cyd": 80})
    clients = [
        replace(scaled(client, 0.25), outlier="it is far") if client.client_id == "bob" else client
        for client in clients
    ]
    weights = weigh_round(count_samples, clients, 0.5)
    assert {name: weight.counted for name, weight in weights.items()} == {"ada": 10, "bob": 2.5, "cyd": 12.5}
    assert weights["bob"].lowered == "scaled by 0.25, as it is far"


def test_uniform_weights_are_capped_by_nothing_but_the_count_of_clients() -> None:
    clients = _clients({"ada": 3, "bob": 30, "cyd": 300}, {"ada": 3, "bob": 30, "cyd": 300})
    weights = weigh_round(lambda _: 1.0, clients, 0.1)
    assert {weight.share for weight in weights.values()} == {1 / 3}


@pytest.mark.parametrize(("count", "share"), [(2, 0.5), (5, 0.5), (6, 0.5), (10, 0.3), (20, 0.15), (100, 0.03)])
def test_by_default_a_claim_is_worth_three_equal_shares(count: int, share: float) -> None:
    names = [f"c{index:03d}" for index in range(count)]
    samples = dict.fromkeys(names, 10) | {"c001": 2**40}
    (client,) = _clients({"ada": 10}, {"ada": 10})
    assert client.update is not None
    clients = [
        replace(
            client,
            client_id=name,
            offer=replace(client.offer, sample_count=claimed),
            trained=AcceptedUpdate(update=replace(client.update, client_id=name, sample_count=claimed)),
        )
        for name, claimed in samples.items()
    ]
    weights = weigh_round(count_samples, clients, None)
    assert weights["c001"].share == pytest.approx(share, rel=1e-9)
    assert sum(weight.share for weight in weights.values()) == pytest.approx(1.0)
