"""Declarations of tensors whose shapes follow from the axes that their dimensions are tied to."""

from collections.abc import Iterator, Mapping, Sequence

from subfleet.elastic.axes import Dim, local_size
from subfleet.elastic.network import Role, TensorDecl

__all__ = ["Declarer"]


class Declarer:
    """Declares tensors of one network.

    A dimension is given as what it is tied to, or as its size where it is never cut.

    Args:
        sizes: of the full network's axes, by name.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    def tensor(
        self, name: str, dims: Sequence[Dim | int], role: Role, *, block: str | None = None, positions: int = 1
    ) -> TensorDecl:
        """One tensor; see `TensorDecl`."""
        return TensorDecl(
            name=name,
            shape=tuple(dim if isinstance(dim, int) else local_size(dim, 1, self._sizes) for dim in dims),
            axes=tuple(None if isinstance(dim, int) else dim for dim in dims),
            block=block,
            role=role,
            positions=positions,
        )

    def layer(
        self,
        name: str,
        dims: Sequence[Dim | int],
        *,
        block: str | None = None,
        positions: int = 1,
        role: Role = "weight",
    ) -> Iterator[TensorDecl]:
        """Weight and bias of a layer, which for a norm have one dimension both."""
        yield self.tensor(f"{name}.weight", dims, role, block=block, positions=positions)
        yield self.tensor(f"{name}.bias", dims[:1], "bias", block=block, positions=positions)
