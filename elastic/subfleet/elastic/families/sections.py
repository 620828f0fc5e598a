"""The layout of blocks in networks: sections, streams and strides."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, Protocol, TypeVar

from torch import nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Sizes
from subfleet.elastic.families.records.blocks import block_numbers
from subfleet.elastic.network import Block, Family, Norm
from subfleet.protocol.errors import ConfigError


class PlacedBlock(Protocol):
    """The position of a block in the full network."""

    @property
    def name(self) -> str:
        """Name of the block; see `block_name`."""

    @property
    def section(self) -> int:
        """Index of its section."""

    @property
    def number(self) -> int:
        """The number in its name, which identifies it in its section regardless of its position."""

    @property
    def position(self) -> int:
        """Its index in its section; blocks after the first can be omitted."""


class Sectioned(Protocol):
    """Settings of a network with a width for each section."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each section."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each section."""


class Normed(Protocol):
    """Settings of a network's norms."""

    @property
    def norm(self) -> Norm:
        """Kind of norm."""

    @property
    def group_size(self) -> int:
        """Channels of one group if norm is "group"."""

    @property
    def scaler(self) -> bool:
        """Whether a scaler precedes each norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisNames:
    """Names of axes.

    Attributes:
        stem: name of the axis of the first block's input, if that block starts a new stream.
        stream: last part of the name of a section's stream.
    """

    stem: str = "stem"
    stream: str = "stream"


_USUAL_NAMES = AxisNames()
_Plan = TypeVar("_Plan", bound=PlacedBlock)


def block_name(section: int, number: int) -> str:
    """The name of a block and of its module in the network."""
    return f"section{section}.block{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """A block of the full network with one input and one output stream.

    Attributes:
        section: as in `PlacedBlock`.
        number: as in `PlacedBlock`.
        position: as in `PlacedBlock`.
        stream_in: axis of its input.
        stream: axis of its output; the same axis if a residual connection, or omitting the block, ties both.
        width_in: size of `stream_in`.
        width: size of `stream`.
        stride: stride of its convolution, if any.
        kernel: side of its kernels; 0 if the settings name none.
    """

    section: int
    number: int
    position: int
    stream_in: str
    stream: str
    width_in: int
    width: int
    stride: int
    kernel: int

    @property
    def name(self) -> str:
        """As in `PlacedBlock`."""
        return block_name(self.section, self.number)

    @property
    def residual(self) -> bool:
        """Whether the block adds to its input without projecting it."""
        return self.stream_in == self.stream


def plan_blocks(
    config: Sectioned,
    *,
    strides: tuple[int, ...],
    stem_width: int,
    keeping: Literal["none", "first", "all"],
    kernels: tuple[int, ...] = (),
    names: AxisNames = _USUAL_NAMES,
) -> tuple[BlockPlan, ...]:
    """List all blocks of a network in order.

    All blocks of a section share one stream. Its first block starts a new stream, or keeps the previous one if it is
    residual and neither width nor stride change.

    Args:
        config: the settings.
        strides: stride of each section.
        stem_width: input channels of the first block.
        keeping: sections that may keep the previous stream.
        kernels: side of the kernels of each section; empty if the settings name none.
        names: names of the axes.
    """
    before = (stem_width, *config.widths)
    keeps = [
        stride == 1 and width_in == width and (keeping == "all" or (keeping == "first" and not section))
        for section, (stride, width_in, width) in enumerate(zip(strides, before, config.widths, strict=False))
    ]
    before_section = f"section0.{names.stream}" if keeps[0] else names.stem
    plans: list[BlockPlan] = []
    for section, (width, numbers) in enumerate(zip(config.widths, block_numbers(config), strict=True)):
        own = before_section if keeps[section] else f"section{section}.{names.stream}"
        plans += [
            BlockPlan(
                section=section,
                number=number,
                position=position,
                stream_in=own if position else before_section,
                stream=own,
                width_in=width if position else before[section],
                width=width,
                stride=1 if position else strides[section],
                kernel=kernels[section] if kernels else 0,
            )
            for position, number in enumerate(numbers)
        ]
        before_section = own
    return tuple(plans)


def with_layer_widths(plans: Sequence[BlockPlan], layer_widths: Sequence[int]) -> tuple[BlockPlan, ...]:
    """The same blocks, each with an output stream of its own width."""
    axes = (plans[0].stream_in, *(layer_axis(plan.section, plan.number) for plan in plans))
    sizes = (plans[0].width_in, *layer_widths)
    return tuple(
        replace(plan, stream_in=axis_in, stream=axis, width_in=width_in, width=width)
        for plan, (axis_in, axis), (width_in, width) in zip(plans, pairwise(axes), pairwise(sizes), strict=True)
    )


def layer_axis(section: int, number: int) -> str:
    """The axis of a block's output if layers have widths of their own."""
    return f"{block_name(section, number)}.width"


def skippable(plans: Iterable[PlacedBlock]) -> tuple[Block, ...]:
    """The blocks that a submodel may omit: all but the first of each section."""
    return tuple(Block(name=plan.name, section=plan.section) for plan in plans if plan.position)


def skippable_layers(plans: Iterable[BlockPlan]) -> tuple[Block, ...]:
    """The blocks that a submodel may omit if input and output streams of a block may differ."""
    return tuple(
        block if plan.residual else replace(block, reads=plan.stream_in, gives=plan.stream)
        for plan in plans
        for block in skippable([plan])
    )


def channel_axis(config: Normed, name: str, size: int) -> Axis:
    """An axis of channels; with group norm only whole groups are kept."""
    return Axis(name=name, size=size, kind="channel", granularity=config.group_size if config.norm == "group" else 1)


def class_axis(config: Family) -> Axis:
    """The axis of the classes."""
    return Axis(name="class", size=config.class_count, kind="class", granularity=config.class_count)


def stream_axes(config: Normed, plans: Iterable[BlockPlan], *, stem: bool = True) -> Iterator[Axis]:
    """Yield the axis of each stream in order; with `stem` including that of the first block's input."""
    sizes = {}
    for plan in plans:
        if stem:
            sizes[plan.stream_in] = plan.width_in
        sizes[plan.stream] = plan.width
    yield from (channel_axis(config, name, size) for name, size in sizes.items())


def kernel_axes(plans: Iterable[BlockPlan]) -> Iterator[Axis]:
    """Yield the axis of each block's kernels if the settings name their size.

    Raises:
        ConfigError: a kernel side is even.
    """
    for plan in plans:
        if plan.kernel:
            if plan.kernel % 2 == 0:
                raise ConfigError(f"a kernel of section {plan.section} is {plan.kernel} wide, but must be odd")
            yield Axis(name=f"{plan.name}.kernel", size=plan.kernel, kind="kernel", granularity=2)


def kernel_of(plan: BlockPlan, sizes: Sizes) -> int:
    """The side of a block's kernels; 3 if the settings name none."""
    return sizes[f"{plan.name}.kernel"] if plan.kernel else 3


def build_sections(
    plans: Iterable[_Plan],
    sizes: Sizes,
    make: Callable[[_Plan], nn.Module],
    *,
    close: Callable[[], nn.Module] | None = None,
) -> Iterator[tuple[str, nn.Sequential]]:
    """Build the blocks of a network, and yield the name and module of each section.

    Args:
        plans: all blocks.
        sizes: sizes of the network.
        make: creates a block.
        close: creates a final module for each section, if any.
    """
    for section, inside in groupby(plans, lambda plan: plan.section):
        modules = OrderedDict(
            (f"block{plan.number}", make(plan)) for plan in inside if not plan.position or plan.name in sizes.parts
        )
        if close is not None:
            modules["pool"] = close()
        yield f"section{section}", nn.Sequential(modules)
