"""Reading and writing by tensors of indices, against PyTorch, for any choice of dimensions and shapes of indices."""

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
    """One index or more, below 0 as well, for any of the dimensions; their shapes can be broadcast together."""
    dims = draw_from(st.sets(st.integers(0, len(SIZES) - 1), min_size=1))
    made: list[Tensor | None] = [None] * (max(dims) + 1)
    for dim in sorted(dims):
        shape = draw_from(st.sampled_from(SHAPES))
        generator = torch.Generator().manual_seed(draw_from(st.integers(0, 99)))
        made[dim] = torch.randint(-SIZES[dim], SIZES[dim], shape, generator=generator)
    return made


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
    """As the backward of reading does: what is named twice gets both."""
    x = draw(*SIZES)
    values = draw(*(() if broadcast else aten.index.Tensor(x, chosen).shape), seed=1)
    right = aten.index_put.default(x, chosen, values, True)
    for operator in (aten.index_put.default, aten._unsafe_index_put.default):
        found: Any = INDEXING[operator](x, chosen, values, True)
        # What is left to the operator itself is what every runtime has: rows by one index of the first dimension.
        if found is NotImplemented:
            (index,) = chosen
            assert index is not None
            assert index.dim() == 1
            assert values.shape[1:] == x.shape[1:]
        else:
            torch.testing.assert_close(found, right)


def test_any_index_is_written_over() -> None:
    x, rows, columns = draw(4, 5), torch.tensor([0, 3]), torch.tensor([-1, 2])
    for chosen in ([rows, columns], [None, columns]):
        values = draw(*aten.index.Tensor(x, chosen).shape, seed=1)
        found = INDEXING[aten.index_put.default](x, chosen, values)
        assert torch.equal(found, aten.index_put.default(x, chosen, values))


def test_adding_along_any_dimension() -> None:
    x, index = draw(*SIZES), torch.tensor([1, 1])
    for dim in (0, 2, -1):
        source = draw(*(2 if place == dim % 4 else size for place, size in enumerate(SIZES)), seed=1)
        torch.testing.assert_close(
            INDEXING[aten.index_add.default](x, dim, index, source, alpha=2), x.index_add(dim, index, source, alpha=2)
        )


@pytest.mark.parametrize("chosen", [[draw(2, 3) > 0], [torch.tensor([0, 1]), draw(3) > 0]])
def test_a_mask_is_refused_with_what_to_do(chosen: list[Tensor | None]) -> None:
    with pytest.raises(ExportError, match=r"indexed by a mask.*torch\.where\(mask, a, b\)"):
        INDEXING[aten.index.Tensor](draw(2, 3), chosen)
    with pytest.raises(ExportError, match=r"indexed by a mask.*torch\.where\(mask, a, b\)"):
        INDEXING[aten.index_put.default](draw(2, 3), chosen, draw())
