"""Names the axes of a module's tensors."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType

from torch import Tensor

from subfleet.elastic.recording.dimensions import GROUP, Dim, Leaf, expand_parts, measure, resolve
from subfleet.elastic.recording.markers import Markers, Place, tie_marked
from subfleet.elastic.recording.run import ModuleRuns

_SUFFIXES: Mapping[str, str] = MappingProxyType({"head": ".heads", "head_dim": ".head_dim"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedAxis:
    """An axis.

    Attributes:
        name: unique in its network.
        leaves: of its dimension: one, or two of groups and what is in a group. A leaf of kind `GROUP` is never cut.
        kind: see `subfleet.elastic.axes.AxisKind`.
    """

    name: str
    leaves: Dim
    kind: str

    @property
    def leaf(self) -> Leaf:
        """The leaf that is cut; of a single group, the leaf that would be."""
        return self.leaves[0]

    @property
    def size(self) -> int:
        """Number of indices."""
        return measure(self.leaves)

    @property
    def group_size(self) -> int:
        """Number of indices that are kept or dropped together."""
        return self.leaves[-1].size if self.leaves[-1].kind == GROUP else 1

    def names(self) -> Iterator[tuple[Leaf, str]]:
        """Yield the name of each leaf in expressions of sizes; the second is part of the first."""
        yield from zip(self.leaves, (self.name, ""), strict=False)


def name_axes(runs: ModuleRuns, markers: Markers) -> tuple[NamedAxis, ...]:
    """Name the axes of the module's tensors: first those of its markers, then the others in the order of its tensors.

    An axis without a marker has the name of the first layer whose weight has it as its outputs; "class" is that of the
    results.

    Raises:
        ConfigError: the markers do not fit.
    """
    outputs = {span.layer: span.out for span in runs.training.spans if isinstance(span.out, Tensor)}
    dims: dict[Place, Dim] = {
        (name, place): dim
        for name, tensor in {**outputs, **runs.state}.items()
        for place, dim in enumerate(runs.follower.dims_of(tensor))
    }
    marked = tie_marked(markers, dims, runs.state.keys())
    axes = [
        NamedAxis(name=name, leaves=leaves, kind=markers.kinds.get(name) or _find_kind(leaves[0]))
        for name, leaves in marked.items()
    ]
    known = {leaf for axis in axes for leaf in axis.leaves}
    groups, names = _find_groups(runs), {axis.name for axis in axes}
    for leaf, places in _list_unnamed(runs, known).items():
        name = _choose_name(leaf, places, names)
        names.add(name)
        leaves = (leaf, groups[leaf]) if leaf in groups else (leaf,)
        axes.append(NamedAxis(name=name, leaves=leaves, kind=_find_kind(leaf)))
    return tuple(axes)


def _find_kind(leaf: Leaf) -> str:
    return "channel" if leaf.kind in ("", GROUP) else leaf.kind


def _list_unnamed(runs: ModuleRuns, known: set[Leaf]) -> dict[Leaf, list[tuple[str, int, int]]]:
    """Each other leaf that may be cut, with the names of its tensors, its dimensions and their ranks."""
    places = defaultdict[Leaf, list[tuple[str, int, int]]](list)
    for name, tensor in runs.state.items():
        for place, dim in enumerate(runs.follower.dims_of(tensor)):
            for leaf in dict.fromkeys(leaf for product in expand_parts(dim) for leaf in product):
                if not (leaf.reason or leaf.is_batch or leaf.parts) and leaf.size > 1 and leaf not in known:
                    places[leaf].append((name, place, tensor.dim()))
    return places


def _choose_name(leaf: Leaf, places: list[tuple[str, int, int]], used: set[str]) -> str:
    outputs = [name for name, place, rank in places if place == 0 and rank > 1]
    layer = (outputs or [places[0][0]])[0].rpartition(".")[0] or places[0][0]
    name = "class" if leaf.kind == "class" else f"{layer}{_SUFFIXES.get(leaf.kind, '')}"
    number = 1
    while name in used:
        number += 1
        name = f"{name.partition(' ')[0]} {number}"
    return name


def _find_groups(runs: ModuleRuns) -> dict[Leaf, Leaf]:
    """Leaves that are always followed by the leaf of a group, with the latter."""
    after = defaultdict[Leaf, set[Leaf | None]](set)
    for dim in runs.follower.list_dims():
        for product in [resolve(dim), *expand_parts(dim)]:
            for leaf, inner in zip_longest(product, product[1:]):
                after[leaf].add(inner)
    groups = {}
    for leaf, inner in after.items():
        (only, *others) = inner
        if not others and only is not None and only.kind == GROUP:
            groups[leaf] = only
    return groups
