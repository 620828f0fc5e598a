"""What a module says about itself that its runs do not show."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from subfleet.elastic.axes import AxisKind
from subfleet.elastic.network import Role
from subfleet.elastic.recording.dimensions import GROUP, Dim, Leaf, resolve, tie
from subfleet.protocol.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Markers"]

Place = tuple[str, int]
"""The name of a tensor or of a layer, and a dimension of it or of the layer's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What a module says about itself, as its attribute `markers`. All of it is optional.

    Attributes:
        axes: the axis that a dimension runs over, or its axes from the outermost on. Dimensions with one name are cut
            alike. Axes are listed in this order, before all others. An axis has the first of several names.
        kinds: kinds of these axes; "channel" or what the run shows for all others.
        kernels: weights of convolutions whose square kernels may be cut. They are odd, and padded by half their side.
        sections: its blocks, section by section, in network order; a block is a layer with one input. None for the
            residual blocks that the runs show.
        kept: the blocks that no submodel leaves out.
        roles: roles of tensors that do not follow from their use.
        drawn: whether first weights are drawn by their roles, see `subfleet.elastic.network.TensorDecl`; otherwise as
            the module's own are distributed.
    """

    axes: Mapping[Place, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    kinds: Mapping[str, AxisKind] = field(default_factory=lambda: MappingProxyType({}))
    kernels: frozenset[str] = frozenset()
    sections: tuple[tuple[str, ...], ...] | None = None
    kept: frozenset[str] = frozenset()
    roles: Mapping[str, Role] = field(default_factory=lambda: MappingProxyType({}))
    drawn: bool = False

    def __deepcopy__(self, memo: object) -> "Markers":
        """Nothing of it changes, and Python cannot copy read-only mappings; without this, no module with it."""
        return self

    def within(self, layer: str) -> "Markers":
        """The axes, kinds and roles that a layer names, in the names of the module that contains it."""
        return Markers(
            axes={
                (f"{layer}.{tensor}", dim): tuple(f"{layer}.{name}" for name in names)
                for (tensor, dim), names in self.axes.items()
            },
            kinds={f"{layer}.{name}": kind for name, kind in self.kinds.items()},
            roles={f"{layer}.{tensor}": role for tensor, role in self.roles.items()},
        )


UNMARKED = Markers()


def find_markers(module: "nn.Module") -> Markers:
    """The markers of a module."""
    markers = getattr(module, "markers", UNMARKED)
    return markers if isinstance(markers, Markers) else UNMARKED


def tie_marked(markers: Markers, dims: Mapping[Place, Dim], tensors: Collection[str]) -> dict[str, Dim]:
    """Tie the dimensions with one name, and list what each name stands for; axes of one index are left out.

    Args:
        markers: of the module.
        dims: the dimensions of its tensors and of its layers' outputs.
        tensors: names of its tensors.

    Raises:
        ConfigError: a tensor does not exist, or a dimension does not run over as many axes.
    """
    named = dict[str, Dim]()
    if unknown := sorted({*markers.kernels, *markers.roles}.difference(tensors)):
        raise ConfigError(f"the markers name {unknown[0]!r}, which is no tensor of the network")
    for place, names in markers.axes.items():
        if place not in dims:
            raise ConfigError(
                f"the markers name dimension {place[1]} of {place[0]!r}, which is no tensor of the network"
            )
        for name, axis in _match_names(place, names, split_axes(dims[place]), markers.kinds):
            tie(named.setdefault(name, axis), axis)
    first = dict[Dim, str]()
    for name, axis in named.items():
        first.setdefault(tuple(resolve(axis)), name)
    return {name: axis for axis, name in first.items()}


def split_axes(dim: Sequence[Leaf]) -> list[Dim]:
    """The axes of a dimension, the outermost first: leaves that may be cut, or in groups with the leaf of a group."""
    axes: list[Dim] = []
    for leaf in resolve(dim):
        if leaf.kind == GROUP and axes and len(axes[-1]) == 1:
            axes[-1] = (*axes[-1], leaf)
        elif leaf.kind == GROUP or not (leaf.reason or leaf.is_batch):
            axes.append((leaf,))
    return axes


def _match_names(
    place: Place, names: tuple[str, ...], axes: list[Dim], kinds: Mapping[str, AxisKind]
) -> Iterator[tuple[str, Dim]]:
    """Yield the name of each axis; those of one index have no leaf."""
    if len(names) == len(axes):
        yield from zip(names, axes, strict=True)
        return
    for axis in axes:
        name = next((own for own in names if kinds.get(own) == axis[0].kind), names[0] if len(names) == 1 else "")
        if not name:
            raise ConfigError(
                f"the markers say that dimension {place[1]} of {place[0]!r} runs over {list(names)}, but it runs over "
                f"{len(axes)} axes that can be cut"
            )
        yield name, axis
