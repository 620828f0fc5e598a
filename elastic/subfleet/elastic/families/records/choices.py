"""Settings of supernets: networks whose blocks have alternative operators (FedorAS, section 3.1).

A block with a single operator is not a choice, so the same settings with one operator for each block are a path of the
supernet, with the same tensor names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from subfleet.elastic.families.records.checks import Counts, MaybeCounts, check_image, check_settings, check_symbols
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import Length, checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.limits import Count, Positive

if TYPE_CHECKING:
    from torch import nn

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
        if not own or list(own) != _sort_operators(own, known):
            yield f"a block has operators {list(own)}, but must have a selection of {list(known)} in this order"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image, _check_convolutions)
class ChoiceCnn:
    """Sections of blocks with a choice of convolutions; a reduction after each section halves the image.

    FedorAS's spaces CNN-L and CNN-S are presets. Widths are never cut: submodels only differ in operators.

    Attributes:
        input_shape: (channels, height, width); halved once for each section. With the reduction "convolution" the sides
            must be even each time.
        class_count: as in `Family`.
        widths: channels of each section.
        depths: blocks of each section.
        last_widths: output channels of the last section's reduction, one number; the others have those of the next
            section.
        operators: operators from `CONVOLUTION_OPERATORS`, one entry for all blocks, or one for each.
        stem_stride: stride of the first convolution, 1 or 2.
        reduction: "convolution" sums a depthwise separable and a 2x2 convolution, both of stride 2; "pool" is a 3x3
            average and a 1x1 convolution.
        group_size: channels of one normalisation group; widths and half widths must be multiples of it if norm is
            "group".
        norm: "group"; "batch" with running statistics that are sent with the weights; or "none".
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "choice_cnn"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    last_widths: Annotated[MaybeCounts, Length(least=1, most=1)]
    operators: Operators = (_CNN_L,)
    stem_stride: Positive = 1
    reduction: Literal["convolution", "pool"] = "convolution"
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"

    @property
    def of_blocks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Name and operators of each block."""
        return tuple(zip(_block_names(self.depths), _expand_operators(self.operators, self.depths), strict=True))

    @property
    def open_choices(self) -> int:
        """See `Supernet`."""
        return sum(len(own) > 1 for _, own in self.of_blocks)

    def with_operators(self, kept: Mapping[str, tuple[str, ...]]) -> "ChoiceCnn":
        """See `Supernet`."""
        return replace(self, operators=tuple(kept.get(name, own) for name, own in self.of_blocks))

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.choice_cnn import choice_cnn

        return choice_cnn(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_sequences)
class ChoiceRnn:
    """Blocks with a choice of recurrent and other sequence operators, with logits of each next symbol.

    It replaces FedorAS's space RNN, because the paper does not list its operators: instead of parallel branches, blocks
    after the first are residual. Widths are never cut.

    Attributes:
        input_shape: (tokens,).
        class_count: number of predicted symbols, at least 2.
        widths: output width of the blocks of each section.
        depths: blocks of each section; a first block that changes the width cannot be the identity.
        vocabulary: number of input symbols, at least 1.
        embedding_width: width of the embedding; 0 means that of the first section.
        operators: as in `ChoiceCnn`, from `SEQUENCE_OPERATORS`. Blocks that change the width omit the identity.
        norm: "none".
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "choice_rnn"
    PREDICTS: ClassVar[Places] = "token"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    vocabulary: Positive
    embedding_width: Count = 0
    operators: Operators = (SEQUENCE_OPERATORS,)
    norm: Literal["none"] = "none"

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

    @property
    def open_choices(self) -> int:
        """See `Supernet`."""
        return sum(len(own) > 1 for _, own in self.of_blocks)

    def with_operators(self, kept: Mapping[str, tuple[str, ...]]) -> "ChoiceRnn":
        """See `Supernet`."""
        return replace(self, operators=tuple(kept.get(name, own) for name, own in self.of_blocks))

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.choice_rnn import choice_rnn

        return choice_rnn(self)


def _block_names(depths: Sequence[int]) -> list[str]:
    return [f"section{section}.block{number}" for section, depth in enumerate(depths) for number in range(depth)]


def _expand_operators(operators: Operators, depths: Sequence[int]) -> Operators:
    return operators * sum(depths) if len(operators) == 1 else operators


def _sort_operators(own: Iterable[str], known: Sequence[str]) -> list[str]:
    kept = set(own)
    return [name for name in known if name in kept]
