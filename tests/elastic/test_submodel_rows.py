"""The rows of a submodel are the elements of its maps, in its order; none lies in two chunks or in part of a cell."""

import math
from collections.abc import Callable, Iterator
from itertools import starmap

import numpy as np
import pytest
import torch
from elastic.elastic_cases import relaxed
from hypothesis import given
from hypothesis import strategies as st

from subfleet.elastic import sum_layout
from subfleet.elastic.axes import Dim, Product
from subfleet.elastic.compiled_loops import compile_loops, count_cells
from subfleet.elastic.maps import Gather, KeptIndices
from subfleet.elastic.network import TensorDecl
from subfleet.elastic.submodel_rows import Entry, SubmodelRows, describe_rows
from subfleet.elastic.sum_layout import SumLayout, lay_out


@st.composite
def gathers(draw: st.DrawFn, number: int) -> tuple[Gather, TensorDecl, dict[str, int]]:
    """A map that keeps some indices of each factor, in any order; its tensor; and the sizes of the tensor's axes."""
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    cut = draw(st.integers(0, len(sizes)))
    kept, axes = [], {}
    for dim, size in enumerate(sizes):
        start, stop = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        any_order = st.lists(st.integers(0, size - 1), min_size=1, unique=True)
        chosen = draw(st.one_of(st.just(range(size)), st.just(range(start, stop)), any_order))
        kept.append(KeptIndices(size=size, indices=chosen if dim < cut else range(size)))
        axes[f"axis{number}.{dim}"] = size
    factors = [name if dim < cut else axes[name] for dim, name in enumerate(axes)]
    if len(sizes) < 2 or draw(st.booleans()):
        plain = tuple(factor if isinstance(factor, str) else None for factor in factors)
        return Gather(kept=tuple(kept)), make_tensor(number, tuple(sizes), plain), axes
    first, *others = math.prod(sizes[:2]), *sizes[2:]
    lengths = [len(own.indices) for own in kept]
    dims: tuple[Dim, ...] = (
        Product(factors=tuple(factors[:2])),
        *(factor if isinstance(factor, str) else None for factor in factors[2:]),
    )
    folded = (math.prod(lengths[:2]), *lengths[2:])
    return Gather(kept=tuple(kept), folded=folded), make_tensor(number, (first, *others), dims), axes


def make_tensor(number: int, shape: tuple[int, ...], axes: tuple[Dim, ...]) -> TensorDecl:
    return TensorDecl(name=f"tensor{number}", shape=shape, axes=axes, part=None, role="weight")


def list_rows(rows: SubmodelRows, tensor: int) -> Iterator[tuple[np.ndarray, int]]:
    """The elements of each row in the block of sums, and its first element in the submodel's tensor."""
    for entry in starmap(Entry, rows.entries[rows.firsts[tensor] : rows.firsts[tensor + 1]].tolist()):
        for index, place in rows.lists[entry.first : entry.last].tolist():
            begin = entry.start + index * entry.step
            parts = [
                np.arange(begin + first * entry.stride, begin + (first + count) * entry.stride)
                for first, count in rows.runs[entry.first_run : entry.last_run].tolist()
            ]
            yield np.concatenate(parts), entry.origin + place * entry.length


@pytest.mark.slow
@relaxed
@given(st.data(), st.integers(1, 200), st.integers(1, 20))
def test_rows_are_the_elements_of_maps(data: st.DataObject, chunk: int, longest: int) -> None:
    drawn = [data.draw(gathers(number)) for number in range(3)]
    sizes = {name: size for _, _, axes in drawn for name, size in axes.items()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sum_layout, "ADD_CHUNK", chunk)
        monkeypatch.setattr(sum_layout, "LONGEST_ROW", longest)
        layout = lay_out([decl for _, decl, _ in drawn], sizes)
        rows = describe_rows({decl.name: own for own, decl, _ in drawn}, layout)
    counts = np.zeros((2, layout.cell_count), np.int64)
    numbers = np.arange(1, 4)
    loops = compile_loops()
    assert loops is not None
    ways: tuple[Callable[..., None], ...] = (count_cells, loops.count)
    for block, count in zip(counts, ways, strict=True):
        count(block, layout.cells, rows, numbers)
    assert (counts[0] == counts[1]).all()
    for position, (own, decl, _) in enumerate(drawn):
        check_tensor(layout, rows, own, decl.name)
        held = torch.zeros(decl.shape, dtype=torch.int64)
        own.scatter(torch.full(own.local_shape, position + 1), held)
        place = layout.places[decl.name]
        cells = torch.from_numpy(counts[0, place.cells]).reshape(place.cell_shape)
        assert torch.equal(cells.expand(decl.shape), held)


def check_tensor(layout: SumLayout, rows: SubmodelRows, tensor_map: Gather, name: str) -> None:
    place = layout.places[name]
    borders = [first for tensor, first, _ in layout.chunks.tolist() if tensor == place.position]
    whole = torch.arange(place.size).reshape(place.shape) + place.start
    expected = tensor_map.extract(whole).reshape(-1).numpy()
    found = np.full(expected.size, -1)
    for elements, origin in list_rows(rows, place.position):
        assert (found[origin : origin + elements.size] == -1).all()
        found[origin : origin + elements.size] = elements
        assert len(set(np.searchsorted(borders, elements, side="right").tolist())) == 1
    np.testing.assert_array_equal(found, expected)


def test_rows_of_a_window_that_passes_the_end_are_in_the_order_of_the_tensor() -> None:
    decl = make_tensor(0, (3, 3), ("rows", "columns"))
    window = Gather(kept=(KeptIndices(size=3, indices=[2, 0]), KeptIndices(size=3, indices=range(1, 3))))
    layout = lay_out([decl], {"rows": 3, "columns": 3})
    rows = list(list_rows(describe_rows({decl.name: window}, layout), 0))
    assert [(elements.tolist(), origin) for elements, origin in rows] == [([1, 2], 2), ([7, 8], 0)]


def test_a_map_that_cuts_what_no_submodel_cuts_has_no_rows() -> None:
    """Counts are by cells, which such a map holds in part; PyTorch adds it element by element."""
    decl = make_tensor(0, (4, 3), ("rows", None))
    layout = lay_out([decl], {"rows": 4})
    part = Gather(kept=(KeptIndices(size=4, indices=range(4)), KeptIndices(size=3, indices=range(2))))
    assert describe_rows({decl.name: part}, layout).firsts.tolist() == [0, 0]
