"""What one client of n can do to a round, whatever it sends and claims: the bounds in docs/explanation/claims.md."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.rounds.outliers import HELD_FRACTION, MOST_GROWTH, ChangeSize, find_outliers
from subfleet.rounds.weights import find_fraction_limit, limit_client_fraction
from subfleet.settings.sections import OutlierSettings

SETTINGS = OutlierSettings()
HELD = 3.0
HONEST = st.builds(
    ChangeSize,
    weights=st.floats(0.01, 1.0),
    travel=st.floats(0.1, 10.0),
    samples=st.floats(1.0, 1000.0),
    held_weights=st.just(HELD),
)
ANY = st.floats(1e-30, 1e30)
LIAR = st.builds(ChangeSize, weights=ANY, travel=ANY, samples=ANY, held_weights=st.just(HELD))


@given(honest=st.lists(HONEST, min_size=3, max_size=30), liar=LIAR)
def test_no_change_counts_more_than_its_limit(honest: list[ChangeSize], liar: ChangeSize) -> None:
    sizes = {**{f"h{index}": size for index, size in enumerate(honest)}, "liar": liar}
    far = find_outliers(sizes, (), SETTINGS)
    counted = liar.weights * (far["liar"].scale if "liar" in far else 1.0)
    usual = max(size.weights for size in honest)  # the median with one liar among them is no larger
    assert counted <= max(SETTINGS.change_factor * usual * MOST_GROWTH, HELD) * (1 + 1e-9)
    if liar.travel <= min(size.travel for size in honest) and liar.samples < min(size.samples for size in honest):
        assert counted <= max(SETTINGS.change_factor * usual, HELD_FRACTION * HELD) * (1 + 1e-9)


@given(honest=st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=40), claimed=st.floats(1.0, 2.0**62))
def test_no_client_has_more_than_three_times_an_equal_share_and_never_more_than_half(
    honest: list[float], claimed: float
) -> None:
    weights = [*honest, claimed]
    share = limit_client_fraction(None, len(weights))
    assert share == min(0.5, 3 / len(weights))
    limit = find_fraction_limit(weights, share)
    counted = [weight if limit is None else min(weight, float(limit)) for weight in weights]
    assert counted[-1] / sum(counted) <= max(share, 1 / len(weights)) * (1 + 1e-9)


@pytest.mark.parametrize("samples", [1.0, 4.9])
def test_a_change_below_the_weights_is_far_without_much_longer_training(samples: float) -> None:
    honest = {f"h{index}": ChangeSize(weights=0.01, samples=1.0, travel=1.0, held_weights=HELD) for index in range(4)}
    liar = ChangeSize(weights=0.9 * HELD, samples=samples, travel=1.0, held_weights=HELD)
    assert set(find_outliers({**honest, "liar": liar}, (), SETTINGS)) == {"liar"}
