"""Transformers that normalise first: of image patches, and of characters."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from subfleet.elastic.families.layers import Scale

__all__ = [
    "BlockSize",
    "Sections",
    "TransformerBlock",
    "transformer_classifier",
    "transformer_lm",
    "vision_transformer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """Sizes of one transformer block.

    Attributes:
        width: of the residual stream.
        heads: of the attention, 1 or more.
        head_width: of each head's queries, keys and values.
        hidden_width: inside the feed-forward part.
        stream_rate: share of the full network's stream that this one is; see `Scale`.
        attention_rate: share of the full network's heads times head width.
        hidden_rate: share of the full network's hidden width.
        learnable_step: whether a learnable step multiplies what is added to the stream (NeFL, section 3.1).
    """

    width: int
    heads: int
    head_width: int
    hidden_width: int
    stream_rate: float = 1.0
    attention_rate: float = 1.0
    hidden_rate: float = 1.0
    learnable_step: bool = False


Sections = Mapping[str, Mapping[str, BlockSize]]
"""Sizes of blocks by name, by the name of the section that they are in; all of one stream."""


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2). The width inside is heads times head width.

    Args:
        size: of the block.
        causal: whether a token sees none of those after it.
        fused: one layer for queries, keys and values instead of three.
    """

    def __init__(self, size: BlockSize, *, causal: bool, fused: bool) -> None:
        super().__init__()
        self.heads = size.heads
        self.causal = causal
        self.fused = fused
        inner = size.heads * size.head_width
        if fused:
            self.qkv = nn.Linear(size.width, 3 * inner)
        else:
            self.query = nn.Linear(size.width, inner)
            self.key = nn.Linear(size.width, inner)
            self.value = nn.Linear(size.width, inner)
        self.scaler = Scale(size.attention_rate)
        self.out = nn.Linear(inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, _ = x.shape
        # The scores are divided by the root of the head width that this subnet has.
        mixed = scaled_dot_product_attention(*self._projected(x), is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return result

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, heads, tokens, head width)."""
        batch, tokens, _ = x.shape
        if self.fused:
            together = self.scaler(self.qkv(x)).view(batch, tokens, 3, self.heads, -1)
            query, key, value = together.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query, key, value = (
                self.scaler(layer(x)).view(batch, tokens, self.heads, -1).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
        return query, key, value


class TransformerBlock(nn.Module):
    """Attention and a feed-forward part with GELU, each after LayerNorm and added to the stream.

    Args:
        size: of the block.
        causal: whether a token sees none of those after it.
        fused: one layer for queries, keys and values instead of three.
    """

    def __init__(self, size: BlockSize, *, causal: bool, fused: bool = False) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(1)) if size.learnable_step else None
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, causal=causal, fused=fused)
        self.norm2 = nn.LayerNorm(size.width)
        self.feed_forward = nn.Sequential(
            OrderedDict(
                up=nn.Linear(size.width, size.hidden_width),
                scaler=Scale(size.hidden_rate),
                activation=nn.GELU(),
                down=nn.Linear(size.hidden_width, size.width),
            )
        )
        self.scaler = Scale(size.stream_rate)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        x = x + self._stepped(self.attention(self.norm1(x)))
        return x + self._stepped(self.feed_forward(self.norm2(x)))

    def _stepped(self, added: Tensor) -> Tensor:
        scaled: Tensor = self.scaler(added)
        return scaled if self.step is None else self.step * scaled


class PatchTokens(nn.Module):
    """An image as tokens: a linear map of each of its patches, after a learned class token, with learned positions."""

    def __init__(self, channels: int, places: int, patch: int, size: BlockSize) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, size.width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, places + 1, size.width), std=0.02))
        self.scaler = Scale(size.stream_rate)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, places + 1, width)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens: Tensor = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], dim=1) + self.positions
        scaled: Tensor = self.scaler(tokens)
        return scaled


class SymbolTokens(nn.Module):
    """Embedded symbols with learned positions."""

    def __init__(self, vocabulary: int, context: int, size: BlockSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, context, size.width), std=0.02))
        self.scaler = Scale(size.stream_rate)

    def forward(self, symbols: Tensor) -> Tensor:
        """(batch, tokens) of indices to (batch, tokens, width)."""
        tokens: Tensor = self.embedding(symbols) + self.positions[:, : symbols.shape[1]]
        scaled: Tensor = self.scaler(tokens)
        return scaled


class FirstToken(nn.Module):
    """The first token, which stands for all."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, width)."""
        return x[:, 0]


def vision_transformer(
    *,
    input_shape: tuple[int, int, int],
    patch: int,
    sections: Sections,
    class_count: int,
) -> nn.Module:
    """ViT (Dosovitskiy et al. 2021, section 3.1), with one layer for the queries, keys and values of a block.

    Args:
        input_shape: channels, height and width of an image; height and width are multiples of the patch.
        patch: side of a patch.
        sections: sizes of the blocks.
        class_count: logits of an image.
    """
    channels, height, width = input_shape
    size = _first(sections)
    tokens = PatchTokens(channels, (height // patch) * (width // patch), patch, size)
    layers = OrderedDict[str, nn.Module](tokens=tokens)
    layers.update(_blocks(sections, causal=False, fused=True))
    layers["norm"] = nn.LayerNorm(size.width)
    layers["first"] = FirstToken()
    layers["head"] = nn.Linear(size.width, class_count)
    return nn.Sequential(layers)


def transformer_lm(
    *,
    vocabulary: int,
    context: int,
    sections: Sections,
    class_count: int,
    causal: bool,
) -> nn.Module:
    """A language model: (batch, tokens) of indices to logits of each token, (batch, tokens, classes).

    Blocks as in GPT-2 (Radford et al. 2019, section 2.3). A causal one predicts each next symbol, another one, which
    sees all tokens, the symbols that its input hides (Devlin et al. 2019, section 3.1).

    Args:
        vocabulary: symbols.
        context: the most tokens of a sequence.
        sections: sizes of the blocks.
        class_count: logits of a token.
        causal: whether a token sees none of those after it.
    """
    return nn.Sequential(_token_layers(vocabulary, context, sections, class_count, causal=causal))


def transformer_classifier(
    *,
    vocabulary: int,
    context: int,
    sections: Sections,
    class_count: int,
) -> nn.Module:
    """A bidirectional encoder: (batch, tokens) of indices to the logits of a sequence, (batch, classes).

    They are told from the first token (Devlin et al. 2019, section 3.2), which sees all others.

    Args:
        vocabulary: symbols.
        context: the most tokens of a sequence.
        sections: sizes of the blocks.
        class_count: logits of a sequence.
    """
    layers = _token_layers(vocabulary, context, sections, class_count, causal=False)
    head = layers.pop("head")
    return nn.Sequential(OrderedDict([*layers.items(), ("first", FirstToken()), ("head", head)]))


def _token_layers(
    vocabulary: int, context: int, sections: Sections, class_count: int, *, causal: bool
) -> OrderedDict[str, nn.Module]:
    size = _first(sections)
    layers = OrderedDict[str, nn.Module](tokens=SymbolTokens(vocabulary, context, size))
    layers.update(_blocks(sections, causal=causal))
    layers["norm"] = nn.LayerNorm(size.width)
    layers["head"] = nn.Linear(size.width, class_count)
    return layers


def _blocks(sections: Sections, *, causal: bool, fused: bool = False) -> Iterator[tuple[str, nn.Module]]:
    for section, sizes in sections.items():
        blocks = {name: TransformerBlock(size, causal=causal, fused=fused) for name, size in sizes.items()}
        yield section, nn.Sequential(OrderedDict(blocks))


def _first(sections: Sections) -> BlockSize:
    return next(size for blocks in sections.values() for size in blocks.values())
