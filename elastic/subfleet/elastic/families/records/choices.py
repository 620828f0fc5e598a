"""Settings of supernets: networks whose blocks have alternative operators (FedorAS, section 3.1).

A block with a single operator is not a choice, so the same settings with one operator for each block are a path of the
supernet, with the same tensor names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from subfleet.elastic.families.records import fields
from subfleet.elastic.families.records.checks import check_image, check_settings, check_symbols
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import Length, checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.limits import Positive

IDENTITY = "identity"
CONVOLUTION_OPERATORS = (
    "conv1",
    "conv3",
    "dsconv1_double",
    "dsconv3_half",
    "dsconv3",
    "dsconv3_double",
    "mbconv1_double",
    "mbconv3_half",
    "mbconv3",
    "mbconv3_double",
    IDENTITY,
)
"""Kind of block, side of its kernel, and expansion inside: half, the same, or double."""
SEQUENCE_OPERATORS = ("lstm", "gru", "quasi_rnn", "linear", "conv5", IDENTITY)
_CNN_L = tuple(name for name in CONVOLUTION_OPERATORS if name not in ("conv3", "dsconv1_double"))
Operators = tuple[tuple[str, ...], ...]
"""Operators to choose from, in the order of the two lists above: one entry for all blocks, or one for each."""


def _check_convolutions(record: "ChoiceCnn") -> Iterator[str]:
    yield from _check_operators(record.depths, record.operators, CONVOLUTION_OPERATORS)
    halved = {operator for own in record.operators for operator in own if operator.endswith("_half")}
    inside = [*record.last_widths, *(width // 2 for width in record.widths if halved)]
    if halved and any(width % 2 for width in record.widths):
        yield f"widths are {record.widths}, but must be even, because {sorted(halved)[0]!r} halves them"
    elif record.norm == "group" and any(width % record.group_size for width in inside):
        yield (
            f"last_widths {record.last_widths}, and half of the widths {record.widths}, which is the width inside "
            f"operators, must be multiples of group_size {record.group_size}"
        )


def _check_sequences(record: "ChoiceRnn") -> Iterator[str]:
    if problems := list(_check_operators(record.depths, record.operators, SEQUENCE_OPERATORS)):
        yield from problems
    else:
        _ = record.of_blocks  # raises if a block has no operator left


def _check_operators(depths: Sequence[int], operators: Operators, known: Sequence[str]) -> Iterator[str]:
    blocks = sum(depths)
    if len(operators) not in (1, blocks):
        yield f"operators are given for {len(operators)} blocks, but must be given once or for each of {blocks} blocks"
    for own in operators:
        if not own or list(own) != [name for name in known if name in own]:
            yield f"a block has operators {list(own)}, but must have a selection of {list(known)} in this order"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image, _check_convolutions)
class ChoiceCnn:
    """Sections of blocks with a choice of convolutions; a reduction after each section halves the image.

    FedorAS's spaces CNN-L and CNN-S are presets. Widths are never cut: submodels only differ in operators. The
    reduction "convolution" sums a depthwise separable and a 2x2 convolution, both of stride 2, so the sides of images
    must be even each time; "pool" is a 3x3 average and a 1x1 convolution. The last section's reduction has the only
    number of `last_widths` as its output channels, the others have those of the next section. Half widths must be
    multiples of the group size, too.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "choice_cnn"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    last_widths: Annotated[fields.MaybeCounts, Length(least=1, most=1)]
    operators: Operators = (_CNN_L,)
    stem_stride: Positive = 1
    reduction: Literal["convolution", "pool"] = "convolution"
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    module = fields.built_by("subfleet.elastic.families.choice_cnn:choice_cnn")

    @property
    def of_blocks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Name and operators of each block."""
        return tuple(zip(_block_names(self.depths), _expand_operators(self.operators, self.depths), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_sequences)
class ChoiceRnn:
    """Blocks with a choice of recurrent and other sequence operators, with logits of each next symbol.

    It replaces FedorAS's space RNN, because the paper does not list its operators: instead of parallel branches, blocks
    after the first are residual. Widths are never cut. Blocks that change the width omit the identity, and cannot have
    it as their only operator.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "choice_rnn"
    PREDICTS: ClassVar[Places] = "token"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    vocabulary: fields.Vocabulary
    embedding_width: fields.EmbeddingWidth = 0
    operators: Operators = (SEQUENCE_OPERATORS,)
    norm: Literal["none"] = "none"
    module = fields.built_by("subfleet.elastic.families.choice_rnn:choice_rnn")

    @property
    def of_blocks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Name and operators of each block; blocks that change the width have no identity."""
        names, operators = _block_names(self.depths), _expand_operators(self.operators, self.depths)
        before, blocks = self.embedding_width or self.widths[0], list[tuple[str, tuple[str, ...]]]()
        widths = [width for width, depth in zip(self.widths, self.depths, strict=True) for _ in range(depth)]
        for name, own, width in zip(names, operators, widths, strict=True):
            available = tuple(operator for operator in own if operator != IDENTITY or width == before)
            if not available:
                raise ConfigError(f"block {name!r} changes the width from {before} to {width}, but is the identity")
            blocks.append((name, available))
            before = width
        return tuple(blocks)


def _block_names(depths: Sequence[int]) -> list[str]:
    return [f"section{section}.block{number}" for section, depth in enumerate(depths) for number in range(depth)]


def _expand_operators(operators: Operators, depths: Sequence[int]) -> Operators:
    return operators * sum(depths) if len(operators) == 1 else operators
