"""What an elastic network consists of, as plain data: axes, skippable blocks and tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from subfleet.elastic.axes import Axis, Dim, check_indices, kept_indices, local_size
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import Centre, Prefix, SubnetSpec

__all__ = [
    "BUFFER_ROLES",
    "Block",
    "LocalShapes",
    "MatrixProduct",
    "ModelConfig",
    "Network",
    "Role",
    "TensorDecl",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The full network, in the words of its family.

    Attributes:
        family: a name of `subfleet.elastic.families.FAMILIES`.
        input_shape: one sample without the batch; (channels, height, width) for images.
        class_count: number of classes, 2 or more.
        widths: channels of each section.
        depths: blocks of each section, 1 or more; the first block of a section is always kept.
        group_size: channels of one normalisation group, of which widths are multiples where norm is "group". Groups
            are never split between subnets, so a subnet normalises its channels exactly as the full network does.
        norm: "group"; "batch" with running statistics that travel with the weights; "layer"; or "none".
        block: of residual networks, "basic" or "bottleneck" (He et al. 2016, figure 5).
        hidden_widths: of each section, or of each block, the width inside a block: expanded, bottleneck's or
            feed-forward; empty takes the family's usual share of its widths.
        squeezed_widths: of each section, or of each block, the width inside squeeze-and-excitation; 0 for none; empty
            for none at all.
        kernels: of each section, the side of its kernels; empty takes the family's usual one.
        strides: of each section, the step of its first block; empty takes the family's usual ones.
        stem_width: channels of the first layer where it differs from what the first section has; 0 takes the usual.
        stem_stride: step of the first convolution.
        last_widths: of the layers between the last section and the head; empty takes the family's usual ones.
        heads: of each section, the heads of its attention.
        head_width: of each head's queries, keys and values; 0 takes width / heads.
        vocabulary: symbols, where inputs are tokens; else 0.
        embedding_width: of a symbol, where it is not that of the first section; 0 takes that.
        patch: side of an image patch, where an image becomes tokens; else 0.
        learnable_steps: each skippable block adds a learnable multiple of what it computes (NeFL, section 3.1).
        scaler: while it trains, a subnet divides what enters a norm by its share of that axis (HeteroFL, section 3.2).
    """

    family: str
    input_shape: tuple[int, ...]
    class_count: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    group_size: int = 4
    norm: Literal["group", "batch", "layer", "none"] = "group"
    block: Literal["basic", "bottleneck"] = "basic"
    hidden_widths: tuple[int, ...] = ()
    squeezed_widths: tuple[int, ...] = ()
    kernels: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    stem_width: int = 0
    stem_stride: int = 1
    last_widths: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    head_width: int = 0
    vocabulary: int = 0
    embedding_width: int = 0
    patch: int = 0
    learnable_steps: bool = False
    scaler: bool = False

    def __post_init__(self) -> None:
        if not self.input_shape or min(self.input_shape) < 1:
            raise ConfigError(f"input_shape is {self.input_shape}, but must hold one or more sizes of 1 or more")
        if self.class_count < 2:
            raise ConfigError(f"class_count is {self.class_count}, but must be 2 or more")
        if not self.widths or len(self.widths) != len(self.depths):
            raise ConfigError(
                f"widths {self.widths} and depths {self.depths} must have one entry for each section, at least one"
            )
        if self.group_size < 1 or min(self.widths) < 1:
            raise ConfigError(f"widths are {self.widths} and group_size is {self.group_size}, but must be 1 or more")
        if self.norm == "group" and any(width % self.group_size for width in (*self.widths, *self.hidden_widths)):
            raise ConfigError(
                f"widths are {(*self.widths, *self.hidden_widths)}, but must be multiples of group_size "
                f"{self.group_size}"
            )
        if min(self.depths) < 1:
            raise ConfigError(f"depths are {self.depths}, but every section needs 1 block or more")
        self._check_sections()

    def _check_sections(self) -> None:
        sections, blocks = len(self.widths), sum(self.depths)
        for name, least in (("kernels", 1), ("strides", 1), ("heads", 1)):
            values = getattr(self, name)
            if values and (len(values) != sections or min(values) < least):
                raise ConfigError(
                    f"{name} is {values}, but must be empty or one number of {least} or more for each of the "
                    f"{sections} sections"
                )
        for name, least in (("hidden_widths", 1), ("squeezed_widths", 0)):
            values = getattr(self, name)
            if values and (len(values) not in {sections, blocks} or min(values) < least):
                raise ConfigError(
                    f"{name} is {values}, but must be empty or one number of {least} or more for each of the "
                    f"{sections} sections or each of the {blocks} blocks"
                )
        sizes = ("stem_width", "head_width", "vocabulary", "embedding_width", "patch")
        for name, least in (("stem_stride", 1), *((name, 0) for name in sizes)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be {least} or more")
        if min(self.last_widths, default=1) < 1:
            raise ConfigError(f"last_widths are {self.last_widths}, but must be 1 or more")

    def of_each_block(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """What each block has, of numbers that are given for each section or for each block; none of none."""
        if len(values) in {0, sum(self.depths)}:
            return values
        return tuple(value for value, depth in zip(values, self.depths, strict=True) for _ in range(depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the network that a subnet may leave out.

    Attributes:
        name: unique in its network; prefix of the names of its tensors.
        section: index of the section that it belongs to.
    """

    name: str
    section: int


Role = Literal["weight", "residual", "gain", "bias", "step", "embedding", "symbol", "mean", "variance"]

BUFFER_ROLES = frozenset({"mean", "variance"})
"""Of tensors that training measures instead of learning them: the running statistics of norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDecl:
    """One tensor of the full network.

    Attributes:
        name: the same in the full network and in every subnet.
        shape: in the full network.
        axes: what each dimension is tied to.
        block: the skippable block that owns it, or None if it is always kept.
        role: "weight" of a layer (starts normal with variance 2 / fan-in), "residual" weight of the last layer of a
            block (starts at 0, so that every block starts as the identity), "gain" of a norm (starts at 1), "bias"
            (starts at 0), "step" of a block (starts at 1), "embedding" of symbols or positions in a stream
            that is normalised (starts normal with deviation 0.02), "symbol" embedded for layers without a norm (starts
            normal with deviation 1), running "mean" (starts at 0) or "variance" (starts at 1) of a norm.
        positions: at how many places of one sample it is applied: 1, or height times width of what it computes.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Dim, ...]
    block: str | None
    role: Role
    positions: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """A product of computed values with each other, such as of queries with keys, which no tensor's shape tells.

    Attributes:
        result: sizes of what one sample's product gives: names of axes, and sizes that are never cut.
        summed: sizes of what is summed over, in the same words.
        block: the skippable block that computes it, or None if it always is.
    """

    result: tuple[str | int, ...]
    summed: tuple[str | int, ...]
    block: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShapes:
    """How large a subnet is: all that a family needs to build its module.

    Attributes:
        sizes: how many indices it keeps, by axis.
        tensors: shape of each of its tensors, in network order.
    """

    sizes: Mapping[str, int]
    tensors: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The declaration that everything else is derived from.

    Attributes:
        config: what it was declared from.
        axes: by name.
        blocks: the skippable ones, in network order.
        tensors: by name, in network order.
        products: of computed values, for what they cost.
        kept_of_norms: how many numbers training keeps for each that a norm gives: its input and what the activation
            behind it gives; and where the activation needs what it was given, too, that is a third.
    """

    config: ModelConfig
    axes: Mapping[str, Axis] = field(repr=False)
    blocks: tuple[Block, ...] = field(repr=False)
    tensors: Mapping[str, TensorDecl] = field(repr=False)
    products: tuple[MatrixProduct, ...] = field(default=(), repr=False)
    kept_of_norms: int = field(default=2, repr=False)

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
            check_indices(self.axes[name], index_set)
        order = [block.name for block in self.blocks]
        if list(spec.blocks) != [name for name in order if name in spec.blocks]:
            raise ConfigError(f"a subnet keeps the blocks {list(spec.blocks)}, but must name some of {order}, in order")
        if spec.choices:
            raise ConfigError(f"a subnet chooses {dict(spec.choices)}, but this network has no choices")

    def sizes(self, spec: SubnetSpec) -> dict[str, int]:
        """How many indices a subnet keeps, by axis.

        Raises:
            ConfigError: the spec is no subnet of this network.
        """
        self.check(spec)
        sizes = {name: axis.size for name, axis in self.axes.items()}
        sizes.update({name: len(kept_indices(index_set, sizes[name])) for name, index_set in spec.axes})
        return sizes

    def shapes(self, spec: SubnetSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a subnet's tensors, in network order.

        Raises:
            ConfigError: the spec is no subnet of this network.
        """
        sizes = self.sizes(spec)
        kept = frozenset(spec.blocks)
        return {
            decl.name: tuple(local_size(dim, size, sizes) for size, dim in zip(decl.shape, decl.axes, strict=True))
            for decl in self.tensors.values()
            if decl.block is None or decl.block in kept
        }

    def local(self, spec: SubnetSpec) -> LocalShapes:
        """How large a subnet is.

        Raises:
            ConfigError: the spec is no subnet of this network.
        """
        return LocalShapes(sizes=self.sizes(spec), tensors=self.shapes(spec))

    def size_of(self, spec: SubnetSpec) -> SubnetSpec:
        """The subnet of the same size that is at the front of every axis: all that programs and costs depend on.

        Raises:
            ConfigError: the spec is no subnet of this network.
        """
        sizes = self.sizes(spec)
        axes = tuple(
            (name, index_set if isinstance(index_set, Centre) else Prefix(size=sizes[name]))
            for name, index_set in spec.axes
            if sizes[name] < self.axes[name].size
        )
        return replace(spec, axes=axes)

    def parameter_count(self, spec: SubnetSpec) -> int:
        """How many numbers a subnet holds, running statistics included.

        Raises:
            ConfigError: the spec is no subnet of this network.
        """
        return sum(math.prod(shape) for shape in self.shapes(spec).values())
