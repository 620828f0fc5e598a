"""Networks of images: torchvision's and timm's own code, with ten classes and without their weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from foreign.network import ForeignNetwork
from foreign.torchvision_import import models
from subfleet.export.steps import SampleSpec

__all__ = ["VISION"]

_CLASS_COUNT = 10
_IMAGE = SampleSpec(shape=(3, 32, 32))


def _torchvision(constructor: str) -> nn.Module:
    network: nn.Module = getattr(models(), constructor)(weights=None, num_classes=_CLASS_COUNT)
    return network


def _frozen(constructor: str) -> nn.Module:
    """All but the last layer stays as it is."""
    network = _torchvision(constructor).eval().requires_grad_(requires_grad=False)
    head: nn.Module = network.get_submodule("fc")
    head.train().requires_grad_()
    return network


def _timm(constructor: str) -> nn.Module:
    models()  # timm imports torchvision
    import timm

    network: nn.Module = timm.create_model(constructor, pretrained=False, num_classes=_CLASS_COUNT)
    return network


def _network(name: str, package: str, build: Callable[[Any], nn.Module], constructor: str) -> ForeignNetwork:
    return ForeignNetwork(
        name=name, origin=f"{package} {constructor}", build=partial(build, constructor), sample=_IMAGE
    )


VISION = (
    _network("ResNet-18", "torchvision", _torchvision, "resnet18"),
    _network("ResNet-18, frozen", "torchvision", _frozen, "resnet18"),
    _network("ShuffleNet V2", "torchvision", _torchvision, "shufflenet_v2_x0_5"),
    _network("MnasNet", "torchvision", _torchvision, "mnasnet0_5"),
    _network("RegNet", "torchvision", _torchvision, "regnet_y_400mf"),
    _network("SqueezeNet", "torchvision", _torchvision, "squeezenet1_1"),
    _network("ConvNeXt", "torchvision", _torchvision, "convnext_tiny"),
    _network("Swin", "torchvision", _torchvision, "swin_t"),
    _network("GhostNet", "timm", _timm, "ghostnet_050"),
    _network("RepVGG", "timm", _timm, "repvgg_a0"),
    _network("ConvMixer", "timm", _timm, "convmixer_768_32"),
)
