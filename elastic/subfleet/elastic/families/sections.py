"""Networks of sections of blocks: their sizes, and what the whole says about its axes."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Literal, Protocol, TypeVar

from torch import nn

from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.recording.markers import UNMARKED, Markers

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Sectioned(Protocol):
    """Settings of a network with a width for each section; optional ones are `kernels` and `layer_widths`."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each section."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """A block with one input and one output.

    Attributes:
        section: index of its section.
        position: its index in its section; blocks after the first can be omitted.
        stream: axis of its output.
        keeps: whether its input has the same axis, because the block adds to it, or can be omitted.
        width_in: width of its input.
        width: width of its output.
        stride: stride of its convolution, if any.
        side: side of its kernels.
    """

    section: int
    position: int
    stream: str
    keeps: bool
    width_in: int
    width: int
    stride: int
    side: int

    @property
    def name(self) -> str:
        """Path of its module in the network."""
        return f"section{self.section}.block{self.position}"


def plan_blocks(
    config: Sectioned,
    *,
    stem_width: int,
    strides: tuple[int, ...] = (),
    keeping: Literal["none", "first", "all"] = "none",
    stream: str = "stream",
) -> tuple[BlockPlan, ...]:
    """List all blocks of a network in order.

    All blocks of a section share one stream, unless the settings give each layer a width. The first block starts a new
    stream, or keeps the previous one if it is residual and neither width nor stride change.

    Args:
        config: the settings.
        stem_width: input channels of the first block.
        strides: stride of each section; empty for 1.
        keeping: sections that may keep the previous stream.
        stream: last part of the name of a section's stream.
    """
    kernels: tuple[int, ...] = getattr(config, "kernels", ())
    layer_widths: tuple[int, ...] = getattr(config, "layer_widths", ())
    plans: list[BlockPlan] = []
    widths = iter(layer_widths or expand_to_blocks(config.widths, config.depths))
    for section, depth in enumerate(config.depths):
        for position in range(depth):
            width_in, width = plans[-1].width if plans else stem_width, next(widths)
            stride = strides[section] if strides and not position else 1
            may_keep = keeping == "all" or (keeping == "first" and not section) or bool(position)
            keeps = may_keep and not layer_widths and stride == 1 and width_in == width
            plan = BlockPlan(
                section=section,
                position=position,
                stream=plans[-1].stream if keeps and plans else f"section{section}.{stream}",
                keeps=keeps,
                width_in=width_in,
                width=width,
                stride=stride,
                side=kernels[section] if kernels else 3,
            )
            plans.append(replace(plan, stream=f"{plan.name}.width") if layer_widths else plan)
    return tuple(plans)


def build_sections(
    plans: Sequence[BlockPlan],
    make: Callable[[BlockPlan], nn.Module],
    *,
    close: Callable[[], nn.Module] | None = None,
) -> "OrderedDict[str, nn.Module]":
    """Build the blocks of a network: a module for each section, by its name.

    Args:
        plans: all blocks.
        make: creates a block.
        close: creates a final module for each section, if any.
    """
    sections = OrderedDict[str, nn.Module]()
    for section, inside in groupby(plans, lambda plan: plan.section):
        modules = OrderedDict((plan.name.rpartition(".")[2], make(plan)) for plan in inside)
        if close is not None:
            modules["pool"] = close()
        sections[f"section{section}"] = nn.Sequential(modules)
    return sections


class SectionedNetwork(nn.Sequential):
    """Modules that run one after the other, among them sections of blocks, and the markers of all.

    The outputs of blocks have the axes of their plans. What is inside a block is said by markers of its own, in names
    relative to it.

    Args:
        modules: by name; a module "stem" comes before the first block, and "head" gives the classes.
        plans: its blocks.
        channel: dimension of the channels of a block's output.
        before: other axes that are listed before those of blocks, and their kinds and the roles of tensors.
        after: other axes that are listed after those of blocks.
        cuts_kernels: whether submodels may cut the kernels of blocks.
    """

    def __init__(
        self,
        modules: "OrderedDict[str, nn.Module]",
        plans: Sequence[BlockPlan],
        *,
        channel: int = 1,
        before: Markers = UNMARKED,
        after: Markers = UNMARKED,
        cuts_kernels: bool = False,
    ) -> None:
        super().__init__(modules)
        outputs = {(plan.name, channel): (plan.stream,) for plan in plans}
        if "stem" in modules:
            outputs = {("stem", channel): (plans[0].stream if plans[0].keeps else "stem",)} | outputs
        kernels = {(f"{path}.weight", 2): (f"{name}.kernel",) for name, path in self._list_filters(plans)}
        parts = [
            before,
            Markers(axes=outputs),
            *(getattr(self.get_submodule(plan.name), "markers", UNMARKED).within(plan.name) for plan in plans),
            Markers(axes=kernels if cuts_kernels else {}),
            after,
            Markers(axes={("head.weight", 0): ("class",)}),
        ]
        sections = groupby(plans, lambda plan: plan.section)
        self.markers = Markers(
            axes=_join(part.axes for part in parts),
            kinds=_join(part.kinds for part in parts),
            kernels=frozenset(tensor for tensor, _ in kernels) if cuts_kernels else frozenset(),
            sections=tuple(tuple(plan.name for plan in own) for _, own in sections),
            kept=frozenset(plan.name for plan in plans if not plan.position),
            roles=_join(part.roles for part in parts),
            drawn=True,
        )

    def _list_filters(self, plans: Sequence[BlockPlan]) -> Iterator[tuple[str, str]]:
        """Yield the block and the path of each convolution in blocks whose kernel has several places."""
        for plan in plans:
            for path, layer in self.get_submodule(plan.name).named_modules(prefix=plan.name):
                if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
                    yield plan.name, path


def _join(mappings: Iterable[Mapping[_Key, _Value]]) -> dict[_Key, _Value]:
    return dict(chain.from_iterable(mapping.items() for mapping in mappings))
