"""Settings that several families have: a type for each, with its bounds and its meaning; and how a family is built.

Those that every family has are described in `subfleet.elastic.network.Family`. Lengths that depend on other settings
are checked by `subfleet.elastic.families.records.checks`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from subfleet.protocol.bounds import Length
from subfleet.protocol.limits import Count, Positive

if TYPE_CHECKING:
    from torch import nn

Counts = Annotated[tuple[Positive, ...], Length(least=1)]
"""At least one number, such as the shape of an input: (channels, height, width) of images, (tokens,) of symbols."""
MaybeCounts = tuple[Positive, ...]

Widths = Counts
"""Width of each section: channels of convolutions, values of vectors, states of recurrent layers. A transformer's
stream has one width in all sections."""
Depths = Counts
"""Number of blocks of each section; submodels always keep the first."""
ReplaceableNorm = Literal["group", "batch", "none"]
"""Kind of norms; those of kind "batch" have running statistics that are sent with the weights."""
GroupSize = Positive
"""Channels of one normalisation group; widths must be multiples of it if the norm is "group". Groups are never split
between submodels, so a submodel normalises its channels exactly like the full network."""
HiddenWidths = MaybeCounts
"""Width inside the blocks for each section or each block; empty for the family's usual one."""
LastWidths = MaybeCounts
"""Widths of the layers between the last section and the head; empty for the family's usual ones."""
LayerWidths = MaybeCounts
"""Output channels of each layer, in network order, with the section's width for the last layer of a section; empty
gives every layer the width of its section. If given, layers share no channel axis: each is cut and widened by itself,
and a submodel can only omit a layer if its input and output are cut alike."""
Kernels = MaybeCounts
"""Odd side of the kernels of each section, which submodels may then cut as well; empty means 3."""
Strides = MaybeCounts
"""Stride of the first block of each section; empty means 1, and 2 after the first section."""
StemWidth = Count
"""Width of the first layer; 0 means that of the first section."""
Heads = Counts
"""Number of attention heads for each section or each block."""
HeadWidth = Count
"""Width of each head's queries, keys and values; 0 means width / heads."""
Vocabulary = Positive
"""Number of input symbols."""
EmbeddingWidth = Count
"""Width of the embedding of symbols; 0 means that of the first section."""


def built_by(function: str) -> Callable[[Any], "nn.Module"]:
    """The method `module` of a family: what a function makes of its settings.

    Args:
        function: as in an entry point, "package.file:function"; imported, and PyTorch with it, when it is needed.
    """
    path, _, name = function.partition(":")

    def module(settings: Any) -> "nn.Module":
        made: nn.Module = getattr(import_module(path), name)(settings)
        return made

    return module
