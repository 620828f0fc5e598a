"""Networks of sections of blocks: their sizes, and what the whole says about its axes."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Literal, TypeVar

from torch import nn

from subfleet.elastic.families.records.checks import Sectioned, expand_to_blocks
from subfleet.elastic.recording.markers import UNMARKED, Markers

_USUAL_SIDE = 3
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


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
        cuts_kernels: whether submodels may cut them, because the settings name them.
        hidden: width inside it; 0 if the settings name none.
        squeezed: width inside squeeze-and-excitation; 0 for none.
        heads: attention heads; 0 without attention.
    """

    section: int
    position: int
    stream: str
    keeps: bool
    width_in: int
    width: int
    stride: int
    side: int
    cuts_kernels: bool
    hidden: int
    squeezed: int
    heads: int

    @property
    def name(self) -> str:
        """Path of its module in the network."""
        return f"section{self.section}.block{self.position}"


def plan_blocks(
    config: Sectioned,
    *,
    width_in: int = 0,
    halving: bool = False,
    keeping: Literal["none", "first", "all"] = "none",
    stream: str = "stream",
) -> tuple[BlockPlan, ...]:
    """List all blocks of a network in order.

    All blocks of a section share one stream, unless the settings give each layer a width. The first block starts a new
    stream, or keeps the previous one if it is residual and neither width nor stride change.

    Args:
        config: the settings.
        width_in: width of the first block's input; 0 for that of the settings' stem.
        halving: whether sections after the first have a stride of 2, unless the settings name others.
        keeping: sections that may keep the previous stream.
        stream: last part of the name of a section's stream.
    """
    usual_strides = (1, *(2 if halving else 1 for _ in config.widths[1:]))
    strides = getattr(config, "strides", ()) or usual_strides
    kernels: tuple[int, ...] = getattr(config, "kernels", ())
    layer_widths: tuple[int, ...] = getattr(config, "layer_widths", ())
    widths = iter(layer_widths or expand_to_blocks(config.widths, config.depths))
    hidden, squeezed, heads = (
        iter(expand_to_blocks(getattr(config, name, ()), config.depths) or (0,) * sum(config.depths))
        for name in ("hidden_widths", "squeezed_widths", "heads")
    )
    width_in = width_in or getattr(config, "stem_width", 0) or config.widths[0]
    before, plans = f"section0.{stream}", list[BlockPlan]()
    for section, position in ((own, place) for own, depth in enumerate(config.depths) for place in range(depth)):
        width, stride = next(widths), 1 if position else strides[section]
        may_keep = keeping == "all" or (keeping == "first" and not section) or bool(position)
        keeps = may_keep and not layer_widths and stride == 1 and width_in == width
        started = f"section{section}.block{position}.width" if layer_widths else f"section{section}.{stream}"
        plans.append(
            BlockPlan(
                section=section,
                position=position,
                stream=before if keeps else started,
                keeps=keeps,
                width_in=width_in,
                width=width,
                stride=stride,
                side=kernels[section] if kernels else _USUAL_SIDE,
                cuts_kernels=bool(kernels),
                hidden=next(hidden),
                squeezed=next(squeezed),
                heads=next(heads),
            )
        )
        before, width_in = plans[-1].stream, width
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
    """

    def __init__(
        self,
        modules: "OrderedDict[str, nn.Module]",
        plans: Sequence[BlockPlan],
        *,
        channel: int = 1,
        before: Markers = UNMARKED,
        after: Markers = UNMARKED,
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
            Markers(axes=kernels),
            after,
            Markers(axes={("head.weight", 0): ("class",)}),
        ]
        sections = groupby(plans, lambda plan: plan.section)
        self.markers = Markers(
            axes=_join(part.axes for part in parts),
            kinds=_join(part.kinds for part in parts),
            kernels=frozenset(tensor for tensor, _ in kernels),
            sections=tuple(tuple(plan.name for plan in own) for _, own in sections),
            kept=frozenset(plan.name for plan in plans if not plan.position),
            roles=_join(part.roles for part in parts),
            drawn=True,
        )

    def _list_filters(self, plans: Sequence[BlockPlan]) -> Iterator[tuple[str, str]]:
        """Yield the block and the path of each convolution whose kernel has several places and may be cut."""
        for plan in (own for own in plans if own.cuts_kernels):
            for path, layer in self.get_submodule(plan.name).named_modules(prefix=plan.name):
                if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
                    yield plan.name, path


def _join(mappings: Iterable[Mapping[_Key, _Value]]) -> dict[_Key, _Value]:
    return dict(chain.from_iterable(mapping.items() for mapping in mappings))
