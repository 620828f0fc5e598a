"""Exact sums, and moves by their mean, with every available loop, against exact arithmetic."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from elastic.elastic_cases import relaxed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic import compiled_loops, compiled_sums, exact_sums, sum_layout
from subfleet.elastic.compiled_sums import CompiledBatch
from subfleet.elastic.contributions import Reading
from subfleet.elastic.exact_sums import Move, Term, add_exactly, check_limit, move_tensors, run_until_one_fails
from subfleet.elastic.holders import HeldSubmodel
from subfleet.elastic.maps import Gather, KeptIndices
from subfleet.elastic.network import TensorDecl
from subfleet.elastic.sum_layout import lay_out
from subfleet.protocol.errors import ProtocolError

SIZE = 1500
"""Several chunks of every loop, and a part of another."""
LIMIT = 2.0**21
BAD = (math.nan, math.inf, -math.inf, -1e30, LIMIT + 0.25)
LOOPS = ("pytorch", "compiled", "two threads", "in reverse")
"""In reverse, all parts of a batch are added that threads may have added before one was refused."""


def use_loop(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    """Use a loop for small tensors too, in small chunks."""
    monkeypatch.setattr(exact_sums, "CPU_CHUNK", 300)
    monkeypatch.setattr(exact_sums, "COMPILED_MOVE_CHUNK", 700)
    monkeypatch.setattr(sum_layout, "ADD_CHUNK", 350)
    monkeypatch.setattr(sum_layout, "LONGEST_ROW", 70)
    monkeypatch.setattr(compiled_loops, "WORTH_COMPILING", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if loop in {"pytorch", "compiled"} else 2)
    if loop == "pytorch":
        monkeypatch.setattr(compiled_loops, "compile_loops", lambda: None)
    if loop == "in reverse":
        monkeypatch.setattr(compiled_sums, "run_until_one_fails", run_in_reverse)


def run_in_reverse(jobs: Iterable[Callable[[], bool]], thread_count: int) -> None:
    for job in reversed(list(jobs)):
        job()


def draw_spread(size: int, seed: int) -> Tensor:
    """Numbers of both signs from 1e-8 to 1e4."""
    generator = np.random.default_rng(seed)
    signs = generator.choice([-1.0, 1.0], size)
    return torch.from_numpy((signs * 10 ** generator.uniform(-8, 4, size)).astype(np.float32))


def keep_rows(shape: tuple[int, ...], first: int, count: int) -> Gather:
    """The map to these rows."""
    whole = [KeptIndices(size=size, indices=range(size)) for size in shape[1:]]
    return Gather(kept=(KeptIndices(size=shape[0], indices=range(first, first + count)), *whole))


@dataclass(frozen=True, kw_only=True)
class Addition:
    """An update of some rows of each total."""

    values: list[Tensor]
    units: int
    first: int = 0


def add_all(loop: str, totals: list[Tensor], additions: list[Addition], exponent: int) -> None:
    """Add round(values * units * 2^-exponent), as an accumulator does.

    Raises:
        ProtocolError: a value exceeds 2^exponent.
    """
    limit, shape = math.ldexp(1.0, exponent), tuple(totals[0].shape)
    maps = [keep_rows(shape, own.first, len(own.values[0])) for own in additions]
    if loop == "pytorch":
        terms = [
            [
                Term(
                    name=f"tensor{number}",
                    total=total,
                    values=own.values[position],
                    factor=math.ldexp(own.units, -exponent),
                    limit=limit,
                    map=own_map,
                )
                for number, (own, own_map) in enumerate(zip(additions, maps, strict=True))
            ]
            for position, total in enumerate(totals)
        ]
        add_exactly(terms)
        return
    names = [f"total{position}" for position in range(len(totals))]
    axes = ("rows", *[None] * (len(shape) - 1))
    layout = lay_out(
        [TensorDecl(name=name, shape=shape, axes=axes, part=None, role="weight") for name in names], {"rows": shape[0]}
    )
    readings = [
        Reading(
            held=HeldSubmodel(key=own.first, layout=layout, maps=dict.fromkeys(names, own_map)),
            values=dict(zip(names, own.values, strict=True)),
            units=np.full(len(names), own.units),
            element_units={},
        )
        for own, own_map in zip(additions, maps, strict=True)
    ]
    # Updates of one submodel share what it holds, and are then added together.
    first_of = {reading.held.key: reading.held for reading in reversed(readings)}
    readings = [replace(reading, held=first_of[reading.held.key]) for reading in readings]
    loops = compiled_loops.compile_loops()
    assert loops is not None
    block = torch.stack(totals).reshape(-1).numpy()
    batch = CompiledBatch(block, layout, readings, np.full(len(names), exponent), loops)
    assert not any(batch.list_left(position) for position in range(len(readings)))
    if not batch.add():
        batch.undo()
    for total, own in zip(totals, torch.from_numpy(block).view(len(totals), *shape), strict=True):
        total.copy_(own)
    for number, addition in enumerate(additions):
        for values in addition.values:
            check_limit(f"tensor{number}", values, limit)


def draw_additions(totals: int, count: int) -> list[Addition]:
    """Updates of the whole, with units of 29 bits and of one bit."""
    return [
        Addition(
            values=[draw_spread(SIZE, totals * seed + position) for position in range(totals)],
            units=(2**28 + 12345 * seed + 1) << 28 if seed % 3 else 2**20,
        )
        for seed in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_sums_are_those_of_exact_arithmetic(monkeypatch: pytest.MonkeyPatch, loop: str, count: int) -> None:
    use_loop(monkeypatch, loop)
    total = torch.arange(SIZE) * 2**40
    added = draw_additions(1, count)
    # Halves, which round to even numbers.
    added[0].values[0][: SIZE // 2] = torch.arange(SIZE // 2) - 300
    expected = total.tolist()
    for own in added:
        for index, value in enumerate(own.values[0].tolist()):
            expected[index] += round(Fraction(value) * Fraction(own.units, 2**21))
    add_all(loop, [total], added, 21)
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
    additions = draw_additions(2, count)
    for bad in range(count):
        values = additions[bad].values[1]
        for index in (0, 69, 70, 350, 1300, SIZE - 1):
            good, values[index] = values[index].clone(), value
            with pytest.raises(ProtocolError, match=f"tensor{bad}' of an update holds a change of"):
                add_all(loop, totals, additions, 21)
            assert all(torch.equal(total, old) for total, old in zip(totals, before, strict=True))
            values[index] = good


@pytest.mark.parametrize("loop", LOOPS)
def test_the_limit_itself_is_allowed(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    use_loop(monkeypatch, loop)
    total = torch.zeros(SIZE, dtype=torch.int64)
    add_all(loop, [total], [Addition(values=[torch.full((SIZE,), -LIMIT)], units=2**62)], 21)
    assert total.eq(-(2**62)).all()


@pytest.mark.parametrize("loop", LOOPS)
def test_overlapping_parts_of_one_sum_lose_nothing(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    use_loop(monkeypatch, loop)
    total = torch.zeros(40, SIZE, dtype=torch.int64)
    parts = [
        Addition(values=[torch.ones(count, SIZE)], units=2**21, first=first)
        for count, first in ((40, 0), (30, 5), (20, 10))
    ]
    add_all(loop, [total], parts, 21)
    assert total[:, 0].tolist() == [1] * 5 + [2] * 5 + [3] * 20 + [2] * 5 + [1] * 5
    assert torch.equal(total, total[:, :1].expand_as(total))


def make_counts(units: int, clients: int, *, half: bool) -> Tensor:
    """All these clients held the whole tensor; with `half`, as many others held the first half of it."""
    if not half:
        return torch.tensor([[units], [clients]])
    counts = torch.tensor([units, clients])[:, None].repeat(1, SIZE)
    counts[:, : SIZE // 2] *= 2
    return counts


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
                counts=make_counts(units, clients, half=half),
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
            counts=torch.tensor([4, 1]).reshape(2, *[1] * tensor.dim()),
            min_clients=1,
            scale=1.0,
        )
        for name, tensor in old.items()
    }
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
