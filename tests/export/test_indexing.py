"""Reading and writing by index tensors as in PyTorch, for any choice of dimensions and index shapes."""

from typing import Any

import pytest
import torch
from export.step_rig import draw
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor

from subfleet.export.lowerings.indexing import INDEXING
from subfleet.protocol.errors import ExportError

aten = torch.ops.aten
SIZES = (2, 3, 4, 5)
SHAPES = ((3,), (2, 3), (2, 1), (1,), ())


@st.composite
def indices(draw_from: st.DrawFn) -> list[Tensor | None]:
    """One or more index tensors for any of the dimensions; indices may be negative, and shapes can be broadcast."""
    dims = draw_from(st.sets(st.integers(0, len(SIZES) - 1), min_size=1))
    tensors: list[Tensor | None] = [None] * (max(dims) + 1)
    for dim in sorted(dims):
        shape = draw_from(st.sampled_from(SHAPES))
        generator = torch.Generator().manual_seed(draw_from(st.integers(0, 99)))
        tensors[dim] = torch.randint(-SIZES[dim], SIZES[dim], shape, generator=generator)
    return tensors


@pytest.mark.slow
@examples(30)
@given(chosen=indices())
def test_any_indices_read_what_pytorch_reads(chosen: list[Tensor | None]) -> None:
    x = draw(*SIZES)
    for operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        assert torch.equal(INDEXING[operator](x, chosen), aten.index.Tensor(x, chosen))


@pytest.mark.slow
@examples(30)
@given(chosen=indices(), broadcast=st.booleans())
def test_any_indices_add_where_pytorch_adds(chosen: list[Tensor | None], broadcast: bool) -> None:
    """As in the backward pass of reading: an element that is indexed twice gets both values."""
    x = draw(*SIZES)
    values = draw(*(() if broadcast else aten.index.Tensor(x, chosen).shape), seed=1)
    expected = aten.index_put.default(x, chosen, values, True)
    for operator in (aten.index_put.default, aten._unsafe_index_put.default):
        actual: Any = INDEXING[operator](x, chosen, values, True)
        # Every runtime has the only case without a lowering: rows by one index of the first dimension.
        if actual is NotImplemented:
            (index,) = chosen
            assert index is not None
            assert index.dim() == 1
            assert values.shape[1:] == x.shape[1:]
        else:
            torch.testing.assert_close(actual, expected)


def test_any_index_is_written_over() -> None:
    x, rows, columns = draw(4, 5), torch.tensor([0, 3]), torch.tensor([-1, 2])
    for chosen in ([rows, columns], [None, columns]):
        values = draw(*aten.index.Tensor(x, chosen).shape, seed=1)
        actual = INDEXING[aten.index_put.default](x, chosen, values)
        assert torch.equal(actual, aten.index_put.default(x, chosen, values))


def test_adding_along_any_dimension() -> None:
    x, index = draw(*SIZES), torch.tensor([1, 1])
    for dim in (0, 2, -1):
        source = draw(*(2 if position == dim % 4 else size for position, size in enumerate(SIZES)), seed=1)
        torch.testing.assert_close(
            INDEXING[aten.index_add.default](x, dim, index, source, alpha=2), x.index_add(dim, index, source, alpha=2)
        )


@pytest.mark.parametrize("chosen", [[draw(2, 3) > 0], [torch.tensor([0, 1]), draw(3) > 0]])
def test_a_mask_is_refused_with_a_remedy(chosen: list[Tensor | None]) -> None:
    with pytest.raises(ExportError, match=r"indexed by a mask.*torch\.where\(mask, a, b\)"):
        INDEXING[aten.index.Tensor](draw(2, 3), chosen)
    with pytest.raises(ExportError, match=r"indexed by a mask.*torch\.where\(mask, a, b\)"):
        INDEXING[aten.index_put.default](draw(2, 3), chosen, draw())
