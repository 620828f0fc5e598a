"""What submodels of a space keep of each axis: sets by the axis's name, of which those that are whole are not named."""

from collections.abc import Collection, Mapping, Sequence

from subfleet.elastic.axes import Axis, kept_indices
from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Centre, IndexSet, Prefix

__all__ = ["kept_size", "named_sets", "tied_sets"]


def named_sets(axes: Sequence[Axis], sizes: Sequence[int]) -> tuple[tuple[str, IndexSet], ...]:
    """Sets of these sizes at the front of axes, or in the middle of kernels, sorted by name.

    An axis that is kept whole is not named, so that equal submodels are equal architectures.
    """
    kept: list[tuple[str, IndexSet]] = [
        (axis.name, Centre(size=size) if axis.kind == "kernel" else Prefix(size=size))
        for axis, size in zip(axes, sizes, strict=True)
        if size < axis.size
    ]
    return tuple(sorted(kept, key=lambda pair: pair[0]))


def tied_sets(
    network: Network, sets: Mapping[str, IndexSet], blocks: Collection[str]
) -> tuple[tuple[str, IndexSet], ...]:
    """The same where these skippable blocks alone are kept: of what others read and give, the least is kept.

    Args:
        network: the declaration.
        sets: at the front of axes.
        blocks: the kept ones.
    """
    found = dict(sets)
    for tied in network.tied_axes(blocks):
        least = min(kept_size(network, sets, name) for name in tied)
        for name in tied:
            found.pop(name, None)
        found |= named_sets([network.axes[name] for name in tied], [least] * len(tied))
    return tuple(sorted(found.items()))


def kept_size(network: Network, sets: Mapping[str, IndexSet], axis: str) -> int:
    """How many indices of an axis are kept."""
    whole = network.axes[axis].size
    return len(kept_indices(sets[axis], whole)) if axis in sets else whole
