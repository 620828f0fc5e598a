"""Sizes as expressions of axes, in plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from subfleet.elastic.recording.dimensions import Leaf, expand_parts, resolve
from subfleet.elastic.recording.expressions import BATCH, Size
from subfleet.elastic.recording.run import ModuleRuns


def name_sums(runs: ModuleRuns, axes: Mapping[Leaf, str]) -> tuple[dict[Leaf, str], dict[str, list[list[Any]]]]:
    """Name every concatenation that may be cut; the parts of each name are lists of names of axes and numbers.

    Concatenations of the same parts have the same name.
    """
    names: dict[Leaf, str] = {}
    sums: dict[str, list[list[Any]]] = {}
    for leaf in (leaf for dim in runs.follower.list_dims() for leaf in resolve(dim) if leaf.parts and not leaf.reason):
        parts = [_list_factors(express(product, axes)) for product in expand_parts((leaf,))]
        same = next((name for name, own in sums.items() if own == parts), None)
        names[leaf] = same or f"sum {len(sums) + 1}"
        sums[names[leaf]] = parts
    return names, sums


def _list_factors(size: Size) -> list[Any]:
    return list(size[1:]) if isinstance(size, list) else [size]


def express(dim: Sequence[Leaf], names: Mapping[Leaf, str]) -> Size:
    """The size of a dimension as an expression; a leaf with an empty name is part of the axis before it."""
    factors: list[Size] = []
    for leaf in resolve(dim):
        if leaf.is_batch:
            factors.append(BATCH)
        elif leaf in names:
            factors += filter(None, [names[leaf]])
        elif factors and isinstance(factors[-1], int):
            factors[-1] *= leaf.size
        elif leaf.size > 1:
            factors.append(leaf.size)
    if not factors:
        return 1
    return factors[0] if len(factors) == 1 else ["*", *factors]
