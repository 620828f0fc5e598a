"""How the blocks of networks follow each other: sections, streams and strides."""

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
    """Where a block of the full network is, whatever else its place says."""

    @property
    def name(self) -> str:
        """As `block_name` gives it."""

    @property
    def section(self) -> int:
        """Its index."""

    @property
    def number(self) -> int:
        """That in its name, by which the blocks of a section are told apart wherever they stand."""

    @property
    def position(self) -> int:
        """Its index in its section; blocks after the first can be left out."""


class Sectioned(Protocol):
    """Settings of a network whose sections have a width each."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Of each section."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each section."""


class Normed(Protocol):
    """Settings of a network's norms."""

    @property
    def norm(self) -> Norm:
        """Which kind."""

    @property
    def group_size(self) -> int:
        """Channels of one group, where norm is "group"."""

    @property
    def scaler(self) -> bool:
        """Whether a scaler stands before each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisNames:
    """Names of axes.

    Attributes:
        stem: of what the first block reads, where it starts a stream.
        stream: the last part of the name of a section's.
    """

    stem: str = "stem"
    stream: str = "stream"


_USUAL_NAMES = AxisNames()
_Plan = TypeVar("_Plan", bound=PlacedBlock)


def block_name(section: int, number: int) -> str:
    """The name of a block, which is that of its module in the network."""
    return f"section{section}.block{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlace:
    """One block of the full network, which reads one stream and gives one.

    Attributes:
        section: as in `PlacedBlock`.
        number: as in `PlacedBlock`.
        position: as in `PlacedBlock`.
        stream_in: axis of what it reads.
        stream: axis of what it gives; the same where a residual connection, or leaving the block out, ties both.
        width_in: size of `stream_in`.
        width: size of `stream`.
        stride: step of its convolution, if it has one.
        kernel: side of its kernels; 0 where the settings name none.
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
        """Whether the block adds to what it reads without projecting it."""
        return self.stream_in == self.stream


def block_places(
    config: Sectioned,
    *,
    strides: tuple[int, ...],
    stem_width: int,
    keeping: Literal["none", "first", "all"],
    kernels: tuple[int, ...] = (),
    names: AxisNames = _USUAL_NAMES,
) -> tuple[BlockPlace, ...]:
    """All blocks of a network, in order.

    A section has one stream, which all blocks after its first keep. Its first block starts a new one, or keeps the one
    before where neither width nor stride change and it adds to what it reads.

    Args:
        config: the settings.
        strides: of each section.
        stem_width: channels that the first block reads.
        keeping: which sections may keep the stream before them.
        kernels: of each section; none where the settings name none.
        names: of axes.
    """
    before = (stem_width, *config.widths)
    keeps = [
        stride == 1 and width_in == width and (keeping == "all" or (keeping == "first" and not section))
        for section, (stride, width_in, width) in enumerate(zip(strides, before, config.widths, strict=False))
    ]
    before_section = f"section0.{names.stream}" if keeps[0] else names.stem
    places: list[BlockPlace] = []
    for section, (width, numbers) in enumerate(zip(config.widths, block_numbers(config), strict=True)):
        own = before_section if keeps[section] else f"section{section}.{names.stream}"
        places += [
            BlockPlace(
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
    return tuple(places)


def with_layer_widths(places: Sequence[BlockPlace], layer_widths: Sequence[int]) -> tuple[BlockPlace, ...]:
    """The same blocks, each of which gives a stream of its own width."""
    axes = (places[0].stream_in, *(layer_axis(place.section, place.number) for place in places))
    sizes = (places[0].width_in, *layer_widths)
    return tuple(
        replace(place, stream_in=axis_in, stream=axis, width_in=width_in, width=width)
        for place, (axis_in, axis), (width_in, width) in zip(places, pairwise(axes), pairwise(sizes), strict=True)
    )


def layer_axis(section: int, number: int) -> str:
    """The axis of what a block gives, where layers have widths of their own."""
    return f"{block_name(section, number)}.width"


def skippable(places: Iterable[PlacedBlock]) -> tuple[Block, ...]:
    """The blocks that a submodel may leave out: all but the first of each section."""
    return tuple(Block(name=place.name, section=place.section) for place in places if place.position)


def skippable_layers(places: Iterable[BlockPlace]) -> tuple[Block, ...]:
    """The same where a block may give another stream than it reads."""
    return tuple(
        block if place.residual else replace(block, reads=place.stream_in, gives=place.stream)
        for place in places
        for block in skippable([place])
    )


def channel_axis(config: Normed, name: str, size: int) -> Axis:
    """An axis of channels, which are kept in whole groups where they are normalised in groups."""
    return Axis(name=name, size=size, kind="channel", granularity=config.group_size if config.norm == "group" else 1)


def class_axis(config: Family) -> Axis:
    """The axis of the classes."""
    return Axis(name="class", size=config.class_count, kind="class", granularity=config.class_count)


def stream_axes(config: Normed, places: Iterable[BlockPlace], *, stem: bool = True) -> Iterator[Axis]:
    """The axis of each stream, in order; `stem` says whether that which the first block reads is one of them."""
    sizes = {}
    for place in places:
        if stem:
            sizes[place.stream_in] = place.width_in
        sizes[place.stream] = place.width
    yield from (channel_axis(config, name, size) for name, size in sizes.items())


def kernel_axes(places: Iterable[BlockPlace]) -> Iterator[Axis]:
    """The axis of each block's kernels, where the settings name their size.

    Raises:
        ConfigError: a kernel has no middle.
    """
    for place in places:
        if place.kernel:
            if place.kernel % 2 == 0:
                raise ConfigError(f"a kernel of section {place.section} is {place.kernel} wide, but must be odd")
            yield Axis(name=f"{place.name}.kernel", size=place.kernel, kind="kernel", granularity=2)


def kernel_of(place: BlockPlace, sizes: Sizes) -> int:
    """The side of a block's kernels: 3 where the settings name none."""
    return sizes[f"{place.name}.kernel"] if place.kernel else 3


def build_sections(
    places: Iterable[_Plan],
    sizes: Sizes,
    make: Callable[[_Plan], nn.Module],
    *,
    close: Callable[[], nn.Module] | None = None,
) -> Iterator[tuple[str, nn.Sequential]]:
    """The blocks that a network has, as a module for each section, with its name.

    Args:
        places: all blocks.
        sizes: of the network that is built.
        make: makes a block.
        close: makes what ends a section, if anything does.
    """
    for section, inside in groupby(places, lambda place: place.section):
        modules = OrderedDict(
            (f"block{place.number}", make(place)) for place in inside if not place.position or place.name in sizes.parts
        )
        if close is not None:
            modules["pool"] = close()
        yield f"section{section}", nn.Sequential(modules)
