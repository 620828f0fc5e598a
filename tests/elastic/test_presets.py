"""The presets are the published networks."""

import math
from dataclasses import replace

import pytest
import torch
from matrices import mostly_long
from torch import nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.cost import Costs
from subfleet.elastic.families import PRESETS, preset, presets
from subfleet.elastic.families.records.nas_bench import NasBench201
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.network import BUFFER_ROLES, Family, Network
from subfleet.elastic.undrawn import Undrawn
from subfleet.protocol.errors import ConfigError

QUICK = (
    "bert_small", "char_lstm", "cnn_s", "decoder_small", "ds_cnn", "efficientnet_v2_tiny", "mobilenet_v2",
    "mobilenet_v3_small", "nas_bench_201", "resnet18", "rnn", "vgg11", "vit_tiny",
)  # fmt: skip
"""A preset of each family."""


def load_published(name: str) -> Family:
    network: presets.PublishedNetwork = getattr(presets, name)
    return network.settings


def build_empty(name: str) -> nn.Module:
    """The plain module of a published network, without memory for its weights."""
    with torch.device("meta"), Undrawn():
        return load_published(name).module()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        # kuangliu/pytorch-cifar's PreActResNet18 has 11,171,146, without the last norm's 1,024.
        ("resnet18", 11_171_146 + 1_024),
        # The VGG of the same code, without the biases of convolutions, which norms cancel: one for each channel.
        ("vgg11", 9_231_114 - 2_752),
        ("vgg13", 9_416_010 - 2_944),
        ("vgg16", 14_728_266 - 4_224),
        ("vgg19", 20_040_522 - 5_504),
        # MLPerf Tiny's has 23,756 trained parameters, including 9 x 64 such biases.
        ("ds_cnn", 23_756 - 576),
        # NATS-Bench states 1.289 million for this cell, architecture 9930.
        ("nas_bench_201", 1_288_506),
        # torchvision 0.24, models with 1,000 classes.
        ("mobilenet_v2", 3_504_872),
        ("mobilenet_v3_small", 2_542_856),
        ("mobilenet_v3_large", 5_483_032),
        ("efficientnet_v2_s", 21_458_488),
        # DeiT-Ti at 224x224 with 1,000 classes.
        ("vit_tiny", 5_717_416),
        # LEAF's with 80 symbols has one bias for each gate and layer, PyTorch two.
        ("char_lstm", 817_872 + 2 * 1_024),
    ],
)
def test_presets_are_as_large_as_published(name: str, published: int) -> None:
    assert sum(parameter.numel() for parameter in build_empty(name).parameters()) == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        # torchvision 0.28, models with 1,000 classes, counted in their convolutions and linear layers at 224x224.
        ("mobilenet_v2", 300_774_272),
        ("mobilenet_v3_small", 56_510_400),
        ("mobilenet_v3_large", 216_589_760),
        ("efficientnet_v2_s", 2_849_895_872),
        # The same at 32x32 with 10 classes, with a 3x3 stem of stride 1, and without pooling after it.
        ("resnet18", 555_422_720),
        ("resnet34", 1_159_402_496),
    ],
)
def test_presets_are_as_costly_as_published(name: str, published: int) -> None:
    network = network_of(load_published(name))
    ((_, macs),) = Costs(network).of([network.full_architecture()])
    assert macs == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
    ],
)
def test_convolutions_of_residual_networks_are_as_large_as_published(name: str, published: int) -> None:
    # torchvision's networks normalise after their convolutions, have another stem and 1,000 classes.
    config = load_published(name)
    assert isinstance(config, PreactResNet)
    bottleneck = config.block == "bottleneck"
    normed = 64
    for section, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        inside = 2 * (width // 4) + width if bottleneck else 2 * width
        normed += depth * inside + (width if section or bottleneck else 0)
    expected = published - 64 * 3 * 7 * 7 - 2 * normed - (config.widths[-1] + 1) * 1000
    weights = build_empty(name).named_parameters()
    assert sum(own.numel() for layer, own in weights if layer.startswith("section") and own.dim() > 1) == expected


def count_halvings(network: Network) -> float:
    last = [decl.positions for decl in network.tensors.values() if len(decl.shape) == 4][-1]
    return math.log2(math.prod(network.config.input_shape[1:]) / last) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "small", "large"),
    mostly_long(
        [
            ("resnet50", 3, 3),
            ("vgg11", 4, 4),
            ("mobilenet_v2", 3, 5),
            ("mobilenet_v3_small", 3, 5),
            ("mobilenet_v3_large", 3, 5),
            ("efficientnet_v2_s", 3, 5),
        ],
        ("vgg11", 4, 4),
        ("mobilenet_v2", 3, 5),
    ),
)
def test_small_images_are_halved_less_often(name: str, small: int, large: int) -> None:
    assert count_halvings(network_of(preset(name, input_shape=(3, 32, 32), class_count=10))) == small
    assert count_halvings(network_of(preset(name, input_shape=(3, 128, 128), class_count=10))) == large


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(sorted(PRESETS), *QUICK))
def test_a_preset_takes_other_inputs_classes_and_norms(name: str) -> None:
    tokens = dict.fromkeys(("bert_small", "decoder_small", "char_lstm", "rnn"), (9,))
    shape = {"ds_cnn": (1, 49, 10), **tokens}.get(name, (1, 32, 32))
    network = network_of(preset(name, input_shape=shape, class_count=7, norm="group"))
    assert network.axes["class"].size == 7
    assert not [decl for decl in network.tensors.values() if decl.role in BUFFER_ROLES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "parameters", "forward_macs"),
    [
        # NATS-Bench's `get_cost_info` for CIFAR-10: 0.802426 million, and 113.95137 with the biases of the head.
        (
            "|skip_connect~0|+|none~0|nor_conv_3x3~1|+|avg_pool_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|",
            802_426,
            113_951_360,
        ),
        # Architecture 9930: 1.289 million, and 184.73.
        (
            "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_3x3~1|nor_conv_3x3~2|",
            1_288_506,
            184_730_240,
        ),
    ],
)
def test_cells_are_as_large_and_costly_as_in_the_benchmark(cell: str, parameters: int, forward_macs: int) -> None:
    published = preset("nas_bench_201", input_shape=(3, 32, 32), class_count=10)
    assert isinstance(published, NasBench201)
    network = network_of(replace(published, cell=cell))
    ((_, macs),) = Costs(network).of([network.full_architecture()])
    trained = (decl.shape for decl in network.tensors.values() if decl.role not in BUFFER_ROLES)
    assert sum(map(math.prod, trained)) == parameters
    assert macs == forward_macs


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="resnet19"):
        preset("resnet19", input_shape=(3, 32, 32), class_count=10)


SMALL_IMAGES = (
    "resnet18",
    "nas_bench_201",
    "vgg13",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_v2_tiny",
    "vit_tiny",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL_IMAGES, "ds_cnn", "char_lstm", "decoder_small"])
def test_a_preset_gives_logits_and_a_gradient_to_every_parameter(name: str) -> None:
    config = preset(name, input_shape=(3, 32, 32), class_count=10) if name in SMALL_IMAGES else load_published(name)
    network = network_of(config)
    module = build_module(network, network.full_architecture())
    generator = torch.Generator().manual_seed(1)
    shape = (2, *config.input_shape)
    inputs = (
        torch.randint(network.symbols, shape, generator=generator)
        if network.symbols
        else torch.randn(shape, generator=generator)
    )
    logits = module(inputs)
    tokens = config.input_shape if network.symbols else ()
    assert logits.shape == (2, *tokens, config.class_count)
    # A fixed random direction: the plain sum's gradient vanishes before a norm.
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    without_gradient = [
        name for name, parameter in module.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert without_gradient == []
