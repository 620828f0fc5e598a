"""The measured networks: presets of the families, and the perceptron of federated averaging."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from subfleet.elastic.building import network_of
from subfleet.elastic.families import preset, presets
from subfleet.elastic.network import Family

__all__ = ["ZOO", "ZooModel", "build_seeded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A network with the settings of its training.

    Attributes:
        name: its key in `ZOO`.
        build: makes the module; its weights are drawn from PyTorch's global random state.
        sample_shape: shape of one sample's input; a sequence's length for tokens.
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
    """Build the module with seeded weights; the global random state is unchanged."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return model.build()


def _build_perceptron() -> nn.Module:
    """The "2NN" of McMahan et al. 2017, section 3: 199,210 parameters."""
    layers = (nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    names = ("flatten", "hidden0", "activation0", "hidden1", "activation1", "head")
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def _create_from_preset(name: str, config: Family, *, batch_size: int = 16, smooth: bool = False) -> ZooModel:
    symbols = network_of(config).symbols
    return ZooModel(
        name=name,
        build=config.module,
        sample_shape=config.input_shape,
        sample_dtype="I64" if symbols else "F32",
        sample_limit=symbols,
        class_count=config.class_count,
        objective="next_token" if symbols else "cross_entropy",
        batch_size=batch_size,
        smooth=smooth,
    )


def _create_for_small_images(name: str) -> Family:
    return preset(name, input_shape=(3, 32, 32), class_count=10)


def _create_narrow_resnet18(divisor: int) -> Family:
    full = _create_for_small_images("resnet18")
    return dataclasses.replace(
        full, widths=tuple(width // divisor for width in full.widths), stem_width=full.stem_width // divisor
    )


_MODELS = (
    ZooModel(name="mlp", build=_build_perceptron, sample_shape=(1, 28, 28), batch_size=32),
    _create_from_preset("resnet18", _create_for_small_images("resnet18")),
    _create_from_preset("resnet18_half", _create_narrow_resnet18(2)),
    _create_from_preset("resnet18_quarter", _create_narrow_resnet18(4)),
    _create_from_preset("resnet18_quarter_groups", dataclasses.replace(_create_narrow_resnet18(4), norm="group")),
    _create_from_preset("mobilenet_v2", _create_for_small_images("mobilenet_v2")),
    _create_from_preset("mobilenet_v3_small", _create_for_small_images("mobilenet_v3_small")),
    _create_from_preset(
        "efficientnet_v2",
        # Halves the resolution early, for speed, and three times in total.
        dataclasses.replace(_create_for_small_images("efficientnet_v2_tiny"), strides=(1, 2, 2, 2, 1, 1)),
        smooth=True,
    ),
    _create_from_preset("vgg13", _create_for_small_images("vgg13")),
    _create_from_preset("vit_tiny", _create_for_small_images("vit_tiny"), smooth=True),
    _create_from_preset("char_lstm", presets.char_lstm.settings, smooth=True),
    _create_from_preset("transformer_lm", presets.decoder_small.settings, smooth=True),
    _create_from_preset("ds_cnn", presets.ds_cnn.settings, batch_size=32),
)

ZOO: Mapping[str, ZooModel] = MappingProxyType({model.name: model for model in _MODELS})
