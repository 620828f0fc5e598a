import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.tasks import batch_order, iter_batches

COUNTS = st.integers(1, 300)
SIZES = st.integers(1, 64)
SEEDS = st.integers(0, 2**63)
CLIENTS = st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)


@pytest.mark.slow
@given(
    count=COUNTS, size=SIZES, seed=SEEDS, round_number=st.integers(0, 10**6), client=CLIENTS, epoch=st.integers(0, 9)
)
def test_every_sample_is_real_exactly_once(
    count: int, size: int, seed: int, round_number: int, client: str, epoch: int
) -> None:
    seen: list[int] = []
    for indices, mask in iter_batches(count, size, seed=seed, round_number=round_number, client_id=client, epoch=epoch):
        assert indices.shape == mask.shape == (size,)
        assert set(mask.tolist()) <= {0.0, 1.0}
        assert (np.diff(mask) <= 0).all()
        assert set(indices.tolist()) == set(indices[mask == 1].tolist())
        seen.extend(indices[mask == 1].tolist())
    assert sorted(seen) == list(range(count))


@given(count=COUNTS, seed=SEEDS, round_number=st.integers(0, 10**6), client=CLIENTS, epoch=st.integers(0, 9))
def test_the_order_depends_on_its_arguments_alone(
    count: int, seed: int, round_number: int, client: str, epoch: int
) -> None:
    first = batch_order(count, seed=seed, round_number=round_number, client_id=client, epoch=epoch)
    again = batch_order(count, seed=seed, round_number=round_number, client_id=client, epoch=epoch)
    assert first.tolist() == again.tolist()


def test_each_argument_changes_the_order() -> None:
    orders = {
        tuple(batch_order(50, seed=seed, round_number=round_number, client_id=client, epoch=epoch).tolist())
        for seed in (0, 1, 11)
        for round_number in (0, 1, 11)
        for client in ("a", "1", "1-1")
        for epoch in (0, 1, 11)
    }
    assert len(orders) == 81


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    order = batch_order(12, seed=7, round_number=3, client_id="pi-zero", epoch=1)
    assert order.tolist() == [11, 6, 8, 1, 2, 10, 0, 3, 5, 4, 9, 7]
