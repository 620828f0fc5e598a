"""Published networks as settings of their families; each is an entry point in the group `subfleet.presets`.

Some replace networks that a paper does not fully specify, which a comment then says.

Images of at least 96 pixels use the published strides. For smaller images, as usual for 32 pixels, mobile networks skip
the first two halvings, stems are 3x3 convolutions without pooling, and patches are 4x4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.families.records.choices import CONVOLUTION_OPERATORS, ChoiceCnn, ChoiceRnn
from subfleet.elastic.families.records.fields import ReplaceableNorm
from subfleet.elastic.families.records.inverted import EfficientNetV2, MobileNetV2, MobileNetV3
from subfleet.elastic.families.records.nas_bench import NasBench201
from subfleet.elastic.families.records.plain import DsCnn, Vgg
from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.families.records.transformers import BertClassifier, Decoder, Vit
from subfleet.elastic.network import Family

_LARGE_IMAGE = 96
_SMALL_PATCH = 4


@dataclass(frozen=True, slots=True)
class PublishedNetwork:
    """A published network for any inputs and classes; see `subfleet.elastic.families.Preset`.

    Attributes:
        settings: the published settings.
    """

    settings: Family

    def __call__(self, *, input_shape: tuple[int, ...], class_count: int, norm: ReplaceableNorm) -> Family:
        """See `subfleet.elastic.families.Preset`."""
        changes: dict[str, Any] = {"input_shape": input_shape, "class_count": class_count}
        if self.settings.norm == "batch":
            changes["norm"] = norm
        if max(input_shape[1:], default=0) < _LARGE_IMAGE:
            changes |= _for_small_images(self.settings)
        return replace(self.settings, **changes)


def _for_small_images(settings: Family) -> dict[str, Any]:
    match settings:
        case Vit():
            return {"patch": _SMALL_PATCH}
        case MobileNetV2() | MobileNetV3() | EfficientNetV2():
            strides = (settings.stem_stride, *settings.strides)
            halving = [index for index, stride in enumerate(strides) if stride > 1][:2]
            stem, *others = (1 if index in halving else stride for index, stride in enumerate(strides))
            return {"stem_stride": stem, "strides": tuple(others)}
        case _:
            return {}


_IMAGES: Mapping[str, Any] = MappingProxyType({"input_shape": (3, 32, 32), "class_count": 10, "norm": "batch"})
_IMAGENET: Mapping[str, Any] = MappingProxyType({"input_shape": (3, 224, 224), "class_count": 1000})
_SPEECH: Mapping[str, Any] = MappingProxyType({"input_shape": (1, 49, 10), "class_count": 12, "norm": "batch"})
_SHAKESPEARE: Mapping[str, Any] = MappingProxyType({"input_shape": (80,), "class_count": 80, "vocabulary": 80})
"""The symbols of LEAF (Caldas et al. 2018), in sequences of 80."""


def _resnet(*depths: int, block: Literal["basic", "bottleneck"] = "basic") -> PublishedNetwork:
    """He et al. 2016, "Deep residual learning", table 1, with the blocks of "Identity mappings"."""
    times = 4 if block == "bottleneck" else 1
    widths = tuple(times * width for width in (64, 128, 256, 512))
    return PublishedNetwork(PreactResNet(**_IMAGES, widths=widths, depths=depths, block=block, stem_width=64))


def _vgg(*depths: int, wider: bool = False) -> PublishedNetwork:
    """Simonyan and Zisserman 2015, table 1; if wider, the last section's second layer has twice the channels.

    It is not the last layer of its section, so the section's width does not change.
    """
    widths = (64, 128, 256, 512, 512)
    layers, index = expand_to_blocks(widths, depths), sum(depths[:-1]) + 1
    wide = (*layers[:index], 2 * layers[index], *layers[index + 1 :]) if wider else ()
    return PublishedNetwork(Vgg(**_IMAGES, widths=widths, depths=depths, layer_widths=wide))


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a table of inverted residual blocks.

    Attributes:
        kernel: side of the filter.
        hidden: width inside each block.
        width: output channels.
        stride: stride of the first block.
        squeezed: width inside squeeze-and-excitation for each block; empty for none.
    """

    kernel: int
    hidden: tuple[int, ...]
    width: int
    stride: int = 1
    squeezed: tuple[int, ...] = ()


_Inverted = type[MobileNetV2] | type[MobileNetV3] | type[EfficientNetV2]


def _inverted(family: _Inverted, stem_width: int, last_widths: tuple[int, ...], *rows: _Row) -> PublishedNetwork:
    """A network of inverted residual blocks with a stem of stride 2."""
    squeezed = tuple(width for row in rows for width in row.squeezed or (0,) * len(row.hidden))
    settings: dict[str, Any] = {
        **_IMAGENET,
        "norm": "batch",
        "widths": tuple(row.width for row in rows),
        "depths": tuple(len(row.hidden) for row in rows),
        "hidden_widths": tuple(width for row in rows for width in row.hidden),
        **({"squeezed_widths": squeezed} if any(squeezed) else {}),
        "kernels": tuple(row.kernel for row in rows),
        "strides": tuple(row.stride for row in rows),
        "stem_width": stem_width,
        "stem_stride": 2,
        "last_widths": last_widths,
    }
    return PublishedNetwork(family(**settings))


def _expanded(
    family: _Inverted, stem_width: int, last_width: int, *table: tuple[int, int, int, int, bool]
) -> PublishedNetwork:
    """The same from rows of expansion, width, depth, stride, and whether to squeeze to a quarter of a block's input."""
    rows, before = list[_Row](), stem_width
    for expansion, width, depth, stride, squeezes in table:
        reads = (before, *(width for _ in range(depth - 1)))
        squeezed = tuple(width_in // 4 for width_in in reads) if squeezes else ()
        rows.append(_Row(3, tuple(expansion * width_in for width_in in reads), width, stride, squeezed))
        before = width
    return _inverted(family, stem_width, (last_width,), *rows)


resnet18 = _resnet(2, 2, 2, 2)
resnet34 = _resnet(3, 4, 6, 3)
resnet50 = _resnet(3, 4, 6, 3, block="bottleneck")
resnet101 = _resnet(3, 4, 23, 3, block="bottleneck")
resnet152 = _resnet(3, 8, 36, 3, block="bottleneck")

vgg11 = _vgg(1, 1, 2, 2, 2)
vgg13 = _vgg(2, 2, 2, 2, 2)
vgg16 = _vgg(2, 2, 3, 3, 3)
vgg19 = _vgg(2, 2, 4, 4, 4)

# Stand-ins for the other clients' networks of FedADP (2025, figure 3, a drawing without a description): named by
# their layers as VGG is, one and two of them more than VGG-13 and VGG-16 in the later sections, on the way to VGG-19,
# and one layer that is twice as wide. All are sizes of the last.
vgg14 = _vgg(2, 2, 2, 2, 3)
vgg15 = _vgg(2, 2, 2, 3, 3)
vgg17 = _vgg(2, 2, 3, 3, 4)
vgg18 = _vgg(2, 2, 3, 4, 4)
vgg16_wider = _vgg(2, 2, 3, 3, 3, wider=True)
vgg19_wider = _vgg(2, 2, 4, 4, 4, wider=True)

# Sandler et al. 2018, table 2.
mobilenet_v2 = _expanded(
    MobileNetV2,
    32,
    1280,
    (1, 16, 1, 1, False),
    (6, 24, 2, 2, False),
    (6, 32, 3, 2, False),
    (6, 64, 4, 2, False),
    (6, 96, 3, 1, False),
    (6, 160, 3, 2, False),
    (6, 320, 1, 1, False),
)

# Howard et al. 2019, table 2.
mobilenet_v3_small = _inverted(
    MobileNetV3,
    16,
    (576, 1024),
    _Row(3, (16,), 16, 2, (8,)),
    _Row(3, (72, 88), 24, 2),
    _Row(5, (96, 240, 240), 40, 2, (24, 64, 64)),
    _Row(5, (120, 144), 48, 1, (32, 40)),
    _Row(5, (288, 576, 576), 96, 2, (72, 144, 144)),
)

# Howard et al. 2019, table 1; squeezed widths as in the public code, a quarter rounded to multiples of 8.
mobilenet_v3_large = _inverted(
    MobileNetV3,
    16,
    (960, 1280),
    _Row(3, (16,), 16),
    _Row(3, (64, 72), 24, 2),
    _Row(5, (72, 120, 120), 40, 2, (24, 32, 32)),
    _Row(3, (240, 200, 184, 184), 80, 2),
    _Row(3, (480, 672), 112, 1, (120, 168)),
    _Row(5, (672, 960, 960), 160, 2, (168, 240, 240)),
)

# Tan and Le 2021, table 4.
efficientnet_v2_s = _expanded(
    EfficientNetV2,
    24,
    1280,
    (1, 24, 2, 1, False),
    (4, 48, 4, 2, False),
    (4, 64, 4, 2, False),
    (4, 128, 6, 2, True),
    (6, 160, 9, 1, True),
    (6, 256, 15, 2, True),
)

# The same kinds of blocks, narrower and shallower.
efficientnet_v2_tiny = _expanded(
    EfficientNetV2,
    16,
    640,
    (1, 16, 1, 1, False),
    (4, 32, 2, 2, False),
    (4, 48, 2, 2, False),
    (4, 64, 2, 2, True),
    (6, 80, 2, 1, True),
    (6, 128, 2, 2, True),
)

# Dong and Yang 2020, section 2.1: five cells in each of three sections. The cell is a stand-in.
nas_bench_201 = PublishedNetwork(NasBench201(**_IMAGES, widths=(16, 32, 64), depths=(5, 6, 6)))

# Dudziak et al., "FedorAS", spaces CNN-L and CNN-S. Its text has no list of operators; these are those of its public
# code, whose CNN-S has two more and halves by pooling.
_FEDORAS: Mapping[str, Any] = MappingProxyType(
    {"widths": (64, 96, 144, 216), "depths": (4, 4, 4, 4), "last_widths": (324,)}
)
cnn_l = PublishedNetwork(ChoiceCnn(**_IMAGES, **_FEDORAS))
cnn_s = PublishedNetwork(
    ChoiceCnn(**_SPEECH, **_FEDORAS, operators=(CONVOLUTION_OPERATORS,), stem_stride=2, reduction="pool")
)

# Zhang et al. 2017, section 3.5, DS-CNN-S.
ds_cnn = PublishedNetwork(DsCnn(**_SPEECH, widths=(64,), depths=(4,)))

# Touvron et al. 2021, "Training data-efficient image transformers", table 1: DeiT-Ti, which names ViT's smallest.
vit_tiny = PublishedNetwork(Vit(**_IMAGENET, widths=(192,), depths=(12,), heads=(3,), patch=16))

# Turc et al. 2019, "Well-read students learn better", table 1, classifying a sequence by its next symbol.
bert_small = PublishedNetwork(
    BertClassifier(**_SHAKESPEARE, widths=(512,), depths=(4,), heads=(8,), hidden_widths=(2048,))
)

# As wide as HeteroFL's transformer (Diao et al. 2021, section 4).
decoder_small = PublishedNetwork(Decoder(**_SHAKESPEARE, widths=(256,), depths=(2,), heads=(8,), hidden_widths=(512,)))

# McMahan et al. 2017, section 3, and LEAF: 819,920 parameters, with two biases a layer as PyTorch has.
char_lstm = PublishedNetwork(Lstm(**_SHAKESPEARE, widths=(256,), depths=(2,), embedding_width=8))

# Replaces FedorAS's space RNN; see `ChoiceRnn`.
rnn = PublishedNetwork(ChoiceRnn(**_SHAKESPEARE, widths=(128,), depths=(3,), embedding_width=8))
