"""Sizes as expressions of axes, in plain data."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from subfleet.elastic.recording.dimensions import Leaf, expand_parts, resolve
from subfleet.elastic.recording.run import ModuleRuns

Size = Any
"""A number, the name of an axis, BATCH, or a list of "*" (product) or "+" (sum) and its sizes."""

BATCH = "@batch"
"""The number of samples in a batch."""

_SUFFIXES: Mapping[str, str] = {"head": ".heads", "head_dim": ".head_width"}


def name_axes(runs: ModuleRuns) -> dict[Leaf, str]:
    """Name every leaf of the module's tensors that may be cut, in their order; "class" is that of the results.

    An axis has the name of the first layer whose weight has it as its outputs.
    """
    places: dict[Leaf, list[tuple[str, int, Tensor]]] = {}
    for name, tensor in runs.state.items():
        for place, dim in enumerate(runs.follower.dims_of(tensor)):
            for leaf in dict.fromkeys(leaf for product in expand_parts(dim) for leaf in product):
                if not leaf.reason and not leaf.is_batch and leaf.size > 1 and not leaf.parts:
                    places.setdefault(leaf, []).append((name, place, tensor))
    names: dict[Leaf, str] = {}
    for leaf, own in places.items():
        outputs = [name for name, place, tensor in own if place == 0 and tensor.dim() > 1]
        layer = (outputs or [own[0][0]])[0].rpartition(".")[0] or own[0][0]
        name = "class" if leaf.kind == "class" else f"{layer}{_SUFFIXES.get(leaf.kind, '')}"
        number = 1
        while name in names.values():
            number += 1
            name = f"{name.partition(' ')[0]} {number}"
        names[leaf] = name
    return names


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
    """The size of a dimension as an expression."""
    factors: list[Size] = []
    for leaf in resolve(dim):
        if leaf.is_batch:
            factors.append(BATCH)
        elif leaf in names:
            factors.append(names[leaf])
        elif factors and isinstance(factors[-1], int):
            factors[-1] *= leaf.size
        elif leaf.size > 1:
            factors.append(leaf.size)
    if not factors:
        return 1
    return factors[0] if len(factors) == 1 else ["*", *factors]


def compute_size(size: Size, sizes: Mapping[str, int], batch: int = 0) -> int:
    """Compute a size from those of the axes. Products of tied sizes stay tied (`TiedSize`)."""
    if isinstance(size, str):
        return batch if size == BATCH else sizes[size]
    if isinstance(size, int):
        return size
    operator, *parts = size
    computed = [compute_size(part, sizes, batch) for part in parts]
    if operator == "+":
        return sum(computed)
    return math.prod(computed[1:], start=computed[0])
