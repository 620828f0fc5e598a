"""Settings of supernets: networks whose blocks have alternative operators (FedorAS, section 3.1).

A block with a single operator is no choice, so that the same settings with one operator for each block are a path of
the supernet, with the same names of tensors.
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
    from subfleet.elastic.families.blueprint import Blueprint

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
"""A kind of block, the side of its kernel, and by how much it widens inside: by half, not at all, or twice."""
SEQUENCE_OPERATORS = ("lstm", "gru", "quasi_rnn", "linear", "conv5", IDENTITY)
_CNN_L = tuple(name for name in CONVOLUTION_OPERATORS if name not in ("conv3", "dsconv1_double"))
Operators = tuple[tuple[str, ...], ...]


def _check_convolutions(record: "ChoiceCnn") -> Iterator[str]:
    yield from _check_operators(record.depths, record.operators, CONVOLUTION_OPERATORS)
    halved = {one for own in record.operators for one in own if one.endswith("_half")}
    inside = [*record.last_widths, *(width // 2 for width in record.widths if halved)]
    if halved and any(width % 2 for width in record.widths):
        yield f"widths are {record.widths}, but must be even, as {sorted(halved)[0]!r} has half of them"
    elif record.norm == "group" and any(width % record.group_size for width in inside):
        yield (
            f"last_widths {record.last_widths}, and half of the widths {record.widths}, which operators have inside, "
            f"must be multiples of group_size {record.group_size}"
        )


def _check_sequences(record: "ChoiceRnn") -> Iterator[str]:
    if problems := list(_check_operators(record.depths, record.operators, SEQUENCE_OPERATORS)):
        yield from problems
    else:
        _ = record.of_blocks  # which raises where a block has none that is left


def _check_operators(depths: Sequence[int], operators: Operators, known: Sequence[str]) -> Iterator[str]:
    blocks = sum(depths)
    if len(operators) not in (1, blocks):
        yield f"operators are given for {len(operators)} blocks, but must be for all {blocks} at once or for each"
    for own in operators:
        if not own or list(own) != _sort_operators(own, known):
            yield f"a block has operators {list(own)}, but must have some of {list(known)}, in this order and each once"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image, _check_convolutions)
class ChoiceCnn:
    """Sections of blocks with a choice of convolutions, each section closed by a reduction that halves the image.

    FedorAS's spaces CNN-L and CNN-S are presets of it. Widths are never cut: operators are all that submodels differ
    in.

    Attributes:
        input_shape: (channels, height, width); halved once for each section, with the reduction "convolution" from an
            even number each time.
        class_count: as in `Family`.
        widths: channels of each section.
        depths: blocks of each section.
        last_widths: channels that the last section's reduction gives, one number; the others give what the next
            section has.
        operators: that blocks have, one entry for all blocks, or one for each; of `CONVOLUTION_OPERATORS`.
        stem_stride: step of the first convolution, 1 or 2.
        reduction: "convolution" adds a depthwise separable convolution and one of 2x2, both of stride 2; "pool" is an
            average over 3x3 and a 1x1 convolution.
        group_size: channels of one normalisation group, of which widths and half of them are multiples where norm is
            "group".
        norm: "group"; "batch" with running statistics that travel with the weights; or "none".
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
        """See `OfOperators`."""
        return sum(len(own) > 1 for _, own in self.of_blocks)

    def with_operators(self, kept: Mapping[str, tuple[str, ...]]) -> "ChoiceCnn":
        """See `OfOperators`."""
        return replace(self, operators=tuple(kept.get(name, own) for name, own in self.of_blocks))

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.families.choice_cnn import choice_cnn

        return choice_cnn(self)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_symbols, _check_sequences)
class ChoiceRnn:
    """Blocks with a choice of recurrent and other sequence operators; gives logits of each next symbol.

    It stands in for FedorAS's space RNN, whose list of operators its text does not have: in place of branches side by
    side, blocks after the first add to what they read. Widths are never cut.

    Attributes:
        input_shape: (tokens,).
        class_count: how many symbols it tells apart, 2 or more.
        widths: of what the blocks of each section give.
        depths: blocks of each section; the first block of a section changes the width and cannot be the identity.
        vocabulary: how many symbols there are, 1 or more.
        embedding_width: of a symbol; 0 takes that of the first section.
        operators: as in `ChoiceCnn`, of `SEQUENCE_OPERATORS`. The identity is left out where a block changes the width.
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
        """Name and operators of each block; one that changes the width has no identity."""
        names, told = _block_names(self.depths), _expand_operators(self.operators, self.depths)
        before, found = self.embedding_width or self.widths[0], list[tuple[str, tuple[str, ...]]]()
        widths = [width for width, depth in zip(self.widths, self.depths, strict=True) for _ in range(depth)]
        for name, own, width in zip(names, told, widths, strict=True):
            kept = tuple(one for one in own if one != IDENTITY or width == before)
            if not kept:
                raise ConfigError(f"block {name!r} changes the width from {before} to {width}, but is the identity")
            found.append((name, kept))
            before = width
        return tuple(found)

    @property
    def open_choices(self) -> int:
        """See `OfOperators`."""
        return sum(len(own) > 1 for _, own in self.of_blocks)

    def with_operators(self, kept: Mapping[str, tuple[str, ...]]) -> "ChoiceRnn":
        """See `OfOperators`."""
        return replace(self, operators=tuple(kept.get(name, own) for name, own in self.of_blocks))

    def blueprint(self) -> "Blueprint":
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
