"""The networks for `benchmarks/plan_estimate.py`, and random submodels of them."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from subfleet.elastic.families import preset
from subfleet.elastic.families.records.inverted import EfficientNetV2, MobileNetV2, MobileNetV3
from subfleet.elastic.families.records.plain import DsCnn, Vgg
from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.families.records.transformers import Bert, BertClassifier, Decoder, Vit
from subfleet.elastic.network import Family, Network
from subfleet.export.requests import TrainRequest
from subfleet.protocol.submodel import Architecture, Centre, IndexSet, Prefix
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

__all__ = ["TABLES", "TINY", "create_request", "draw_architecture", "draw_distinct_architectures"]

BATCH_SIZE = 8
_DRAWS = 20
"""Random draws per requested submodel until the search for distinct ones ends."""
PER_TOKEN = frozenset({"decoder", "bert", "lstm"})
TINY = Mlp(input_shape=(8,), class_count=2, widths=(8,), depths=(1,))
"""Estimated first in each process, so that imports do not count."""

_IMAGES: dict[str, Any] = {"input_shape": (3, 12, 12), "class_count": 10}
_TEXT: dict[str, Any] = {"input_shape": (12,), "vocabulary": 20, "widths": (16,), "depths": (2,), "heads": (4,)}
_RESIDUAL: dict[str, Any] = {**_IMAGES, "depths": (2, 2), "widths": (16, 32)}
_INVERTED: dict[str, Any] = {
    **_IMAGES,
    "widths": (8, 16),
    "depths": (1, 2),
    "hidden_widths": (16, 24, 32),
    "strides": (1, 2),
    "stem_width": 8,
}
_EFFICIENT: dict[str, Any] = {
    **_IMAGES,
    "widths": (8, 16),
    "depths": (2, 2),
    "norm": "batch",
    "hidden_widths": (16, 16, 24, 32),
    "squeezed_widths": (0, 4),
}
_SEPARABLE: dict[str, Any] = {
    "input_shape": (1, 20, 10),
    "class_count": 10,
    "widths": (16, 16),
    "depths": (2, 2),
    "norm": "batch",
    "stem_width": 16,
}
NETWORKS = {
    config.TYPE: config
    for config in (
        Mlp(input_shape=(32,), class_count=10, widths=(32, 16), depths=(3, 2)),
        PreactResNet(**_RESIDUAL),
        Vgg(**_RESIDUAL, norm="batch"),
        MobileNetV2(**_INVERTED, last_widths=(32,)),
        MobileNetV3(**_INVERTED, norm="batch", squeezed_widths=(4, 0, 8), kernels=(3, 5), last_widths=(32, 24)),
        EfficientNetV2(**_EFFICIENT, kernels=(3, 3)),
        DsCnn(**_SEPARABLE),
        Vit(**_IMAGES, patch=4, widths=(16,), depths=(2,), heads=(4,)),
        Bert(**_TEXT, class_count=20),
        BertClassifier(**_TEXT, class_count=4),
        Decoder(**_TEXT, class_count=20),
        Lstm(input_shape=(8,), vocabulary=20, class_count=20, widths=(16, 12), depths=(1, 1)),
    )
}
"""A small network of each family."""
_IMAGE = (3, 32, 32)
LARGE = {
    config.TYPE: config
    for config in (
        Mlp(input_shape=(784,), class_count=10, widths=(384,), depths=(4,)),
        preset("resnet18", input_shape=_IMAGE, class_count=10, norm="group"),
        preset("vgg11", input_shape=_IMAGE, class_count=10),
        preset("mobilenet_v2", input_shape=_IMAGE, class_count=10),
        preset("mobilenet_v3_small", input_shape=_IMAGE, class_count=10),
        preset("efficientnet_v2_tiny", input_shape=_IMAGE, class_count=10),
        preset("ds_cnn", input_shape=(1, 49, 10), class_count=12),
        preset("vit_tiny", input_shape=_IMAGE, class_count=10),
        preset("bert_small", input_shape=(80,), class_count=80),
        preset("decoder_small", input_shape=(80,), class_count=80),
        preset("char_lstm", input_shape=(80,), class_count=80),
    )
}
"""Networks as published."""
WIDE_KERNELS: dict[str, Family] = {
    config.TYPE: config
    for config in (
        Vgg(**_RESIDUAL, norm="batch", kernels=(5, 5)),
        DsCnn(**_SEPARABLE, kernels=(5, 5)),
        EfficientNetV2(**_EFFICIENT, kernels=(5, 5)),
    )
}
"""Small networks with submodels that choose among kernels of up to 5 x 5."""
TABLES: Mapping[str, Mapping[str, Family]] = {"small": NETWORKS, "large": LARGE, "wide-kernelled": WIDE_KERNELS}


def draw_architecture(network: Network, chance: random.Random) -> Architecture:
    """Draw every axis at any of its sizes, and any subset of the blocks."""
    axes: list[tuple[str, IndexSet]] = []
    for name, axis in sorted(network.axes.items()):
        if axis.kind == "kernel":
            axes.append((name, Centre(size=chance.randrange(2 - axis.size % 2, axis.size + 1, 2))))
        elif axis.kind != "class":
            axes.append((name, Prefix(size=chance.randrange(axis.granularity, axis.size + 1, axis.granularity))))
    return Architecture(axes=tuple(axes), blocks=tuple(block.name for block in network.blocks if chance.random() < 0.6))


def create_request(config: Family, target: str, architecture: Architecture) -> TrainRequest:
    """Create a request with momentum, small batches and the family's objective."""
    return TrainRequest(
        model=config,
        architecture=architecture,
        target=target,
        batch_size=BATCH_SIZE,
        objective=ObjectiveSettings(name="next_token" if config.TYPE in PER_TOKEN else "cross_entropy"),
        optimiser=OptimiserSettings(momentum=0.9),
    )


def draw_distinct_architectures(network: Network, count: int, chance: random.Random) -> Iterator[Architecture]:
    """Draw random submodels of distinct shapes; fewer if there are not enough."""
    seen: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()
    for _ in range(_DRAWS * count):
        architecture = draw_architecture(network, chance)
        shapes = tuple(network.shapes(architecture).items())
        if shapes not in seen:
            seen.add(shapes)
            yield architecture
        if len(seen) == count:
            return
