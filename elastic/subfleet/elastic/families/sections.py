"""The layout of blocks in networks: sections, streams and strides."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, Protocol, TypeVar

from torch import nn

from subfleet.elastic.axes import AxisKind
from subfleet.elastic.network import Role
from subfleet.elastic.recording.markers import Markers
from subfleet.protocol.errors import ConfigError


class PlacedBlock(Protocol):
    """The position of a block in the network."""

    @property
    def name(self) -> str:
        """Name of the block; see `block_name`."""

    @property
    def section(self) -> int:
        """Index of its section."""

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


def block_name(section: int, position: int) -> str:
    """The name of a block and of its module in the network."""
    return f"section{section}.block{position}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """A block with one input and one output stream.

    Attributes:
        section: as in `PlacedBlock`.
        position: as in `PlacedBlock`.
        stream_in: axis of its input.
        stream: axis of its output; the same axis if a residual connection, or omitting the block, ties both.
        width_in: size of `stream_in`.
        width: size of `stream`.
        stride: stride of its convolution, if any.
        kernel: side of its kernels; 0 if the settings name none.
    """

    section: int
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
        return block_name(self.section, self.position)

    @property
    def residual(self) -> bool:
        """Whether the block adds to its input without projecting it."""
        return self.stream_in == self.stream

    @property
    def side(self) -> int:
        """The side of its kernels."""
        return self.kernel or 3


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

    Raises:
        ConfigError: a kernel side is even.
    """
    even = next((side for side in kernels if side % 2 == 0), None)
    if even is not None:
        raise ConfigError(f"a kernel of section {kernels.index(even)} is {even} wide, but must be odd")
    before = (stem_width, *config.widths)
    keeps = [
        stride == 1 and width_in == width and (keeping == "all" or (keeping == "first" and not section))
        for section, (stride, width_in, width) in enumerate(zip(strides, before, config.widths, strict=False))
    ]
    before_section = f"section0.{names.stream}" if keeps[0] else names.stem
    plans: list[BlockPlan] = []
    for section, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        own = before_section if keeps[section] else f"section{section}.{names.stream}"
        plans += [
            BlockPlan(
                section=section,
                position=position,
                stream_in=own if position else before_section,
                stream=own,
                width_in=width if position else before[section],
                width=width,
                stride=1 if position else strides[section],
                kernel=kernels[section] if kernels else 0,
            )
            for position in range(depth)
        ]
        before_section = own
    return tuple(plans)


def with_layer_widths(plans: Sequence[BlockPlan], layer_widths: Sequence[int]) -> tuple[BlockPlan, ...]:
    """The same blocks, each with an output stream of its own width."""
    axes = (plans[0].stream_in, *(f"{plan.name}.width" for plan in plans))
    sizes = (plans[0].width_in, *layer_widths)
    return tuple(
        replace(plan, stream_in=axis_in, stream=axis, width_in=width_in, width=width)
        for plan, (axis_in, axis), (width_in, width) in zip(plans, pairwise(axes), pairwise(sizes), strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAxes:
    """The axes of a block, by the layers whose outputs run over them; layers are relative to the block.

    Attributes:
        stream: layers whose outputs are the block's.
        inner: layers inside, with the last part of the axis' name.
        kernels: layers whose kernels may be cut.
    """

    stream: tuple[str, ...]
    inner: Mapping[str, str]
    kernels: tuple[str, ...] = ()


def mark_blocks(
    plans: Sequence[BlockPlan],
    axes: Callable[[BlockPlan], BlockAxes],
    *,
    stem: str = "",
    others: Mapping[str, str],
    kinds: Mapping[str, AxisKind],
    roles: Mapping[str, Role],
) -> Markers:
    """The markers of a network of blocks.

    Args:
        plans: its blocks.
        axes: axes of a block.
        stem: the layer before the first block; empty if there is none.
        others: the axes of other layers' outputs, by layer.
        kinds: kinds of inner axes by the last part of their names.
        roles: as in `Markers`.
    """
    first = {stem: plans[0].stream_in} if stem else {}
    streams = {f"{plan.name}.{layer}": plan.stream for plan in plans for layer in axes(plan).stream}
    inner = {f"{plan.name}.{layer}": f"{plan.name}.{own}" for plan in plans for layer, own in axes(plan).inner.items()}
    kernels = {
        f"{plan.name}.{layer}": f"{plan.name}.kernel" for plan in plans if plan.kernel for layer in axes(plan).kernels
    }
    named = {(f"{layer}.weight", 0): (axis,) for layer, axis in (first | streams | inner).items()}
    named |= {(f"{layer}.weight", 2): (axis,) for layer, axis in kernels.items()}
    return Markers(
        axes=named | {(f"{layer}.weight", 0): (axis,) for layer, axis in others.items()},
        kinds={axis: kinds[axis.rpartition(".")[2]] for axis in inner.values() if axis.rpartition(".")[2] in kinds},
        kernels=frozenset(f"{layer}.weight" for layer in kernels),
        sections=list_sections(plans),
        kept=frozenset(plan.name for plan in plans if not plan.position),
        roles=roles,
        drawn=True,
    )


def list_sections(plans: Iterable[PlacedBlock]) -> tuple[tuple[str, ...], ...]:
    """The names of the blocks of each section."""
    return tuple(tuple(plan.name for plan in own) for _, own in groupby(plans, lambda plan: plan.section))


def build_sections(
    plans: Iterable[_Plan], make: Callable[[_Plan], nn.Module], *, close: Callable[[], nn.Module] | None = None
) -> Iterator[tuple[str, nn.Sequential]]:
    """Build the blocks of a network, and yield the name and module of each section.

    Args:
        plans: all blocks.
        make: creates a block.
        close: creates a final module for each section, if any.
    """
    for section, inside in groupby(plans, lambda plan: plan.section):
        modules = OrderedDict((plan.name.rpartition(".")[2], make(plan)) for plan in inside)
        if close is not None:
            modules["pool"] = close()
        yield f"section{section}", nn.Sequential(modules)


class MarkedSequence(nn.Sequential):
    """Modules that run one after the other, with markers.

    Args:
        modules: by name.
        markers: of the whole.
    """

    def __init__(self, modules: "OrderedDict[str, nn.Module]", markers: Markers) -> None:
        super().__init__(modules)
        self.markers = markers
