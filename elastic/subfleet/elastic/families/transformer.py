"""Transformers of image patches and of symbols: one residual stream through blocks of attention and feed-forward parts.

The stream is one axis of the whole network: embeddings, positions, norms and everything added to it keep the same
indices. In each block, attention is cut by heads, by head width, or by both, and the feed-forward part by its hidden
width. Queries, keys, values and the output layer keep the same heads and the same indices of a head.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from subfleet.elastic.axes import AxisKind
from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.families.records.transformers import Bert, BertClassifier, Decoder, Vit
from subfleet.elastic.families.sections import MarkedSequence, block_name, build_sections, list_sections
from subfleet.elastic.families.transformer_layers import (
    BlockSize,
    FirstToken,
    PatchTokens,
    SymbolTokens,
    TransformerBlock,
)
from subfleet.elastic.recording.markers import Markers, Place

_STREAM = "stream"
_HIDDEN_TIMES = 4
"""Default width of a feed-forward part as a multiple of the stream's (Vaswani et al. 2017, section 3.3)."""
_OfSymbols = Bert | BertClassifier | Decoder
_AnyTransformer = Vit | _OfSymbols


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockPlan:
    """A block.

    Attributes:
        section: as in `PlacedBlock`.
        position: as in `PlacedBlock`.
        size: its sizes.
    """

    section: int
    position: int
    size: BlockSize

    @property
    def name(self) -> str:
        """As in `PlacedBlock`."""
        return block_name(self.section, self.position)


def vit(config: Vit) -> nn.Module:
    """ViT (Dosovitskiy et al. 2021, section 3.1), with one layer for the queries, keys and values of a block."""
    channels, height, width = config.input_shape
    patches = (height // config.patch) * (width // config.patch)
    tokens = PatchTokens(channels, patches, config.patch, config.widths[0], scaler=config.scaler)
    return _build(config, tokens, ("class_token", "positions"), fused=True, pooled=True)


def bert(config: Bert) -> nn.Module:
    """A bidirectional transformer that predicts masked symbols, with logits of each token for indices (batch, tokens).

    Devlin et al. 2019, section 3.1, with blocks as in GPT-2.
    """
    return _build_of_symbols(config)


def bert_classifier(config: BertClassifier) -> nn.Module:
    """The same transformer with logits of the sequence."""
    return _build_of_symbols(config, pooled=True)


def decoder(config: Decoder) -> nn.Module:
    """A causal transformer with logits of each next symbol (GPT-2, Radford et al. 2019, section 2.3)."""
    return _build_of_symbols(config, causal=True)


def _build_of_symbols(config: _OfSymbols, *, causal: bool = False, pooled: bool = False) -> nn.Module:
    tokens = SymbolTokens(config.vocabulary, config.input_shape[0], config.widths[0], scaler=config.scaler)
    return _build(config, tokens, ("positions", "embedding.weight"), causal=causal, pooled=pooled)


def _build(
    config: _AnyTransformer,
    tokens: nn.Module,
    embedded: tuple[str, ...],
    *,
    causal: bool = False,
    fused: bool = False,
    pooled: bool = False,
) -> nn.Module:
    """Build a transformer.

    Args:
        config: the settings.
        tokens: converts inputs to tokens.
        embedded: names of its tensors with the first values of embeddings.
        causal: whether a token only attends to itself and previous tokens.
        fused: one layer for the queries, keys and values of a block instead of three.
        pooled: whether logits come from the first token (Devlin et al. 2019, section 3.2) instead of each token.
    """
    plans, width = tuple(_plan_blocks(config)), config.widths[0]

    def block(plan: _BlockPlan) -> TransformerBlock:
        return TransformerBlock(plan.size, causal=causal, fused=fused)

    modules = OrderedDict[str, nn.Module](tokens=tokens)
    modules.update(build_sections(plans, block))
    modules["norm"] = nn.LayerNorm(width)
    if pooled:
        modules["first"] = FirstToken()
    modules["head"] = nn.Linear(width, config.class_count)
    residual = [f"{plan.name}.{layer}.weight" for plan in plans for layer in ("attention.out", "feed_forward.down")]
    kinds: dict[str, AxisKind] = {f"{plan.name}.{own}": kind for plan in plans for own, kind in _KINDS.items()}
    markers = Markers(
        axes={
            ("head.weight", 0): ("class",),
            ("norm.weight", 0): (_STREAM,),
            **{place: names for plan in plans for place, names in _list_axes(plan.name, fused=fused)},
        },
        kinds={**kinds, _STREAM: "embed"},
        sections=list_sections(plans),
        kept=frozenset(plan.name for plan in plans if not plan.position),
        roles={
            **dict.fromkeys(residual, "residual"),
            **dict.fromkeys((f"tokens.{name}" for name in embedded), "embedding"),
            **dict.fromkeys((f"{plan.name}.step" for plan in plans if plan.size.learnable_step), "step"),
        },
        drawn=True,
    )
    return MarkedSequence(modules, markers)


_KINDS: Mapping[str, AxisKind] = MappingProxyType({"heads": "head", "head_dim": "head_dim", "hidden": "ffn"})


def _list_axes(block: str, *, fused: bool) -> Iterator[tuple[Place, tuple[str, ...]]]:
    for layer in ("qkv",) if fused else ("query", "key", "value"):
        yield (f"{block}.attention.{layer}.weight", 0), (f"{block}.heads", f"{block}.head_dim")
    yield (f"{block}.feed_forward.up.weight", 0), (f"{block}.hidden",)


def _plan_blocks(config: _AnyTransformer) -> Iterator[_BlockPlan]:
    """All blocks of a network, in order."""
    width = config.widths[0]
    usual = (_HIDDEN_TIMES * width,) * len(config.widths)
    hidden_widths = iter(expand_to_blocks(config.hidden_widths or usual, config.depths))
    every = iter(expand_to_blocks(config.heads, config.depths))
    for section, depth in enumerate(config.depths):
        for position in range(depth):
            heads = next(every)
            size = BlockSize(
                width=width,
                heads=heads,
                head_width=config.head_width or width // heads,
                hidden_width=next(hidden_widths),
                scaler=config.scaler,
                learnable_step=config.learnable_steps and position > 0,
            )
            yield _BlockPlan(section=section, position=position, size=size)
