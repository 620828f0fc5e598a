"""Exact sums, and moves by their mean, with every available loop, against exact arithmetic."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from elastic.elastic_cases import relaxed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic import compiled_loops, exact_sums
from subfleet.elastic.exact_sums import Move, Term, add_exactly, move_tensors, run_until_one_fails
from subfleet.elastic.held_regions import HeldRegions, make_region
from subfleet.elastic.maps import Gather
from subfleet.protocol.errors import ProtocolError

SIZE = 1500
"""Several blocks of the compiled loop, and a part of another."""
LIMIT = 2.0**21
BAD = (math.nan, math.inf, -math.inf, -1e30, LIMIT + 0.25)
LOOPS = ("pytorch", "compiled", "two threads")


def use_loop(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    """Use a loop for small tensors too, in chunks that end inside blocks."""
    monkeypatch.setattr(exact_sums, "CPU_CHUNK", 300)
    monkeypatch.setattr(exact_sums, "COMPILED_ADD_CHUNK", 700)
    monkeypatch.setattr(exact_sums, "COMPILED_MOVE_CHUNK", 700)
    monkeypatch.setattr(compiled_loops, "WORTH_COMPILING", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if loop == "two threads" else 1)
    if loop == "pytorch":
        monkeypatch.setattr(compiled_loops, "compile_loops", lambda: None)


def draw_spread(size: int, seed: int) -> Tensor:
    """Numbers of both signs from 1e-8 to 1e4."""
    generator = np.random.default_rng(seed)
    signs = generator.choice([-1.0, 1.0], size)
    return torch.from_numpy((signs * 10 ** generator.uniform(-8, 4, size)).astype(np.float32))


def make_term(
    total: Tensor, values: Tensor, factor: float, *, name: str = "one", limit: float = LIMIT, first: int = 0
) -> Term:
    """A term for these rows of a sum."""
    rows = Gather(index=(slice(first, first + len(values)), *(slice(0, size) for size in total.shape[1:])))
    region = make_region(rows, tuple(total.shape))
    return Term(name=name, total=total, values=values, factor=factor, limit=limit, region=region)


def make_terms(total: Tensor, count: int) -> list[Term]:
    """Terms of this many updates, with factors of 29 bits and of one bit."""
    factors = [math.ldexp(2**28 + 12345 * seed + 1, 8) if seed % 3 else 0.5 for seed in range(count)]
    return [
        make_term(total, draw_spread(total.numel(), seed), factor, name=f"tensor{seed}")
        for seed, factor in enumerate(factors)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_sums_are_those_of_exact_arithmetic(monkeypatch: pytest.MonkeyPatch, loop: str, count: int) -> None:
    use_loop(monkeypatch, loop)
    total = torch.arange(SIZE) * 2**40
    added = make_terms(total, count)
    # Halves, which round to even numbers.
    added[0].values[: SIZE // 2] = torch.arange(SIZE // 2) - 300
    expected = total.tolist()
    for term in added:
        for index, value in enumerate(term.values.tolist()):
            expected[index] += round(Fraction(value) * Fraction(float(term.factor)))
    add_exactly([added])
    assert total.tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("count", [1, 6])
def test_nothing_is_added_where_one_value_anywhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, loop: str, value: float, count: int
) -> None:
    use_loop(monkeypatch, loop)
    totals = [torch.arange(SIZE), torch.arange(SIZE) * 3]
    before = [total.clone() for total in totals]
    batches = [make_terms(total, count) for total in totals]
    for bad in range(count):
        values = batches[1][bad].values
        for index in (0, 511, 512, 700, 1300, SIZE - 1):
            good, values[index] = values[index].clone(), value
            with pytest.raises(ProtocolError, match=f"tensor{bad}' of an update holds a change of"):
                add_exactly(batches)
            assert all(torch.equal(total, old) for total, old in zip(totals, before, strict=True))
            values[index] = good


@pytest.mark.parametrize("loop", LOOPS)
def test_the_limit_itself_is_allowed(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    use_loop(monkeypatch, loop)
    total = torch.zeros(SIZE, dtype=torch.int64)
    values = torch.full((SIZE,), -LIMIT)
    add_exactly([[make_term(total, values, 2.0**41)]])
    assert total.eq(-(2**62)).all()


@pytest.mark.parametrize("loop", LOOPS)
def test_overlapping_terms_of_one_sum_lose_nothing(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    use_loop(monkeypatch, loop)
    total = torch.zeros(40, SIZE, dtype=torch.int64)
    ones = [torch.ones(40, SIZE), torch.ones(30, SIZE), torch.ones(20, SIZE)]
    terms = [make_term(total, values, 1.0, first=first) for values, first in zip(ones, (0, 5, 10), strict=True)]
    add_exactly([terms])
    assert total[:, 0].tolist() == [1] * 5 + [2] * 5 + [3] * 20 + [2] * 5 + [1] * 5
    assert torch.equal(total, total[:, :1].expand_as(total))


def make_regions(shape: tuple[int, ...], units: int, clients: int, *, half: bool = False) -> HeldRegions:
    """All these clients held the whole tensor; with `half`, as many others held the first half of its rows."""
    held = HeldRegions(shape, torch.device("cpu"))
    held.add(make_region(Gather(index=(slice(0, shape[0]),)), shape), units, clients)
    if half:
        held.add(make_region(Gather(index=(slice(0, shape[0] // 2),)), shape), units, clients)
    return held


@pytest.mark.slow
@relaxed
@given(
    seed=st.integers(0, 2**32 - 1),
    units=st.integers(1, 2**61),
    clients=st.integers(1, 3),
    exponent=st.integers(20, 148),
    half=st.booleans(),
)
def test_every_way_of_moving_gives_the_bits_of_float64_arithmetic(
    seed: int, units: int, clients: int, exponent: int, half: bool
) -> None:
    generator = np.random.default_rng(seed)
    total = generator.integers(-(2**62), 2**62, SIZE) >> generator.integers(0, 63, SIZE)
    total[generator.random(SIZE) < 0.2] = 0
    old = draw_spread(SIZE, seed)
    old[::7] = -0.0
    doubled = np.where(np.arange(SIZE) < SIZE // 2, 1 + half, 1)
    with np.errstate(over="ignore"):
        exact = old.numpy().astype(np.float64) + total.astype(np.float64) / (doubled * units) * 2.0**exponent
        moves = (total != 0) & (doubled * clients >= 2)
        expected = np.where(moves, exact.astype(np.float32), old.numpy())
    for loop in LOOPS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            use_loop(monkeypatch, loop)
            move = Move(
                old=old,
                total=torch.from_numpy(total),
                regions=make_regions((SIZE,), units, clients, half=half),
                min_clients=2,
                scale=2.0**exponent,
            )
            new = move_tensors({"one": move, "other": move})
        for tensor in new.values():
            np.testing.assert_array_equal(tensor.view(torch.int32).numpy(), expected.view(np.int32))


def test_moved_tensors_keep_their_types_and_share_no_memory() -> None:
    old = {
        "scalar": torch.tensor(2.0),
        "wide": torch.ones(3, 5, dtype=torch.float64),
        "short": torch.ones(7, dtype=torch.bfloat16),
        "cube": torch.ones(2, 2, 2),
    }
    moves = {
        name: Move(
            old=tensor,
            total=torch.full(tensor.shape, 8),
            regions=HeldRegions(tuple(tensor.shape), torch.device("cpu")),
            min_clients=1,
            scale=1.0,
        )
        for name, tensor in old.items()
    }
    for move in moves.values():
        move.regions.add(make_region(Gather(index=()), tuple(move.old.shape)), 4, 1)
    new = move_tensors(moves)
    for tensor in old.values():
        tensor.zero_()
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in new.items()] == [
        (name, tensor.dtype, tensor.shape) for name, tensor in old.items()
    ]
    assert [set(tensor.flatten().tolist()) for tensor in new.values()] == [{4.0}, {3.0}, {3.0}, {3.0}]


def make_job(done: list[int], number: int, *, good: bool) -> Callable[[], bool]:
    def job() -> bool:
        done.append(number)
        return good

    return job


@pytest.mark.parametrize("thread_count", [1, 3])
def test_all_jobs_are_run_once(thread_count: int) -> None:
    done: list[int] = []
    run_until_one_fails([make_job(done, number, good=True) for number in range(500)], thread_count)
    assert sorted(done) == list(range(500))


@pytest.mark.parametrize("thread_count", [1, 3])
def test_few_jobs_are_started_after_one_that_fails(thread_count: int) -> None:
    done: list[int] = []
    run_until_one_fails([make_job(done, number, good=number == 0) for number in range(500)], thread_count)
    assert done[:2] == [0, 1] or thread_count > 1
    assert len(done) <= 1 + thread_count


@pytest.mark.parametrize("thread_count", [1, 3])
def test_an_error_in_a_job_is_not_lost(thread_count: int) -> None:
    def broken() -> bool:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_until_one_fails([broken], thread_count)
