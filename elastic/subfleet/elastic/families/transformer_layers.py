"""Layers and blocks of pre-norm transformers of image patches and of symbols."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from subfleet.elastic.families.layers import STEP, Scale
from subfleet.elastic.recording.markers import Markers


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """The form of a transformer block.

    Attributes:
        width: width of the residual stream.
        heads: number of attention heads, at least 1.
        head_width: width of each head's queries, keys and values.
        hidden_width: width inside the feed-forward part.
        scaler: whether outputs are divided by the kept fraction of their width; see `Scale`.
        learnable_step: whether a learnable step multiplies the terms added to the stream (NeFL, section 3.1).
        causal: whether a token only attends to itself and previous tokens.
        fused: one layer for queries, keys and values instead of three.
    """

    width: int
    heads: int
    head_width: int
    hidden_width: int
    scaler: bool = False
    learnable_step: bool = False
    causal: bool = False
    fused: bool = False


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2). The width inside is heads times head width."""

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        self.heads = form.heads
        self.causal = form.causal
        self.fused = form.fused
        inner = form.heads * form.head_width
        if form.fused:
            self.qkv = nn.Linear(form.width, 3 * inner)
        else:
            self.query = nn.Linear(form.width, inner)
            self.key = nn.Linear(form.width, inner)
            self.value = nn.Linear(form.width, inner)
        self.scaler = _make_scale(scaler=form.scaler)
        self.out = nn.Linear(inner, form.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, _ = x.shape
        # The scores are divided by the root of this submodel's head width.
        mixed = scaled_dot_product_attention(*self._project(x), is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return result

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    """Attention and a feed-forward part with GELU, each after LayerNorm and added to the stream."""

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(1)) if form.learnable_step else None
        self.norm1 = nn.LayerNorm(form.width)
        self.attention = Attention(form)
        self.norm2 = nn.LayerNorm(form.width)
        self.feed_forward = nn.Sequential(
            OrderedDict(
                up=nn.Linear(form.width, form.hidden_width),
                scaler=_make_scale(scaler=form.scaler),
                activation=nn.GELU(),
                down=nn.Linear(form.hidden_width, form.width),
            )
        )
        self.scaler = _make_scale(scaler=form.scaler)
        projections = ("qkv",) if form.fused else ("query", "key", "value")
        self.markers = Markers(
            axes={
                **{(f"attention.{layer}.weight", 0): ("heads", "head_dim") for layer in projections},
                ("feed_forward.up.weight", 0): ("hidden",),
            },
            kinds={"heads": "head", "head_dim": "head_dim", "hidden": "ffn"},
            roles={
                "attention.out.weight": "residual",
                "feed_forward.down.weight": "residual",
                **(STEP if form.learnable_step else {}),
            },
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        x = x + self._scale_added(self.attention(self.norm1(x)))
        return x + self._scale_added(self.feed_forward(self.norm2(x)))

    def _scale_added(self, added: Tensor) -> Tensor:
        scaled: Tensor = self.scaler(added)
        return scaled if self.step is None else self.step * scaled


class PatchTokens(nn.Module):
    """Converts an image to tokens: a learned class token and a linear map of each patch, with learned positions."""

    def __init__(self, channels: int, patch_count: int, patch: int, width: int, *, scaler: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, patch_count + 1, width), std=0.02))
        self.scaler = _make_scale(scaler=scaler)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, patches + 1, width)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens: Tensor = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], dim=1) + self.positions
        scaled: Tensor = self.scaler(tokens)
        return scaled


class SymbolTokens(nn.Module):
    """Embeds symbols, with learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int, *, scaler: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, context, width), std=0.02))
        self.scaler = _make_scale(scaler=scaler)

    def forward(self, symbols: Tensor) -> Tensor:
        """(batch, tokens) of indices to (batch, tokens, width)."""
        tokens: Tensor = self.embedding(symbols) + self.positions[:, : symbols.shape[1]]
        scaled: Tensor = self.scaler(tokens)
        return scaled


class FirstToken(nn.Module):
    """Selects the first token, which represents the whole input."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, width)."""
        return x[:, 0]


def _make_scale(*, scaler: bool) -> nn.Module:
    return Scale(dim=-1) if scaler else nn.Identity()
