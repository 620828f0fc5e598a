"""Published networks by name, as configurations.

Images of 96 pixels or more take the published strides. For smaller ones the mobile networks keep the size in the first
two places that would halve it, stems are 3x3 convolutions without pooling, and patches are 4x4, all as usual for images
of 32 pixels.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.network import ModelConfig
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.suggestion import did_you_mean

__all__ = ["PRESETS", "preset"]

_LARGE_IMAGE = 96
_SMALL_PATCH = 4


def preset(
    name: str, *, input_shape: tuple[int, ...], class_count: int, norm: Literal["group", "batch", "none"] = "batch"
) -> ModelConfig:
    """The configuration of a published network.

    Args:
        name: a key of `PRESETS`.
        input_shape: (channels, height, width); of networks over symbols (tokens,).
        class_count: number of classes; where each next symbol is predicted, of symbols.
        norm: instead of BatchNorm, where the published network has that; others keep theirs.

    Raises:
        ConfigError: there is no such network, or the numbers are out of range.
    """
    if name not in PRESETS:
        raise ConfigError(f"the network is {name!r}, but must be one of {sorted(PRESETS)}{did_you_mean(name, PRESETS)}")
    config = PRESETS[name]
    strides = (config.stem_stride, *config.strides)
    patch = config.patch
    if max(input_shape[1:], default=0) < _LARGE_IMAGE:
        patch = patch and _SMALL_PATCH
        halving = [place for place, stride in enumerate(strides) if stride > 1][:2]
        strides = tuple(1 if place in halving else stride for place, stride in enumerate(strides))
    return dataclasses.replace(
        config,
        input_shape=input_shape,
        class_count=class_count,
        norm=norm if config.norm == "batch" else config.norm,
        stem_stride=strides[0],
        strides=strides[1:],
        patch=patch,
    )


def _residual(depths: tuple[int, ...], block: Literal["basic", "bottleneck"]) -> ModelConfig:
    """He et al. 2016, "Deep residual learning", table 1, with the blocks of "Identity mappings"."""
    widths = (64, 128, 256, 512)
    return ModelConfig(
        family="preact_resnet",
        input_shape=(3, 32, 32),
        class_count=10,
        widths=widths if block == "basic" else tuple(4 * width for width in widths),
        depths=depths,
        norm="batch",
        block=block,
        stem_width=64,
    )


def _vgg(depths: tuple[int, ...]) -> ModelConfig:
    """Simonyan and Zisserman 2015, table 1."""
    return ModelConfig(
        family="vgg",
        input_shape=(3, 32, 32),
        class_count=10,
        widths=(64, 128, 256, 512, 512),
        depths=depths,
        norm="batch",
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """Blocks of one kind in a table of inverted residual blocks.

    Attributes:
        kernel: side of the filter.
        hidden: widths inside the blocks, one for each.
        width: channels out.
        stride: of the first block.
        squeezed: widths inside squeeze-and-excitation, one for each block; empty for none.
    """

    kernel: int
    hidden: tuple[int, ...]
    width: int
    stride: int = 1
    squeezed: tuple[int, ...] = ()


def _inverted(family: str, stem_width: int, rows: tuple[_Row, ...], last_widths: tuple[int, ...]) -> ModelConfig:
    squeezes = any(row.squeezed for row in rows)
    return ModelConfig(
        family=family,
        input_shape=(3, 224, 224),
        class_count=1000,
        widths=tuple(row.width for row in rows),
        depths=tuple(len(row.hidden) for row in rows),
        norm="batch",
        hidden_widths=tuple(width for row in rows for width in row.hidden),
        squeezed_widths=tuple(width for row in rows for width in row.squeezed or (0,) * len(row.hidden))
        if squeezes
        else (),
        kernels=tuple(row.kernel for row in rows),
        strides=tuple(row.stride for row in rows),
        stem_width=stem_width,
        stem_stride=2,
        last_widths=last_widths,
    )


def _expanded(
    family: str, stem_width: int, table: tuple[tuple[int, int, int, int, bool], ...], last_width: int
) -> ModelConfig:
    """Rows of expansion, width, depth, stride, and whether squeezed to a quarter of what each block reads."""
    rows = []
    for before, (expansion, width, depth, stride, squeezes) in pairwise(((0, stem_width, 0, 0, False), *table)):
        reads = (before[1], *(width for _ in range(depth - 1)))
        rows.append(
            _Row(
                3,
                tuple(expansion * width_in for width_in in reads),
                width,
                stride,
                tuple(width_in // 4 for width_in in reads) if squeezes else (),
            )
        )
    return _inverted(family, stem_width, tuple(rows), (last_width,))


# Sandler et al. 2018, table 2.
_MOBILENET_V2 = _expanded(
    "mobilenet_v2",
    32,
    (
        (1, 16, 1, 1, False),
        (6, 24, 2, 2, False),
        (6, 32, 3, 2, False),
        (6, 64, 4, 2, False),
        (6, 96, 3, 1, False),
        (6, 160, 3, 2, False),
        (6, 320, 1, 1, False),
    ),
    1280,
)

# Howard et al. 2019, table 2.
_MOBILENET_V3_SMALL = _inverted(
    "mobilenet_v3",
    16,
    (
        _Row(3, (16,), 16, 2, (8,)),
        _Row(3, (72, 88), 24, 2),
        _Row(5, (96, 240, 240), 40, 2, (24, 64, 64)),
        _Row(5, (120, 144), 48, 1, (32, 40)),
        _Row(5, (288, 576, 576), 96, 2, (72, 144, 144)),
    ),
    (576, 1024),
)

# Howard et al. 2019, table 1; squeezed widths as in the public code, a quarter rounded to multiples of 8.
_MOBILENET_V3_LARGE = _inverted(
    "mobilenet_v3",
    16,
    (
        _Row(3, (16,), 16),
        _Row(3, (64, 72), 24, 2),
        _Row(5, (72, 120, 120), 40, 2, (24, 32, 32)),
        _Row(3, (240, 200, 184, 184), 80, 2),
        _Row(3, (480, 672), 112, 1, (120, 168)),
        _Row(5, (672, 960, 960), 160, 2, (168, 240, 240)),
    ),
    (960, 1280),
)

# Tan and Le 2021, table 4.
_EFFICIENTNET_V2_S = _expanded(
    "efficientnet_v2",
    24,
    (
        (1, 24, 2, 1, False),
        (4, 48, 4, 2, False),
        (4, 64, 4, 2, False),
        (4, 128, 6, 2, True),
        (6, 160, 9, 1, True),
        (6, 256, 15, 2, True),
    ),
    1280,
)

# The same kinds of blocks, narrower and shallower.
_EFFICIENTNET_V2_TINY = _expanded(
    "efficientnet_v2",
    16,
    (
        (1, 16, 1, 1, False),
        (4, 32, 2, 2, False),
        (4, 48, 2, 2, False),
        (4, 64, 2, 2, True),
        (6, 80, 2, 1, True),
        (6, 128, 2, 2, True),
    ),
    640,
)

# Zhang et al. 2017, section 3.5, DS-CNN-S.
_DS_CNN = ModelConfig(family="ds_cnn", input_shape=(1, 49, 10), class_count=12, widths=(64,), depths=(4,), norm="batch")

# Touvron et al. 2021, "Training data-efficient image transformers", table 1: DeiT-Ti, which names ViT's smallest.
_VIT_TINY = ModelConfig(
    family="vit",
    input_shape=(3, 224, 224),
    class_count=1000,
    widths=(192,),
    depths=(12,),
    norm="layer",
    heads=(3,),
    patch=16,
)

_SHAKESPEARE_SYMBOLS = 80
"""Of LEAF (Caldas et al. 2018), in sequences of 80."""


def _symbols(family: str, width: int, depth: int, heads: int, hidden_width: int) -> ModelConfig:
    return ModelConfig(
        family=family,
        input_shape=(80,),
        class_count=_SHAKESPEARE_SYMBOLS,
        vocabulary=_SHAKESPEARE_SYMBOLS,
        widths=(width,),
        depths=(depth,),
        norm="layer",
        heads=(heads,),
        hidden_widths=(hidden_width,),
    )


# McMahan et al. 2017, section 3, and LEAF: 819,920 parameters, with two biases a layer as PyTorch has.
_CHAR_LSTM = ModelConfig(
    family="lstm",
    input_shape=(80,),
    class_count=_SHAKESPEARE_SYMBOLS,
    vocabulary=_SHAKESPEARE_SYMBOLS,
    widths=(256,),
    depths=(2,),
    norm="none",
    embedding_width=8,
)

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "resnet18": _residual((2, 2, 2, 2), "basic"),
        "resnet34": _residual((3, 4, 6, 3), "basic"),
        "resnet50": _residual((3, 4, 6, 3), "bottleneck"),
        "resnet101": _residual((3, 4, 23, 3), "bottleneck"),
        "resnet152": _residual((3, 8, 36, 3), "bottleneck"),
        "vgg11": _vgg((1, 1, 2, 2, 2)),
        "vgg13": _vgg((2, 2, 2, 2, 2)),
        "vgg16": _vgg((2, 2, 3, 3, 3)),
        "vgg19": _vgg((2, 2, 4, 4, 4)),
        "mobilenet_v2": _MOBILENET_V2,
        "mobilenet_v3_small": _MOBILENET_V3_SMALL,
        "mobilenet_v3_large": _MOBILENET_V3_LARGE,
        "efficientnet_v2_s": _EFFICIENTNET_V2_S,
        "efficientnet_v2_tiny": _EFFICIENTNET_V2_TINY,
        "ds_cnn": _DS_CNN,
        "vit_tiny": _VIT_TINY,
        # Turc et al. 2019, "Well-read students learn better", table 1, classifying a sequence by its next symbol.
        "bert_small": _symbols("bert_classifier", width=512, depth=4, heads=8, hidden_width=2048),
        # As wide as HeteroFL's transformer (Diao et al. 2021, section 4).
        "decoder_small": _symbols("decoder", width=256, depth=2, heads=8, hidden_width=512),
        "char_lstm": _CHAR_LSTM,
    }
)
