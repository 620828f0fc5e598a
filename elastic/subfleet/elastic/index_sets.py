"""Index sets of the axes of a submodel by axis name; axes that are kept whole are not named."""

from collections.abc import Collection, Mapping, Sequence

from subfleet.elastic.axes import Axis, list_indices
from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Centre, IndexSet, Prefix


def named_sets(axes: Sequence[Axis], sizes: Sequence[int]) -> tuple[tuple[str, IndexSet], ...]:
    """Index sets of these sizes at the front of axes, or in the centre of kernels, sorted by name.

    Axes that are kept whole are not named, so that equal submodels have equal architectures.
    """
    sets: list[tuple[str, IndexSet]] = [
        (axis.name, Centre(size=size) if axis.kind == "kernel" else Prefix(size=size))
        for axis, size in zip(axes, sizes, strict=True)
        if size < axis.size
    ]
    return tuple(sorted(sets, key=lambda pair: pair[0]))


def tied_sets(
    network: Network, sets: Mapping[str, IndexSet], blocks: Collection[str]
) -> tuple[tuple[str, IndexSet], ...]:
    """The index sets of a submodel that keeps these blocks: axes tied by left-out blocks keep their smallest set.

    Args:
        network: the network.
        sets: index sets at the front of axes.
        blocks: kept skippable blocks.
    """
    named = dict(sets)
    for tied in network.tied_axes(blocks):
        least = min(count_indices(network, sets, name) for name in tied)
        for name in tied:
            named.pop(name, None)
        named |= named_sets([network.axes[name] for name in tied], [least] * len(tied))
    return tuple(sorted(named.items()))


def count_indices(network: Network, sets: Mapping[str, IndexSet], axis: str) -> int:
    """Number of kept indices of an axis."""
    whole = network.axes[axis].size
    return len(list_indices(sets[axis], whole)) if axis in sets else whole
