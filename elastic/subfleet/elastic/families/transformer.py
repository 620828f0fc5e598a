"""Transformers of image patches and of symbols: one residual stream through blocks of attention and feed-forward parts.

The stream is one axis of the whole network: embeddings, positions, norms and whatever is added to it keep the same
indices. In each block, attention is cut by whole heads, by the width of every head, or by both, and the feed-forward
part by its hidden width. Queries, keys, values and what reads them keep the same heads and the same places of a head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from subfleet.elastic.axes import Axis, Dim, Product
from subfleet.elastic.families.blueprint import check_used
from subfleet.elastic.families.declaring import Declarer
from subfleet.elastic.families.transformer_layers import (
    BlockSize,
    Sections,
    transformer_classifier,
    transformer_lm,
    vision_transformer,
)
from subfleet.elastic.network import Block, LocalShapes, MatrixProduct, ModelConfig, Network, Role, TensorDecl
from subfleet.protocol.errors import ConfigError

__all__ = [
    "build_bert",
    "build_bert_classifier",
    "build_decoder",
    "build_vit",
    "declare_classifier",
    "declare_language_model",
    "declare_vit",
]

_STREAM = "stream"
_HIDDEN_TIMES = 4
"""How much wider than the stream a feed-forward part usually is (Vaswani et al. 2017, section 3.3)."""
_USED = frozenset({"hidden_widths", "heads", "head_width", "learnable_steps"})
_Sizes = Mapping[str, int]


def declare_vit(config: ModelConfig) -> Network:
    """Declare a vision transformer, with one layer for the queries, keys and values of a block.

    Raises:
        ConfigError: the input is no image of whole patches, or a setting does not fit.
    """
    check_used(config, {*_USED, "patch"}, {"layer"})
    if len(config.input_shape) != 3 or not config.patch or any(side % config.patch for side in config.input_shape[1:]):
        raise ConfigError(
            f"input_shape is {config.input_shape} and patch is {config.patch}, but family {config.family!r} needs "
            "(channels, height, width) and a patch that divides height and width"
        )
    channels, height, width = config.input_shape
    places = (height // config.patch) * (width // config.patch)
    sizes = _axis_sizes(config)
    declare = Declarer(sizes)
    tokens = [
        declare.tensor("tokens.class_token", (1, 1, _STREAM), "embedding"),
        declare.tensor("tokens.positions", (1, places + 1, _STREAM), "embedding"),
        *declare.layer("tokens.patches", (_STREAM, channels, config.patch, config.patch), positions=places),
    ]
    return _declare(config, sizes, tokens, token_count=places + 1, head_positions=1, fused=True)


def declare_language_model(config: ModelConfig) -> Network:
    """Declare a transformer that gives logits of each token of (tokens,) symbols.

    Raises:
        ConfigError: the input is no sequence of symbols, or a setting does not fit.
    """
    return _declare_symbols(config, head_positions=config.input_shape[0])


def declare_classifier(config: ModelConfig) -> Network:
    """Declare a transformer that gives logits of a whole sequence of (tokens,) symbols.

    Raises:
        ConfigError: the input is no sequence of symbols, or a setting does not fit.
    """
    return _declare_symbols(config, head_positions=1)


def build_vit(config: ModelConfig, local: LocalShapes) -> nn.Module:
    """The module of a vision transformer, for images (batch, channels, height, width)."""
    channels, height, width = config.input_shape
    return vision_transformer(
        input_shape=(channels, height, width),
        patch=config.patch,
        sections=_sections(config, local),
        class_count=config.class_count,
    )


def build_bert(config: ModelConfig, local: LocalShapes) -> nn.Module:
    """The module of a bidirectional transformer that gives logits of each token, for indices (batch, tokens)."""
    return transformer_lm(
        vocabulary=config.vocabulary,
        context=config.input_shape[0],
        sections=_sections(config, local),
        class_count=config.class_count,
        causal=False,
    )


def build_bert_classifier(config: ModelConfig, local: LocalShapes) -> nn.Module:
    """The module of a bidirectional transformer that gives logits of a sequence, for indices (batch, tokens)."""
    return transformer_classifier(
        vocabulary=config.vocabulary,
        context=config.input_shape[0],
        sections=_sections(config, local),
        class_count=config.class_count,
    )


def build_decoder(config: ModelConfig, local: LocalShapes) -> nn.Module:
    """The module of a causal transformer that gives logits of each next symbol, for indices (batch, tokens)."""
    return transformer_lm(
        vocabulary=config.vocabulary,
        context=config.input_shape[0],
        sections=_sections(config, local),
        class_count=config.class_count,
        causal=True,
    )


def _declare_symbols(config: ModelConfig, *, head_positions: int) -> Network:
    check_used(config, {*_USED, "vocabulary"}, {"layer"})
    if len(config.input_shape) != 1 or not config.vocabulary:
        raise ConfigError(
            f"input_shape is {config.input_shape} and vocabulary is {config.vocabulary}, but family "
            f"{config.family!r} needs (tokens,) and 1 symbol or more"
        )
    context = config.input_shape[0]
    sizes = _axis_sizes(config)
    declare = Declarer(sizes)
    tokens = [
        declare.tensor("tokens.positions", (1, context, _STREAM), "embedding"),
        declare.tensor("tokens.embedding.weight", (config.vocabulary, _STREAM), "embedding"),
    ]
    return _declare(config, sizes, tokens, token_count=context, head_positions=head_positions, fused=False)


def _declare(
    config: ModelConfig,
    sizes: _Sizes,
    tokens: Sequence[TensorDecl],
    *,
    token_count: int,
    head_positions: int,
    fused: bool,
) -> Network:
    declare = Declarer(sizes)
    tensors, products, blocks = [*tokens], list[MatrixProduct](), list[Block]()
    for section, depth in enumerate(config.depths):
        for position in range(depth):
            name = _block_name(section, position)
            block = name if position else None
            if config.learnable_steps and position:
                tensors.append(declare.tensor(f"{name}.step", (1,), "step", block=block))
            tensors += _block_tensors(declare, name, block, token_count, fused=fused)
            products += _block_products(name, block, token_count)
            blocks += [Block(name=name, section=section)] * (position > 0)
    tensors += declare.layer("norm", (_STREAM,), positions=token_count, role="gain")
    tensors += declare.layer("head", ("class", _STREAM), positions=head_positions)
    return Network(
        config=config,
        axes=MappingProxyType({name: _axis(name, size) for name, size in sizes.items()}),
        blocks=tuple(blocks),
        tensors=MappingProxyType({decl.name: decl for decl in tensors}),
        products=tuple(products),
    )


def _axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Of the full network, by the axis's name."""
    sizes = {"class": config.class_count, _STREAM: config.widths[0]}
    for section, depth in enumerate(config.depths):
        for position in range(depth):
            name, full = _block_name(section, position), _full_size(config, section, position)
            sizes[f"{name}.heads"] = full.heads
            sizes[f"{name}.head_dim"] = full.head_width
            sizes[f"{name}.hidden"] = full.hidden_width
    return sizes


def _axis(name: str, size: int) -> Axis:
    if name == "class":
        return Axis(name=name, size=size, kind="class", granularity=size)
    if name == _STREAM:
        return Axis(name=name, size=size, kind="embed")
    if name.endswith(".heads"):
        return Axis(name=name, size=size, kind="head")
    return Axis(name=name, size=size, kind="head_dim" if name.endswith(".head_dim") else "ffn")


def _full_size(config: ModelConfig, section: int, position: int) -> BlockSize:
    """Sizes of a block in the full network.

    Raises:
        ConfigError: a setting does not fit.
    """
    width = config.widths[0]
    if set(config.widths) != {width}:
        raise ConfigError(
            f"widths are {config.widths}, but all sections of family {config.family!r} share one stream; give them "
            "one width"
        )
    if not config.heads or (not config.head_width and width % config.heads[section]):
        raise ConfigError(
            f"heads is {config.heads}, but family {config.family!r} needs a number for each section that divides "
            f"width {width}, or head_width"
        )
    heads = config.heads[section]
    hidden_widths = config.of_each_block(
        config.hidden_widths or tuple(_HIDDEN_TIMES * width for width in config.widths)
    )
    return BlockSize(
        width=width,
        heads=heads,
        head_width=config.head_width or width // heads,
        hidden_width=hidden_widths[sum(config.depths[:section]) + position],
    )


def _block_name(section: int, position: int) -> str:
    return f"section{section}.block{position}"


def _block_tensors(
    declare: Declarer, name: str, block: str | None, tokens: int, *, fused: bool
) -> Iterator[TensorDecl]:
    heads, head_dim, hidden = f"{name}.heads", f"{name}.head_dim", f"{name}.hidden"
    inner = Product(factors=(heads, head_dim))
    rows: dict[str, Dim] = dict.fromkeys(("query", "key", "value"), inner)
    if fused:
        rows = {"qkv": Product(factors=(3, heads, head_dim))}
    layers: tuple[tuple[str, tuple[Dim, ...], Role], ...] = (
        ("norm1", (_STREAM,), "gain"),
        *((f"attention.{part}", (dim, _STREAM), "weight") for part, dim in rows.items()),
        ("attention.out", (_STREAM, inner), "residual"),
        ("norm2", (_STREAM,), "gain"),
        ("feed_forward.up", (hidden, _STREAM), "weight"),
        ("feed_forward.down", (_STREAM, hidden), "residual"),
    )
    for layer, dims, role in layers:
        yield from declare.layer(f"{name}.{layer}", dims, block=block, positions=tokens, role=role)


def _block_products(name: str, block: str | None, tokens: int) -> Iterator[MatrixProduct]:
    """Queries with keys, then the weights of all pairs with values."""
    heads, head_dim = f"{name}.heads", f"{name}.head_dim"
    yield MatrixProduct(result=(heads, tokens, tokens), summed=(head_dim,), block=block)
    yield MatrixProduct(result=(heads, tokens, head_dim), summed=(tokens,), block=block)


def _sections(config: ModelConfig, local: LocalShapes) -> Sections:
    """Sizes of the blocks that a subnet keeps."""
    return {
        f"section{section}": {
            f"block{position}": _local_size(config, section, position, local)
            for position in range(depth)
            if f"{_block_name(section, position)}.norm1.weight" in local.tensors
        }
        for section, depth in enumerate(config.depths)
    }


def _local_size(config: ModelConfig, section: int, position: int, local: LocalShapes) -> BlockSize:
    name = _block_name(section, position)
    width, heads, head_width, hidden_width = (
        local.sizes[axis] for axis in (_STREAM, f"{name}.heads", f"{name}.head_dim", f"{name}.hidden")
    )
    size = BlockSize(
        width=width,
        heads=heads,
        head_width=head_width,
        hidden_width=hidden_width,
        learnable_step=config.learnable_steps and position > 0,
    )
    if not config.scaler:
        return size
    full = _full_size(config, section, position)
    return replace(
        size,
        stream_rate=width / full.width,
        attention_rate=heads * head_width / (full.heads * full.head_width),
        hidden_rate=hidden_width / full.hidden_width,
    )
