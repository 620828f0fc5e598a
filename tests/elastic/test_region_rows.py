"""The rows of a region are its elements, in the submodel's order, and none lies in two chunks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subfleet.elastic import region_rows
from subfleet.elastic.maps import Gather
from subfleet.elastic.region_rows import RegionRows, find_chunk, find_rows


@st.composite
def maps(draw: st.DrawFn) -> tuple[Gather, tuple[int, ...]]:
    """A map that keeps some indices of each factor, in any order, and the tensor's shape."""
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    kept = []
    for size in sizes:
        start, stop = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        any_order = st.lists(st.integers(0, size - 1), min_size=1, unique=True)
        kept.append(draw(st.one_of(st.just(range(size)), st.just(range(start, stop)), any_order)))
    sliced = all(isinstance(own, range) for own in kept)
    index = tuple(
        slice(own.start, own.stop)
        if sliced and isinstance(own, range)
        else torch.tensor(list(own)).reshape([-1 if place == at else 1 for place in range(len(kept))])
        for at, own in enumerate(kept)
    )
    if len(sizes) < 2 or draw(st.booleans()):
        return Gather(index=index), tuple(sizes)  # type: ignore[arg-type]
    lengths = tuple(map(len, kept))
    joined = Gather(
        index=index,  # type: ignore[arg-type]
        unfolded=tuple(sizes),
        unfolded_local=lengths,
        local=(math.prod(lengths[:2]), *lengths[2:]),
    )
    return joined, (math.prod(sizes[:2]), *sizes[2:])


def list_elements(rows: RegionRows) -> np.ndarray:
    """The element of the tensor at each place of the submodel's."""
    found = np.full(int(rows.lengths.sum()), -1)
    for start, first, length in zip(rows.starts, rows.firsts, rows.lengths, strict=True):
        parts = zip(*rows.parts, strict=True) if len(rows.parts[0]) else [(0, 0, length)]
        for own, begin, count in parts:
            found[first + begin : first + begin + count] = np.arange(start + own, start + own + count)
    return found


@pytest.mark.slow
@given(maps(), st.integers(1, 200), st.integers(1, 9))
def test_rows_are_the_elements_of_a_map(drawn: tuple[Gather, tuple[int, ...]], least: int, longest: int) -> None:
    tensor_map, shape = drawn
    chunk = find_chunk(tensor_map.unfolded or shape, least)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(region_rows, "LONGEST_ROW", longest)
        rows = find_rows(tensor_map, shape, chunk)
    expected = tensor_map.extract(torch.arange(math.prod(shape)).reshape(shape)).reshape(-1).numpy()
    elements = list_elements(rows)
    np.testing.assert_array_equal(elements, expected)
    for number, (start, stop) in enumerate(zip(rows.chunks, rows.chunks[1:], strict=False)):
        for first, length in zip(rows.firsts[start:stop], rows.lengths[start:stop], strict=True):
            assert set((elements[first : first + length] // chunk).tolist()) == {number}
    assert (rows.chunks[0], rows.chunks[-1]) == (0, len(rows.starts))


def test_rows_of_a_window_that_passes_the_end_are_in_the_order_of_the_tensor() -> None:
    window = Gather(index=(torch.tensor([[2], [0]]), torch.tensor([[1, 2]])))
    rows = find_rows(window, (3, 3), 3)
    assert (rows.starts.tolist(), rows.firsts.tolist(), rows.chunks) == ([1, 7], [2, 0], (0, 1, 1, 2))
