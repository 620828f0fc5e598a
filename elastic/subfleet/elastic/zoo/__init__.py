"""The networks that programs are measured with, written once as plain builders of `torch.nn` modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from subfleet.elastic.zoo.convolution import group_norm
from subfleet.elastic.zoo.efficientnet import efficientnet_v2
from subfleet.elastic.zoo.keyword_spotting import ds_cnn
from subfleet.elastic.zoo.mobilenet import mobilenet_v2, mobilenet_v3
from subfleet.elastic.zoo.perceptron import mlp
from subfleet.elastic.zoo.recurrent import char_lstm
from subfleet.elastic.zoo.resnet import preact_resnet
from subfleet.elastic.zoo.transformer import transformer_lm, vision_transformer
from subfleet.elastic.zoo.vgg import vgg

__all__ = ["ZOO", "ZooModel", "build_seeded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A network with what it is trained on.

    Attributes:
        name: its key in `ZOO`.
        build: makes the module; its weights are drawn from PyTorch's global random state.
        sample_shape: of one sample's input; a sequence's length for tokens.
        sample_dtype: "F32", or "I64" for indices.
        sample_limit: exclusive upper bound of indices; 0 for F32.
        class_count: logits of a sample, or of a token.
        objective: name of an objective of `subfleet.protocol.training`.
        batch_size: samples of one step in measurements.
        smooth: whether all of its functions are smooth, such as GELU and SiLU; a rounding error then stays one, while
            ReLU and max pooling turn some into a jump.
    """

    name: str
    build: Callable[[], nn.Module]
    sample_shape: tuple[int, ...]
    sample_dtype: Literal["F32", "I64"] = "F32"
    sample_limit: int = 0
    class_count: int = 10
    objective: Literal["cross_entropy", "next_token"] = "cross_entropy"
    batch_size: int
    smooth: bool = False


def build_seeded(model: ZooModel, seed: int) -> nn.Module:
    """The module with weights drawn from a seed; the global random state stays as it was."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return model.build()


_IMAGE = (3, 32, 32)
_SEQUENCE = (80,)
_CHARACTERS = 80

_MODELS = (
    ZooModel(name="mlp", build=mlp, sample_shape=(1, 28, 28), batch_size=32),
    ZooModel(name="resnet18", build=preact_resnet, sample_shape=_IMAGE, batch_size=16),
    ZooModel(
        name="resnet18_half",
        build=partial(preact_resnet, widths=(32, 64, 128, 256)),
        sample_shape=_IMAGE,
        batch_size=16,
    ),
    ZooModel(
        name="resnet18_quarter",
        build=partial(preact_resnet, widths=(16, 32, 64, 128)),
        sample_shape=_IMAGE,
        batch_size=16,
    ),
    ZooModel(
        name="resnet18_quarter_groups",
        build=partial(preact_resnet, widths=(16, 32, 64, 128), norm=group_norm),
        sample_shape=_IMAGE,
        batch_size=16,
    ),
    ZooModel(name="mobilenet_v2", build=mobilenet_v2, sample_shape=_IMAGE, batch_size=16),
    ZooModel(name="mobilenet_v3_small", build=mobilenet_v3, sample_shape=_IMAGE, batch_size=16),
    ZooModel(name="efficientnet_v2", build=efficientnet_v2, sample_shape=_IMAGE, batch_size=16, smooth=True),
    ZooModel(name="vgg13", build=vgg, sample_shape=_IMAGE, batch_size=16),
    ZooModel(name="vit_tiny", build=vision_transformer, sample_shape=_IMAGE, batch_size=16, smooth=True),
    ZooModel(
        name="char_lstm",
        build=char_lstm,
        sample_shape=_SEQUENCE,
        sample_dtype="I64",
        sample_limit=_CHARACTERS,
        class_count=_CHARACTERS,
        objective="next_token",
        batch_size=16,
        smooth=True,
    ),
    ZooModel(
        name="transformer_lm",
        build=transformer_lm,
        sample_shape=_SEQUENCE,
        sample_dtype="I64",
        sample_limit=_CHARACTERS,
        class_count=_CHARACTERS,
        objective="next_token",
        batch_size=16,
        smooth=True,
    ),
    ZooModel(name="ds_cnn", build=ds_cnn, sample_shape=(1, 49, 10), class_count=12, batch_size=32),
)

ZOO: Mapping[str, ZooModel] = MappingProxyType({model.name: model for model in _MODELS})
