"""Transformers of image patches and of symbols: one residual stream through blocks of attention and feed-forward parts.

The stream is one axis of the whole network: embeddings, positions, norms and everything added to it keep the same
indices. In each block, attention is cut by heads, by head width, or by both, and the feed-forward part by its hidden
width. Queries, keys, values and the output layer keep the same heads and the same indices of a head.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.families.records.blocks import block_numbers, expand_to_blocks
from subfleet.elastic.families.records.transformers import Bert, BertClassifier, Decoder, Vit
from subfleet.elastic.families.sections import block_name, build_sections, class_axis, skippable
from subfleet.elastic.families.transformer_layers import (
    BlockSize,
    FirstToken,
    PatchTokens,
    SymbolTokens,
    TransformerBlock,
)
from subfleet.elastic.network import MatrixProduct, Role

_STREAM = "stream"
_HIDDEN_TIMES = 4
"""Default width of a feed-forward part as a multiple of the stream's (Vaswani et al. 2017, section 3.3)."""
_OfSymbols = Bert | BertClassifier | Decoder
_AnyTransformer = Vit | _OfSymbols


@dataclass(frozen=True, slots=True, kw_only=True)
class _TransformerStyle:
    """The differences between the families.

    Attributes:
        tokens: creates the module that converts inputs to tokens, from the width of the stream.
        embedded: names of its tensors with the first values of embeddings.
        token_count: tokens of one sample.
        causal: whether a token only attends to itself and previous tokens.
        fused: one layer for the queries, keys and values of a block instead of three.
        pooled: whether logits come from the first token (Devlin et al. 2019, section 3.2) instead of each token.
    """

    tokens: Callable[[int], nn.Module]
    embedded: tuple[str, ...]
    token_count: int
    causal: bool = False
    fused: bool = False
    pooled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockPlan:
    """A block of the full network.

    Attributes:
        section: as in `PlacedBlock`.
        number: as in `PlacedBlock`.
        position: as in `PlacedBlock`.
        heads: number of attention heads.
        head_width: width of each head's queries, keys and values.
        hidden_width: width inside the feed-forward part.
    """

    section: int
    number: int
    position: int
    heads: int
    head_width: int
    hidden_width: int

    @property
    def name(self) -> str:
        """As in `PlacedBlock`."""
        return block_name(self.section, self.number)


def vit(config: Vit) -> Blueprint:
    """ViT (Dosovitskiy et al. 2021, section 3.1), with one layer for the queries, keys and values of a block."""
    channels, height, width = config.input_shape
    patches = (height // config.patch) * (width // config.patch)
    style = _TransformerStyle(
        tokens=partial(PatchTokens, channels, patches, config.patch, scaler=config.scaler),
        embedded=("class_token", "positions"),
        token_count=patches + 1,
        fused=True,
        pooled=True,
    )
    return _blueprint(config, style, other_sizes=(patches,))


def bert(config: Bert) -> Blueprint:
    """A bidirectional transformer that predicts masked symbols, with logits of each token for indices (batch, tokens).

    Devlin et al. 2019, section 3.1, with blocks as in GPT-2.
    """
    return _of_symbols(config)


def bert_classifier(config: BertClassifier) -> Blueprint:
    """The same transformer with logits of the sequence."""
    return _of_symbols(config, pooled=True)


def decoder(config: Decoder) -> Blueprint:
    """A causal transformer with logits of each next symbol (GPT-2, Radford et al. 2019, section 2.3)."""
    return _of_symbols(config, causal=True)


def _of_symbols(config: _OfSymbols, *, causal: bool = False, pooled: bool = False) -> Blueprint:
    context = config.input_shape[0]
    style = _TransformerStyle(
        tokens=partial(SymbolTokens, config.vocabulary, context, scaler=config.scaler),
        embedded=("positions", "embedding.weight"),
        token_count=context,
        causal=causal,
        pooled=pooled,
    )
    return _blueprint(config, style, symbols=config.vocabulary)


def _blueprint(
    config: _AnyTransformer, style: _TransformerStyle, *, symbols: int = 0, other_sizes: tuple[int, ...] = ()
) -> Blueprint:
    plans = tuple(_plans(config))
    residual = [f"{plan.name}.{layer}.weight" for plan in plans for layer in ("attention.out", "feed_forward.down")]
    roles: dict[str, Role] = dict.fromkeys(residual, "residual")
    roles |= {f"tokens.{name}": "embedding" for name in style.embedded}
    return Blueprint(
        axes=(
            class_axis(config),
            Axis(name=_STREAM, size=config.widths[0], kind="embed"),
            *(axis for plan in plans for axis in _axes(plan)),
        ),
        blocks=skippable(plans),
        build=partial(_build, config, style, plans),
        roles=roles,
        products=tuple(product for plan in plans for product in _products(plan, style.token_count)),
        symbols=symbols,
        other_sizes=other_sizes,
    )


def _plans(config: _AnyTransformer) -> Iterator[_BlockPlan]:
    """All blocks of a network, in order."""
    width = config.widths[0]
    usual = (_HIDDEN_TIMES * width,) * len(config.widths)
    hidden_widths = iter(expand_to_blocks(config.hidden_widths or usual, config.depths))
    every = iter(expand_to_blocks(config.heads, config.depths))
    for section, numbers in enumerate(block_numbers(config)):
        for position, number in enumerate(numbers):
            heads = next(every)
            yield _BlockPlan(
                section=section,
                number=number,
                position=position,
                heads=heads,
                head_width=config.head_width or width // heads,
                hidden_width=next(hidden_widths),
            )


def _axes(plan: _BlockPlan) -> Iterator[Axis]:
    yield Axis(name=f"{plan.name}.heads", size=plan.heads, kind="head")
    yield Axis(name=f"{plan.name}.head_dim", size=plan.head_width, kind="head_dim")
    yield Axis(name=f"{plan.name}.hidden", size=plan.hidden_width, kind="ffn")


def _products(plan: _BlockPlan, tokens: int) -> Iterator[MatrixProduct]:
    """Yield the products of queries with keys, and of attention weights with values."""
    heads, head_dim, block = f"{plan.name}.heads", f"{plan.name}.head_dim", plan.name if plan.position else None
    yield MatrixProduct(result=(heads, tokens, tokens), summed=(head_dim,), part=block)
    yield MatrixProduct(result=(heads, tokens, head_dim), summed=(tokens,), part=block)


def _build(config: _AnyTransformer, style: _TransformerStyle, plans: tuple[_BlockPlan, ...], sizes: Sizes) -> nn.Module:
    width = sizes[_STREAM]

    def block(plan: _BlockPlan) -> TransformerBlock:
        size = BlockSize(
            width=width,
            heads=sizes[f"{plan.name}.heads"],
            head_width=sizes[f"{plan.name}.head_dim"],
            hidden_width=sizes[f"{plan.name}.hidden"],
            scaler=config.scaler,
            learnable_step=config.learnable_steps and plan.position > 0,
        )
        return TransformerBlock(size, causal=style.causal, fused=style.fused)

    modules = OrderedDict[str, nn.Module](tokens=style.tokens(width))
    modules.update(build_sections(plans, sizes, block))
    modules["norm"] = nn.LayerNorm(width)
    if style.pooled:
        modules["first"] = FirstToken()
    modules["head"] = nn.Linear(width, sizes["class"])
    return nn.Sequential(modules)
