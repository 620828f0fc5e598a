"""What an elastic network consists of, as plain data: axes, skippable blocks and tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import Explicit, Full, IndexSet, Prefix, Roll, SubnetSpec

__all__ = ["Axis", "Block", "ModelConfig", "Network", "Role", "TensorDecl", "kept_indices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The full network, in the words of its family.

    Attributes:
        family: a name of `subfleet.elastic.families.FAMILIES`.
        input_shape: one sample without the batch; (channels, height, width) for images.
        class_count: number of classes, 2 or more.
        widths: channels of each section, each a multiple of group_size.
        depths: residual blocks of each section, 1 or more; the first block of a section is always kept.
        group_size: channels of one normalisation group. Groups are never split between subnets, so a subnet normalises
            its channels exactly as the full network does.
    """

    family: str
    input_shape: tuple[int, ...]
    class_count: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    group_size: int = 4

    def __post_init__(self) -> None:
        if not self.input_shape or min(self.input_shape) < 1:
            raise ConfigError(f"input_shape is {self.input_shape}, but must hold one or more sizes of 1 or more")
        if self.class_count < 2:
            raise ConfigError(f"class_count is {self.class_count}, but must be 2 or more")
        if not self.widths or len(self.widths) != len(self.depths):
            raise ConfigError(
                f"widths {self.widths} and depths {self.depths} must have one entry for each section, at least one"
            )
        if self.group_size < 1 or any(width < 1 or width % self.group_size for width in self.widths):
            raise ConfigError(f"widths are {self.widths}, but must be multiples of group_size {self.group_size}")
        if min(self.depths) < 1:
            raise ConfigError(f"depths are {self.depths}, but every section needs 1 block or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A class of tied tensor dimensions: whoever keeps an index in one of them keeps it in all.

    Attributes:
        name: unique in its network.
        size: number of indices in the full network.
        kind: "channel" may be cut; "class" stays whole and in its order, which is that of the labels.
        granularity: indices are kept or dropped in aligned groups of this many.
    """

    name: str
    size: int
    kind: Literal["channel", "class"]
    granularity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the network that a subnet may leave out.

    Attributes:
        name: unique in its network; prefix of the names of its tensors.
        section: index of the section that it belongs to.
    """

    name: str
    section: int


Role = Literal["weight", "residual", "gain", "bias"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDecl:
    """One tensor of the full network.

    Attributes:
        name: the same in the full network and in every subnet.
        shape: in the full network.
        axes: for each dimension its axis, or None where the dimension is never cut.
        block: the skippable block that owns it, or None if it is always kept.
        role: "weight" of a layer (starts normal with variance 2 / fan-in), "residual" weight of the last layer of a
            block (starts at 0, so that every block starts as the identity), "gain" of a norm (starts at 1) or "bias"
            (starts at 0).
        positions: at how many places of one sample it is applied: 1, or height times width of what it computes.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    block: str | None
    role: Role
    positions: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The declaration that everything else is derived from.

    Attributes:
        config: what it was declared from.
        axes: by name.
        blocks: the skippable ones, in network order.
        tensors: by name, in network order.
    """

    config: ModelConfig
    axes: Mapping[str, Axis] = field(repr=False)
    blocks: tuple[Block, ...] = field(repr=False)
    tensors: Mapping[str, TensorDecl] = field(repr=False)

    def full_spec(self) -> SubnetSpec:
        """The subnet that keeps everything."""
        return SubnetSpec(blocks=tuple(block.name for block in self.blocks), name="full")

    def check(self, spec: SubnetSpec) -> None:
        """Make sure that a spec is a subnet of this network.

        Raises:
            ConfigError: it names an unknown axis, block or choice, keeps indices that an axis lacks, splits a group of
                tied indices, or lists its blocks out of order.
        """
        for name, index_set in spec.axes:
            if name not in self.axes:
                raise ConfigError(f"a subnet names the axis {name!r}, but the network has {sorted(self.axes)}")
            _check_indices(self.axes[name], index_set)
        order = [block.name for block in self.blocks]
        if list(spec.blocks) != [name for name in order if name in spec.blocks]:
            raise ConfigError(f"a subnet keeps the blocks {list(spec.blocks)}, but must name some of {order}, in order")
        if spec.choices:
            raise ConfigError(f"a subnet chooses {dict(spec.choices)}, but this network has no choices")

    def shapes(self, spec: SubnetSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a subnet's tensors, in network order.

        Raises:
            ConfigError: the spec is no subnet of this network.
        """
        self.check(spec)
        sizes = {name: axis.size for name, axis in self.axes.items()}
        sizes.update({name: len(kept_indices(index_set, sizes[name])) for name, index_set in spec.axes})
        return {
            decl.name: tuple(
                size if axis is None else sizes[axis] for size, axis in zip(decl.shape, decl.axes, strict=True)
            )
            for decl in self.tensors.values()
            if decl.block is None or decl.block in spec.blocks
        }

    def parameter_count(self, spec: SubnetSpec) -> int:
        """How many numbers a subnet holds.

        Raises:
            ConfigError: the spec is no subnet of this network.
        """
        return sum(math.prod(shape) for shape in self.shapes(spec).values())


def kept_indices(index_set: IndexSet, size: int) -> Sequence[int]:
    """The indices that an index set keeps of an axis of `size`, in local order."""
    match index_set:
        case Full():
            return range(size)
        case Prefix(size=kept):
            return range(kept)
        case Roll(start=start, size=kept) if start + kept <= size:
            return range(start, start + kept)
        case Roll(start=start, size=kept):
            return [*range(start, size), *range(start + kept - size)]
        case Explicit(indices=indices):
            return indices


def _check_indices(axis: Axis, index_set: IndexSet) -> None:
    # Before the indices are listed: there may be very many of them.
    if isinstance(index_set, Prefix | Roll) and index_set.size > axis.size:
        raise ConfigError(f"a subnet keeps {index_set.size} of axis {axis.name!r}, which has only {axis.size}")
    beyond = isinstance(index_set, Roll) and index_set.start >= axis.size
    indices = () if beyond else kept_indices(index_set, axis.size)
    if beyond or max(indices) >= axis.size:
        raise ConfigError(f"a subnet keeps indices of axis {axis.name!r} beyond its size {axis.size}")
    if axis.kind == "class" and list(indices) != list(range(axis.size)):
        raise ConfigError(f"a subnet keeps {index_set} of axis {axis.name!r}, but must keep all {axis.size} in order")
    step = axis.granularity
    for first in range(0, len(indices), step):
        # A group may be permuted inside: its members are normalised together, whatever their order.
        group = sorted(indices[first : first + step])
        if group != list(range(group[0], group[0] + step)) or group[0] % step:
            raise ConfigError(
                f"a subnet keeps {index_set} of axis {axis.name!r}, but must keep whole aligned groups of {step}"
            )
