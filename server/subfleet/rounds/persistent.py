"""An immutable mapping; a copy with one changed entry costs the same at any size.

It is a hash trie of two levels with 64 branches each: a change copies the path to one leaf and shares the rest. So two
states of a run store a fleet once, and their differences are found without visiting what they share.

Leaves have a few entries up to some ten thousand clients. With many more, or with chosen names that share a leaf, they
grow, and a change costs the copy of a leaf.
"""

import zlib
from collections import defaultdict
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Generic, TypeVar

V = TypeVar("V")
_BITS = 6
_WIDTH = 1 << _BITS
_NO_LEAVES = ((),) * _WIDTH
_MANY = 256
"""With more new entries than this, most leaves change, and the copy is built at once."""

Leaf = tuple[tuple[str, V], ...]
Branch = tuple[Leaf[V], ...]


class PersistentMap(Mapping[str, V], Generic[V]):
    """A mapping from strings. The order of entries depends only on the keys.

    Args:
        items: the initial entries.

    Attributes:
        root: branches of leaves, which other maps may share; a branch without entries has no leaves. Equal maps have
            equal roots.
    """

    __slots__ = ("_count", "root")

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        leaves: defaultdict[tuple[int, int], list[tuple[str, V]]] = defaultdict(list)
        for key, value in (items or {}).items():
            leaves[_locate(key)].append((key, value))
        used, empty = {high for high, _ in leaves}, list[tuple[str, V]]()
        self.root: tuple[Branch[V], ...] = tuple(
            tuple(tuple(sorted(leaves.get((high, low), empty), key=itemgetter(0))) for low in range(_WIDTH))
            if high in used
            else ()
            for high in range(_WIDTH)
        )
        self._count = len(items or {})

    def __getitem__(self, key: str) -> V:
        high, low = _locate(key)
        for name, value in (self.root[high] or _NO_LEAVES)[low]:
            if name == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (key for branch in self.root for leaf in branch for key, _ in leaf)

    def __len__(self) -> int:
        return self._count

    def items(self) -> ItemsView[str, V]:
        """The entries, read leaf by leaf without look-ups."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        return self.root == other.root if isinstance(other, PersistentMap) else super().__eq__(other)

    __hash__ = Mapping.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"

    def with_items(self, items: Mapping[str, V]) -> "PersistentMap[V]":
        """A copy with these entries added or replaced."""
        if len(items) > max(_MANY, self._count // _WIDTH):
            return PersistentMap({**dict(self.items()), **items})
        after = self
        for key, value in items.items():
            after = after._with_entry(key, ((key, value),))
        return after

    def without(self, keys: Iterable[str]) -> "PersistentMap[V]":
        """A copy without the entries of these keys."""
        after = self
        for key in keys:
            after = after._with_entry(key, ())
        return after

    def find_changed(self, before: "PersistentMap[V]") -> Iterator[str]:
        """The keys with values that are not identical in another map; shared parts are not visited."""
        for branch, old_branch in zip(self.root, before.root, strict=True):
            if branch is not old_branch:
                for leaf, old_leaf in zip(branch or _NO_LEAVES, old_branch or _NO_LEAVES, strict=True):
                    if leaf is not old_leaf:
                        known = dict(old_leaf)
                        yield from (key for key, value in leaf if key not in known or known[key] is not value)

    def _with_entry(self, key: str, entry: Leaf[V]) -> "PersistentMap[V]":
        """A copy with this entry of a key, or without one."""
        high, low = _locate(key)
        branch: Branch[V] = self.root[high] or _NO_LEAVES
        other_entries = tuple(known for known in branch[low] if known[0] != key)
        count = self._count + len(other_entries) + len(entry) - len(branch[low])
        if not entry and count == self._count:
            return self
        leaf = tuple(sorted((*other_entries, *entry), key=itemgetter(0)))
        branch = (*branch[:low], leaf, *branch[low + 1 :])
        after: PersistentMap[V] = PersistentMap.__new__(PersistentMap)
        after.root = (*self.root[:high], branch if any(branch) else (), *self.root[high + 1 :])
        after._count = count
        return after


class _Items(ItemsView[str, V]):
    def __init__(self, entries: PersistentMap[V]) -> None:
        super().__init__(entries)
        self._root = entries.root

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return chain.from_iterable(chain.from_iterable(self._root))


def _locate(key: str) -> tuple[int, int]:
    digest = zlib.crc32(key.encode())
    return digest & (_WIDTH - 1), (digest >> _BITS) & (_WIDTH - 1)
