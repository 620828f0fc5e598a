"""Transformers of image patches and of symbols: one residual stream through blocks of attention and feed-forward parts.

The stream is one axis of the whole network: embeddings, positions, norms and everything added to it keep the same
indices. In each block, attention is cut by heads, by head width, or by both, and the feed-forward part by its hidden
width. Queries, keys, values and the output layer keep the same heads and the same indices of a head.
"""

from collections import OrderedDict

from torch import nn

from subfleet.elastic.families.records.transformers import Bert, BertClassifier, Decoder, Vit
from subfleet.elastic.families.sections import BlockPlan, SectionedNetwork, build_sections, plan_blocks
from subfleet.elastic.families.transformer_layers import (
    BlockForm,
    FirstToken,
    PatchTokens,
    SymbolTokens,
    TransformerBlock,
)
from subfleet.elastic.recording.markers import Markers

_HIDDEN_TIMES = 4
"""Default width of a feed-forward part as a multiple of the stream's (Vaswani et al. 2017, section 3.3)."""
_OfSymbols = Bert | BertClassifier | Decoder


def vit(config: Vit) -> nn.Module:
    """The network of `Vit`, with one layer for the queries, keys and values of a block."""
    channels, height, width = config.input_shape
    patches = (height // config.patch) * (width // config.patch)
    tokens = PatchTokens(channels, patches, config.patch, config.widths[0], scaler=config.scaler)
    return _build(config, tokens, ("class_token", "positions"), fused=True, pooled=True)


def bert(config: Bert) -> nn.Module:
    """The network of `Bert`, for indices (batch, tokens) as all of symbols, with blocks as in GPT-2."""
    return _build_of_symbols(config)


def bert_classifier(config: BertClassifier) -> nn.Module:
    """The network of `BertClassifier`."""
    return _build_of_symbols(config, pooled=True)


def decoder(config: Decoder) -> nn.Module:
    """The network of `Decoder`."""
    return _build_of_symbols(config, causal=True)


def _build_of_symbols(config: _OfSymbols, *, causal: bool = False, pooled: bool = False) -> nn.Module:
    tokens = SymbolTokens(config.vocabulary, config.input_shape[0], config.widths[0], scaler=config.scaler)
    return _build(config, tokens, ("positions", "embedding.weight"), causal=causal, pooled=pooled)


def _build(
    config: Vit | _OfSymbols,
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
    width, plans = config.widths[0], plan_blocks(config, keeping="all")

    def make(plan: BlockPlan) -> nn.Module:
        return TransformerBlock(
            BlockForm(
                width=width,
                heads=plan.heads,
                head_width=config.head_width or width // plan.heads,
                hidden_width=plan.hidden or _HIDDEN_TIMES * width,
                scaler=config.scaler,
                learnable_step=config.learnable_steps and plan.position > 0,
                causal=causal,
                fused=fused,
            )
        )

    modules = OrderedDict[str, nn.Module](tokens=tokens, **build_sections(plans, make), norm=nn.LayerNorm(width))
    if pooled:
        modules["first"] = FirstToken()
    modules["head"] = nn.Linear(width, config.class_count)
    before = Markers(
        axes={("head.weight", 0): ("class",), ("norm.weight", 0): ("stream",)},
        kinds={"stream": "embed"},
        roles=dict.fromkeys((f"tokens.{name}" for name in embedded), "embedding"),
    )
    return SectionedNetwork(modules, plans, channel=2, before=before)
