"""An immutable mapping; a copy with one changed entry costs the same at any size.

It is a hash trie of two levels with 64 branches each: a change copies the path to one leaf and shares the rest. So two
states of a run store a fleet once, and their differences are found without visiting what they share.

Leaves have a few entries up to some ten thousand clients. With many more, or with chosen names that share a leaf, they
grow, and a change costs the copy of a leaf.
"""

import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")
_BITS = 6
_WIDTH = 1 << _BITS

Leaf = tuple[tuple[str, V], ...]
Branch = tuple[Leaf[V], ...]


class PersistentMap(Mapping[str, V], Generic[V]):
    """A mapping from strings. The order of entries depends only on the keys.

    Args:
        items: to begin with.

    Attributes:
        root: branches of leaves, which other maps may share.
    """

    __slots__ = ("_count", "root")

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        leaves: list[list[list[tuple[str, V]]]] = [[[] for _ in range(_WIDTH)] for _ in range(_WIDTH if items else 0)]
        for key, value in (items or {}).items():
            high, low = _place(key)
            leaves[high][low].append((key, value))
        empty: Branch[V] = ()
        self.root: tuple[Branch[V], ...] = (
            tuple(
                tuple(tuple(sorted(leaf, key=_key)) for leaf in branch) if any(branch) else empty for branch in leaves
            )
            or ((),) * _WIDTH
        )
        self._count = len(items or {})

    def __getitem__(self, key: str) -> V:
        high, low = _place(key)
        branch = self.root[high]
        if branch:
            for name, value in branch[low]:
                if name == key:
                    return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (key for branch in self.root for leaf in branch for key, _ in leaf)

    def __len__(self) -> int:
        return self._count

    def items(self) -> ItemsView[str, V]:
        """The entries, read leaf by leaf without look-ups."""
        return _Entries(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"

    def updated(self, items: Mapping[str, V]) -> "PersistentMap[V]":
        """A copy with these entries added or replaced."""
        after = self
        for key, value in items.items():
            high, low = _place(key)
            old = after.root[high][low] if after.root[high] else ()
            others = tuple(entry for entry in old if entry[0] != key)
            leaf = tuple(sorted((*others, (key, value)), key=_key))
            after = after._with_leaf(high, low, leaf, after._count + (len(others) == len(old)))
        return after

    def without(self, keys: Iterable[str]) -> "PersistentMap[V]":
        """A copy without the entries of these keys."""
        after = self
        for key in keys:
            high, low = _place(key)
            old = after.root[high][low] if after.root[high] else ()
            others = tuple(entry for entry in old if entry[0] != key)
            if len(others) < len(old):
                after = after._with_leaf(high, low, others, after._count - 1)
        return after

    def changed(self, before: "PersistentMap[V]") -> Iterator[str]:
        """The keys with values that are not identical in another map; shared parts are not visited."""
        for branch, old_branch in zip(self.root, before.root, strict=True):
            if branch is old_branch or not branch:
                continue
            for leaf, old_leaf in zip(branch, old_branch or ((),) * _WIDTH, strict=True):
                if leaf is not old_leaf:
                    known = dict(old_leaf)
                    yield from (key for key, value in leaf if key not in known or known[key] is not value)

    def _with_leaf(self, high: int, low: int, leaf: Leaf[V], count: int) -> "PersistentMap[V]":
        branch = self.root[high] or ((),) * _WIDTH
        after: PersistentMap[V] = PersistentMap.__new__(PersistentMap)
        after.root = (*self.root[:high], (*branch[:low], leaf, *branch[low + 1 :]), *self.root[high + 1 :])
        after._count = count
        return after


class _Entries(ItemsView[str, V]):
    """The entries of a map, iterated leaf by leaf."""

    def __init__(self, entries: PersistentMap[V]) -> None:
        super().__init__(entries)
        self._root = entries.root

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return (entry for branch in self._root for leaf in branch for entry in leaf)


def _key(entry: tuple[str, object]) -> str:
    return entry[0]


def _place(key: str) -> tuple[int, int]:
    digest = zlib.crc32(key.encode())
    return digest & (_WIDTH - 1), (digest >> _BITS) & (_WIDTH - 1)
