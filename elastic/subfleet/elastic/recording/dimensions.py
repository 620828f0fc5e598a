"""Dimensions of tensors as products of leaves, which are tied to each other while operators are followed.

A leaf is a set of indices that several tensors share, such as the outputs of a convolution, its norm and the inputs of
the next layer. Operators tie leaves that must have equal sizes, split them where a view splits a dimension,
join them where tensors are concatenated, and keep them whole where nothing may be cut.
"""

import math
from collections.abc import Sequence


class Leaf:
    """A factor of dimensions.

    Attributes:
        size: number of indices.
        is_batch: whether it runs over the samples of a batch.
        reason: why it may not be cut; empty if it may be.
        kind: "head" or "head_dim" in attention, "class" of outputs, `GROUP` of what is normalised together, or what a
            module's markers say; else empty.
    """

    __slots__ = ("_next", "halves", "is_batch", "kind", "parts", "reason", "size")

    def __init__(self, size: int, *, reason: str = "", is_batch: bool = False) -> None:
        self.size = size
        self.is_batch = is_batch
        self.reason = reason
        self.kind = ""
        self.halves: tuple[Leaf, Leaf] | None = None
        self.parts: tuple[Dim, ...] = ()
        self._next: Leaf | None = None

    def find_root(self) -> "Leaf":
        """The leaf that stands for all leaves tied to this one."""
        leaf = self
        while leaf._next is not None:
            leaf = leaf._next
        return leaf

    def follow(self, root: "Leaf") -> None:
        """Let another root stand for this one."""
        self._next = root


GROUP = "group"
Dim = tuple[Leaf, ...]
"""A dimension as a product of leaves, the outermost first; empty if its size is 1."""


def make_dim(size: int) -> Dim:
    """A dimension of a new leaf."""
    return () if size == 1 else (Leaf(size),)


def make_whole_dim(size: int, reason: str) -> Dim:
    """A dimension that may not be cut."""
    return () if size == 1 else (Leaf(size, reason=reason),)


def resolve(dim: Sequence[Leaf]) -> list[Leaf]:
    """The roots of a dimension in their finest split, the outermost first."""
    leaves: list[Leaf] = []
    for leaf in dim:
        root = leaf.find_root()
        leaves += [root] if root.halves is None else resolve(root.halves)
    return leaves


def measure(dim: Sequence[Leaf]) -> int:
    """The size of a dimension."""
    return math.prod(leaf.size for leaf in dim)


def keep_whole(dim: Sequence[Leaf], reason: str) -> None:
    """Forbid to cut a dimension; the first reason counts."""
    for leaf in resolve(dim):
        if leaf.is_batch or leaf.reason:
            continue
        leaf.reason = reason
        for part in leaf.parts:
            keep_whole(part, reason)


def may_be_cut(dim: Sequence[Leaf]) -> bool:
    """Whether any leaf of a dimension may be cut."""
    return any(not leaf.reason and not leaf.is_batch and leaf.size > 1 for leaf in resolve(dim))


def expand_parts(dim: Sequence[Leaf]) -> list[list[Leaf]]:
    """A dimension as products of leaves, one after another: several where it is a concatenation that may be cut."""
    leaves = resolve(dim)
    if not leaves or not leaves[0].parts or leaves[0].reason:
        return [leaves]
    first, *inner = leaves
    return [product for part in first.parts for product in expand_parts([*part, *inner])]


def split(leaf: Leaf, outer: int) -> None:
    """Split a root into an outer leaf of this size and an inner one."""
    inner = leaf.size // outer
    alike = leaf.parts if all(measure(part) == inner for part in leaf.parts) else ()
    if leaf.parts and not alike:
        keep_whole((leaf,), "a concatenation is split")
    number = "outputs of equal size are concatenated" if alike else ""
    halves = (Leaf(outer, reason=leaf.reason or number), Leaf(inner, reason=leaf.reason))
    for part in alike:
        tie((halves[1],), part)
    if leaf.is_batch:
        halves[0].is_batch = True
    leaf.halves = halves


def tie(left: Sequence[Leaf], right: Sequence[Leaf]) -> None:
    """Tie two dimensions of equal size: an index kept in one is kept in the other."""
    while True:
        mine, others = ([leaf for leaf in resolve(dim) if leaf.size > 1 or leaf.is_batch] for dim in (left, right))
        while mine and others and mine[-1] is others[-1]:
            mine.pop()
            others.pop()
        if not mine or not others:
            keep_whole([*mine, *others], "it is combined with a dimension of another size")
            return
        last, other = mine[-1], others[-1]
        if last.size == other.size:
            _unite(last, other)
            left, right = mine[:-1], others[:-1]
            continue
        large, small = (last, other) if last.size > other.size else (other, last)
        if large.size % small.size:
            keep_whole([*mine, *others], "it is combined with a dimension that is divided differently")
            return
        split(large, large.size // small.size)
        left, right = mine, others


def _unite(leaf: Leaf, other: Leaf) -> None:
    """Tie two roots of equal size that are not split."""
    if leaf.parts and other.parts:
        if [measure(part) for part in leaf.parts] == [measure(part) for part in other.parts]:
            for part, same in zip(leaf.parts, other.parts, strict=True):
                tie(part, same)
        else:
            keep_whole((leaf, other), "concatenations with different parts are combined")
    root, gone = leaf, other
    if other.is_batch or (other.parts and not leaf.parts and not leaf.is_batch):
        root, gone = other, leaf
    gone.follow(root)
    root.kind = root.kind or gone.kind
    if gone.reason:
        keep_whole((root,), gone.reason)
    elif root.reason and gone.parts:
        for part in gone.parts:
            keep_whole(part, root.reason)


def join(dims: Sequence[Dim]) -> Dim:
    """The dimension of a concatenation."""
    if len(dims) == 1:
        return dims[0]
    size = sum(measure(dim) for dim in dims)
    if not any(may_be_cut(dim) for dim in dims):
        return make_whole_dim(size, "it joins parts that are kept whole")
    leaves = resolve(dims[0])
    if all(resolve(dim) == leaves for dim in dims[1:]):
        return (Leaf(len(dims), reason="copies of one dimension are concatenated"), *leaves)
    leaf = Leaf(size)
    # A dimension of size 1 has no leaf, but it is a part.
    leaf.parts = tuple(dim or (Leaf(1, reason="a single index"),) for dim in dims)
    return (leaf,)


def take_part(dim: Dim, start: int, stop: int) -> Dim:
    """The dimension of the indices from start to stop."""
    leaves = [leaf for leaf in resolve(dim) if leaf.size > 1]
    size, count = measure(leaves), stop - start
    if count == size:
        return dim
    if not may_be_cut(leaves):
        return make_whole_dim(count, "a part of a dimension that is kept whole")
    first = leaves[0]
    if len(leaves) == 1 and first.parts:
        part = _take_joined(first, start, stop)
        if part is not None:
            return part
    elif size % count == 0 and start % count == 0:
        chunks = _take_chunk(leaves, size // count)
        if chunks is not None:
            return chunks
    if len(leaves) == 1 and not first.parts:
        parts = {bounds: make_dim(bounds[1] - bounds[0]) for bounds in ((0, start), (start, stop), (stop, size))}
        first.parts = tuple(part or (Leaf(1, reason="a single index"),) for (a, b), part in parts.items() if a < b)
        return parts[start, stop]
    keep_whole(dim, "a part of it is read alone")
    return make_whole_dim(count, "a part of a dimension")


def _take_joined(leaf: Leaf, start: int, stop: int) -> Dim | None:
    """The parts of a concatenation between two indices; None if these split a part that may be cut."""
    taken: list[Dim] = []
    begin = 0
    for part in leaf.parts:
        end = begin + measure(part)
        if start <= begin and end <= stop:
            taken.append(part)
        elif begin < stop and start < end:
            if may_be_cut(part):
                return None
            taken.append(make_whole_dim(min(stop, end) - max(start, begin), "a part of a dimension that is kept whole"))
        begin = end
    return join(taken)


def _take_chunk(leaves: Sequence[Leaf], count: int) -> Dim | None:
    """One of some equal chunks of a dimension: their number is kept whole. None if leaves do not divide like that."""
    outer, *inner = leaves
    if outer.size > count and outer.size % count == 0 and not outer.parts:
        split(outer, count)
        outer, *more = resolve((outer,))
        inner = [*more, *inner]
    if outer.size != count:
        return None
    keep_whole((outer,), "equal chunks are read one by one")
    return tuple(inner)
