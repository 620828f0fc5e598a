"""Transformers that normalise first: of image patches, and of characters."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["SMALL_LM", "VIT_TINY", "BlockSize", "TransformerBlock", "transformer_lm", "vision_transformer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """Sizes of one transformer block.

    Attributes:
        width: of the residual stream.
        heads: of the attention, 1 or more.
        head_width: of each head's queries, keys and values.
        hidden_width: inside the feed-forward part.
    """

    width: int
    heads: int
    head_width: int
    hidden_width: int


VIT_TINY = BlockSize(width=192, heads=3, head_width=64, hidden_width=768)
"""DeiT-Ti (Touvron et al. 2021, table 1), which names ViT's smallest."""

SMALL_LM = BlockSize(width=256, heads=8, head_width=32, hidden_width=512)
"""As wide as HeteroFL's transformer (Diao et al. 2021, section 4)."""


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2). The width inside is heads times head width."""

    def __init__(self, size: BlockSize, *, causal: bool) -> None:
        super().__init__()
        self.heads = size.heads
        self.causal = causal
        inner = size.heads * size.head_width
        self.query = nn.Linear(size.width, inner)
        self.key = nn.Linear(size.width, inner)
        self.value = nn.Linear(size.width, inner)
        self.out = nn.Linear(inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, _ = x.shape
        query, key, value = (
            layer(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return result


class TransformerBlock(nn.Module):
    """Attention and a feed-forward part with GELU, each after LayerNorm and added to the stream."""

    def __init__(self, size: BlockSize, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, causal=causal)
        self.norm2 = nn.LayerNorm(size.width)
        up, down = nn.Linear(size.width, size.hidden_width), nn.Linear(size.hidden_width, size.width)
        self.feed_forward = nn.Sequential(OrderedDict(up=up, activation=nn.GELU(), down=down))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.feed_forward(self.norm2(x))
        return y


class _VisionTransformer(nn.Module):
    def __init__(self, channels: int, places: int, patch: int, size: BlockSize, depth: int, class_count: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, size.width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, places + 1, size.width), std=0.02))
        self.blocks = nn.Sequential(*(TransformerBlock(size, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, class_count)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        stream = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(stream))[:, 0])
        return logits


class _LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, context: int, size: BlockSize, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, context, size.width), std=0.02))
        self.blocks = nn.Sequential(*(TransformerBlock(size, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


def vision_transformer(
    *,
    input_shape: tuple[int, int, int] = (3, 32, 32),
    patch: int = 4,
    size: BlockSize = VIT_TINY,
    depth: int = 12,
    class_count: int = 10,
) -> nn.Module:
    """ViT (Dosovitskiy et al. 2021, section 3.1) of DeiT's tiny size; 4x4 patches, as usual for 32x32 images.

    Args:
        input_shape: channels, height and width of an image; height and width are multiples of the patch.
        patch: side of a patch.
        size: of each block.
        depth: blocks.
        class_count: logits of an image.
    """
    channels, height, width = input_shape
    places = (height // patch) * (width // patch)
    return _VisionTransformer(channels, places, patch, size, depth, class_count)


def transformer_lm(
    *,
    vocabulary: int = 80,
    context: int = 80,
    size: BlockSize = SMALL_LM,
    depth: int = 2,
) -> nn.Module:
    """A causal language model: (batch, tokens) of indices to logits of each next token, (batch, tokens, vocabulary).

    Blocks as in GPT-2 (Radford et al. 2019, section 2.3).

    Args:
        vocabulary: symbols; LEAF's Shakespeare has 80.
        context: the most tokens of a sequence.
        size: of each block.
        depth: blocks.
    """
    return _LanguageModel(vocabulary, context, size, depth)
