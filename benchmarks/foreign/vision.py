"""Image networks of torchvision and timm, with ten classes and without their weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from foreign.network import ForeignNetwork
from foreign.torchvision_import import import_models
from subfleet.export.steps import SampleSpec

__all__ = ["VISION"]

_CLASS_COUNT = 10
_IMAGE = SampleSpec(shape=(3, 32, 32))


def _build_torchvision(constructor: str) -> nn.Module:
    network: nn.Module = getattr(import_models(), constructor)(weights=None, num_classes=_CLASS_COUNT)
    return network


def _build_frozen(constructor: str) -> nn.Module:
    """Build a network with all layers frozen but the last one."""
    network = _build_torchvision(constructor).eval().requires_grad_(requires_grad=False)
    head: nn.Module = network.get_submodule("fc")
    head.train().requires_grad_()
    return network


def _build_timm(constructor: str) -> nn.Module:
    import_models()  # timm imports torchvision
    import timm

    network: nn.Module = timm.create_model(constructor, pretrained=False, num_classes=_CLASS_COUNT)
    return network


def _describe_network(name: str, package: str, build: Callable[[Any], nn.Module], constructor: str) -> ForeignNetwork:
    return ForeignNetwork(
        name=name, origin=f"{package} {constructor}", build=partial(build, constructor), sample=_IMAGE
    )


VISION = (
    _describe_network("ResNet-18", "torchvision", _build_torchvision, "resnet18"),
    _describe_network("ResNet-18, frozen", "torchvision", _build_frozen, "resnet18"),
    _describe_network("ShuffleNet V2", "torchvision", _build_torchvision, "shufflenet_v2_x0_5"),
    _describe_network("MnasNet", "torchvision", _build_torchvision, "mnasnet0_5"),
    _describe_network("RegNet", "torchvision", _build_torchvision, "regnet_y_400mf"),
    _describe_network("SqueezeNet", "torchvision", _build_torchvision, "squeezenet1_1"),
    _describe_network("ConvNeXt", "torchvision", _build_torchvision, "convnext_tiny"),
    _describe_network("Swin", "torchvision", _build_torchvision, "swin_t"),
    _describe_network("GhostNet", "timm", _build_timm, "ghostnet_050"),
    _describe_network("RepVGG", "timm", _build_timm, "repvgg_a0"),
    _describe_network("ConvMixer", "timm", _build_timm, "convmixer_768_32"),
)
