import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.tasks import StepOrigin, batch_order, iter_batches, split_batch, step_random

COUNTS = st.integers(1, 300)
SIZES = st.integers(1, 64)
SEEDS = st.integers(0, 2**63)
CLIENTS = st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)
RANDOM_24_BITS = [2592622.0, 12642094.0, 9558742.0]


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


@pytest.mark.slow
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


@pytest.mark.parametrize(("count", "size"), [(8, 3), (8, 8), (8, 4), (5, 4), (4, 4), (1, 4), (7, 1)])
def test_the_parts_of_a_batch_are_its_real_samples_in_their_order(count: int, size: int) -> None:
    ((indices, mask),) = iter_batches(count, 8, seed=1, round_number=2, client_id="a", epoch=0)
    parts = list(split_batch(indices, mask, size))
    assert all(part.shape == part_mask.shape == (size,) and part_mask.any() for part, part_mask in parts)
    real = [index for part, part_mask in parts for index in part[part_mask == 1].tolist()]
    assert real == indices[mask == 1].tolist()
    for part, part_mask in parts:
        assert set(part.tolist()) == set(part[part_mask == 1].tolist())


ORIGIN = StepOrigin(seed=1, round_number=2, client_id="a", epoch=0, step=3)


def test_random_numbers_are_uniform_and_never_change() -> None:
    numbers = step_random((100, 200), ORIGIN)
    assert numbers.dtype == np.float32
    assert 0 <= numbers.min() < 1e-3 < 1 - 1e-3 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(numbers.var() - 1 / 12) < 0.002
    assert step_random((100, 200), ORIGIN).tobytes() == numbers.tobytes()
    # A replay with another version of NumPy must drop the same activations.
    assert (step_random((3,), ORIGIN) * 2**24).tolist() == RANDOM_24_BITS


@pytest.mark.parametrize(
    "changed",
    [
        replace(ORIGIN, seed=2),
        replace(ORIGIN, round_number=3),
        replace(ORIGIN, client_id="b"),
        replace(ORIGIN, epoch=1),
        replace(ORIGIN, step=4),
    ],
)
def test_another_step_draws_other_numbers(changed: StepOrigin) -> None:
    numbers = step_random((2000,), ORIGIN)
    for other in (step_random((2000,), changed), step_random((2000,), ORIGIN, index=1)):
        assert np.abs(np.corrcoef(other, numbers)[0, 1]) < 0.1


def test_the_random_numbers_of_the_parts_are_those_of_the_whole() -> None:
    whole = step_random((6, 5), ORIGIN)
    parts = [step_random((2, 5), ORIGIN, part=part) for part in range(3)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_many_numbers_are_those_of_their_parts_and_are_drawn_without_much_more_memory() -> None:
    """More numbers than are drawn at once; devices with little memory draw for large layers too."""
    count = 2**18 + 5
    parts = [step_random((count,), ORIGIN, part=part) for part in range(2)]
    tracemalloc.start()
    whole = step_random((2, count), ORIGIN)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert whole.tobytes() == np.concatenate(parts).tobytes()
    assert peak_bytes < 1.25 * whole.nbytes
