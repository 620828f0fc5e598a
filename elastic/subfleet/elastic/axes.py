"""Axes, which tie tensor dimensions together, and the indices that a submodel keeps of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Centre, Explicit, Full, IndexSet, Prefix, Roll

__all__ = ["Axis", "AxisKind"]

AxisKind = Literal["channel", "squeeze", "head", "head_dim", "ffn", "embed", "kernel", "class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A set of tied tensor dimensions: an index kept in one of them is kept in all.

    Attributes:
        name: unique in its network.
        size: number of indices in the full network.
        kind: what its indices are. "channel" of convolutions and layers, "squeeze" inside squeeze-and-excitation,
            "head" and "head_dim" of attention, "ffn" inside a feed-forward part and "embed" of a residual stream of
            tokens can be cut in any way; "kernel", the side of a convolution's kernel, is cut to its centre; "class"
            stays whole and in the order of the labels.
        granularity: size of the aligned groups of indices that are kept or dropped together; for a kernel, the step
            between sizes.
        least: the fewest indices that a submodel keeps.
        copied: whether a network may grow by copies of its indices: each tensor either computes or reads them, and
            nothing else combines them.
        evenly: whether all indices must then have equally many copies, because they are normalised together.
        mixed: whether an operator combines its indices, such as a norm: then a submodel computes something else than
            the whole network with zeros in place of the removed indices.
    """

    name: str
    size: int
    kind: AxisKind
    granularity: int = 1
    least: int = 1
    copied: bool = True
    evenly: bool = False
    mixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A dimension that is a product of factors, outermost first.

    The rows of fused queries, keys and values are `Product(factors=(3, "heads", "head_dim"))`; a flattened image of 49
    positions is `Product(factors=("channels", 49))`.

    Attributes:
        factors: names of axes, and sizes that are never cut.
    """

    factors: tuple[str | int, ...]


Dim = str | Product | None
"""What a dimension is tied to: an axis or sum, a product of factors, or None if it is never cut."""

Factors = tuple[str | int, ...]
"""Factors of a dimension, outermost first: names of axes and sums, and sizes that are never cut."""

Sums = Mapping[str, tuple[Factors, ...]]
"""By name, the parts of dimensions that run over several outputs one after another, such as the inputs of a layer after
a concatenation. Parts are products of axes; none is a sum."""


def factors_of(dim: Dim, size: int) -> Factors:
    """The factors of a dimension, outermost first: names of axes, and sizes that are never cut.

    Args:
        dim: what the dimension is tied to.
        size: size of the dimension in the full network.
    """
    match dim:
        case None:
            return (size,)
        case str():
            return (dim,)
        case Product(factors=factors):
            return factors


def factor_sizes(factors: Iterable[str | int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of factors, given the sizes of axes and sums."""
    return tuple([factor if isinstance(factor, int) else sizes[factor] for factor in factors])


def add_sums(sums: Sums, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of axes and of sums, given the former."""
    return {**sizes, **{name: sum(_part_sizes(parts, sizes)) for name, parts in sums.items()}}


def list_parts(parts: Sequence[Factors], sizes: Mapping[str, int]) -> Iterator[tuple[int, int, Factors]]:
    """For each part of a sum: its first index, the index after its last, and its factors."""
    begin = 0
    for part, size in zip(parts, _part_sizes(parts, sizes), strict=True):
        yield begin, begin + size, part
        begin += size


def list_sum_indices(
    parts: Sequence[Factors], sizes: Mapping[str, int], indices: Mapping[str, Sequence[int]]
) -> Sequence[int]:
    """The indices of a sum that follow from those of its axes.

    Args:
        parts: parts of the sum.
        sizes: sizes of the axes.
        indices: kept indices of each axis.
    """
    kept: list[int] = []
    for begin, _, part in list_parts(parts, sizes):
        inside = [0]
        for factor, size in zip(part, factor_sizes(part, sizes), strict=True):
            own = range(factor) if isinstance(factor, int) else indices[factor]
            inside = [outer * size + index for outer in inside for index in own]
        kept += [begin + index for index in inside]
    whole = range(kept[0], kept[0] + len(kept))
    return whole if kept == list(whole) else kept


def _part_sizes(parts: Sequence[Factors], sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(factor_sizes(part, sizes)) for part in parts]


def list_indices(index_set: IndexSet, size: int) -> Sequence[int]:
    """The indices that an index set keeps of an axis of `size`, in local order."""
    match index_set:
        case Full():
            return range(size)
        case Prefix(size=count):
            return range(count)
        case Centre(size=count):
            return range((size - count) // 2, (size - count) // 2 + count)
        case Roll(start=start, size=count) if start + count <= size:
            return range(start, start + count)
        case Roll(start=start, size=count):
            return [*range(start, size), *range(start + count - size)]
        case Explicit(indices=indices):
            return indices


def check_indices(axis: Axis, index_set: IndexSet) -> None:
    """Check that an axis can be cut to an index set.

    Raises:
        ConfigError: the axis lacks some of the indices, they are too few or split a group, or its kind does not allow
            this cut.
    """
    # Check before listing the indices: there may be very many.
    if isinstance(index_set, Prefix | Roll | Centre) and index_set.size > axis.size:
        raise ConfigError(f"a submodel keeps {index_set.size} of axis {axis.name!r}, which has only {axis.size}")
    if axis.kind == "kernel" or isinstance(index_set, Centre):
        _check_centre(axis, index_set)
        return
    if isinstance(index_set, Prefix | Roll) and index_set.size < axis.least:
        raise ConfigError(
            f"a submodel keeps {index_set.size} of axis {axis.name!r}, but must keep {axis.least} or more"
        )
    if isinstance(index_set, Prefix) and index_set.size % axis.granularity == 0 and axis.kind != "class":
        return  # the common case: searches check thousands of these
    beyond = isinstance(index_set, Roll) and index_set.start >= axis.size
    indices = () if beyond else list_indices(index_set, axis.size)
    if beyond or max(indices) >= axis.size:
        raise ConfigError(f"a submodel keeps indices of axis {axis.name!r} beyond its size {axis.size}")
    if axis.kind == "class" and list(indices) != list(range(axis.size)):
        raise ConfigError(f"a submodel keeps {index_set} of axis {axis.name!r}, but must keep all {axis.size} in order")
    if len(indices) < axis.least:
        raise ConfigError(f"a submodel keeps {len(indices)} of axis {axis.name!r}, but must keep {axis.least} or more")
    step = axis.granularity
    # A group may be permuted inside: its members are normalised together in any order.
    groups = [index // step for index in indices]
    whole = [group for group in groups[::step] for _ in range(step)]
    if groups != whole or len(set(indices)) < len(indices):
        raise ConfigError(
            f"a submodel keeps {index_set} of axis {axis.name!r}, but must keep whole aligned groups of {step}"
        )


def _check_centre(axis: Axis, index_set: IndexSet) -> None:
    if axis.kind != "kernel" or not isinstance(index_set, Centre | Full):
        raise ConfigError(
            f"a submodel keeps {index_set} of axis {axis.name!r} of kind {axis.kind!r}, but a centre is for kernels, "
            "and kernels are kept whole or as their centre"
        )
    # An odd difference has no centre.
    if isinstance(index_set, Centre) and (axis.size - index_set.size) % 2:
        raise ConfigError(
            f"a submodel keeps the centre {index_set.size} of kernel axis {axis.name!r} of size {axis.size}, but their "
            "difference must be even"
        )
