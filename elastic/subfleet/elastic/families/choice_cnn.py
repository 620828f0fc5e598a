"""Convolutional supernets: a stem, and sections of blocks with alternative operators, each followed by a reduction."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice, pairwise
from types import MappingProxyType

from torch import Tensor, nn

from subfleet.elastic.families.choice_block import ChoiceBlock
from subfleet.elastic.families.layers import Layers, SpatialMean, SqueezeExcitation
from subfleet.elastic.families.records.choices import IDENTITY, ChoiceCnn


class ResidualSum(nn.Module):
    """Adds the output of layers to their input.

    Args:
        layers: layers that keep the shape.
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that the layers accept to the same shape."""
        y: Tensor = self.layers(x)
        return x + y


class _ParallelSum(nn.Module):
    """Sums the outputs of two modules."""

    def __init__(self, layers: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to the modules' output shape."""
        y: Tensor = self.layers(x)
        shortcut: Tensor = self.shortcut(x)
        return y + shortcut


def choice_cnn(config: ChoiceCnn) -> nn.Module:
    """FedorAS's search spaces for images and speech (operators from its public code)."""
    layers = Layers(config=config)
    channels, widths = config.input_shape[0], config.widths
    stem = layers.normed_layer((channels, widths[0]), 3, stride=config.stem_stride, activation=nn.ReLU)
    modules = OrderedDict[str, nn.Module](stem=stem)
    of_blocks = iter(config.of_blocks)
    for section, (width, after) in enumerate(pairwise((*widths, *config.last_widths))):
        blocks = OrderedDict[str, nn.Module]()
        for name, operators in islice(of_blocks, config.depths[section]):
            blocks[name.rpartition(".")[2]] = ChoiceBlock({kind: _OPERATORS[kind](layers, width) for kind in operators})
        modules[f"section{section}"] = nn.Sequential(blocks)
        modules[f"reduction{section}"] = _REDUCTIONS[config.reduction](layers, width, after)
    modules["pool"] = SpatialMean()
    modules["head"] = nn.Linear(config.last_widths[0], config.class_count)
    return nn.Sequential(modules)


def _convolution(layers: Layers, width: int, *, kernel: int) -> nn.Module:
    return layers.normed_layer((width, width), kernel, activation=nn.ReLU)


def _separable(layers: Layers, width: int, *, kernel: int, expansion: float) -> nn.Module:
    """A residual block of a grouped convolution, with as many groups as the smaller width, and a 1x1 convolution."""
    inner = int(width * expansion)
    filtering = layers.normed_layer((width, inner), kernel, groups=min(width, inner), activation=nn.ReLU)
    narrow = layers.normed_layer((inner, width), activation=nn.ReLU)
    return ResidualSum(nn.Sequential(OrderedDict(filter=filtering, narrow=narrow)))


def _squeeze_excite(layers: Layers, width: int, *, kernel: int, expansion: float) -> nn.Module:
    """A residual block of a convolution, squeeze-and-excitation and a 1x1 convolution."""
    inner = int(width * expansion)
    widen = layers.normed_layer((width, inner), kernel, activation=nn.ReLU)
    squeeze = SqueezeExcitation(inner, inner, nn.ReLU, nn.Sigmoid)
    narrow = layers.normed_layer((inner, width), activation=nn.ReLU)
    return ResidualSum(nn.Sequential(OrderedDict(widen=widen, squeeze=squeeze, narrow=narrow)))


def _pass_on(_layers: Layers, _width: int) -> nn.Module:
    return nn.Identity()


_MakeOperator = Callable[[Layers, int], nn.Module]
_OPERATORS: Mapping[str, _MakeOperator] = MappingProxyType(
    {
        "conv1": partial(_convolution, kernel=1),
        "conv3": partial(_convolution, kernel=3),
        "dsconv1_double": partial(_separable, kernel=1, expansion=2),
        "dsconv3_half": partial(_separable, kernel=3, expansion=0.5),
        "dsconv3": partial(_separable, kernel=3, expansion=1),
        "dsconv3_double": partial(_separable, kernel=3, expansion=2),
        "mbconv1_double": partial(_squeeze_excite, kernel=1, expansion=2),
        "mbconv3_half": partial(_squeeze_excite, kernel=3, expansion=0.5),
        "mbconv3": partial(_squeeze_excite, kernel=3, expansion=1),
        "mbconv3_double": partial(_squeeze_excite, kernel=3, expansion=2),
        IDENTITY: _pass_on,
    }
)


def _halve_by_convolution(layers: Layers, width_in: int, width: int) -> nn.Module:
    filtering = layers.normed_layer((width_in, width_in), 3, stride=2, groups=width_in, activation=nn.ReLU)
    pointwise = layers.normed_layer((width_in, width), activation=nn.ReLU)
    halving = nn.Conv2d(width_in, width, 2, stride=2, bias=layers.config.norm == "none")
    shortcut = OrderedDict[str, nn.Module](conv=halving, norm=layers.norm(width), activation=nn.ReLU())
    return _ParallelSum(nn.Sequential(OrderedDict(filter=filtering, pointwise=pointwise)), nn.Sequential(shortcut))


def _halve_by_pool(layers: Layers, width_in: int, width: int) -> nn.Module:
    pool = nn.AvgPool2d(3, stride=2, padding=1)
    return nn.Sequential(OrderedDict(pool=pool, pointwise=layers.normed_layer((width_in, width), activation=nn.ReLU)))


_REDUCTIONS: Mapping[str, Callable[[Layers, int, int], nn.Module]] = MappingProxyType(
    {"convolution": _halve_by_convolution, "pool": _halve_by_pool}
)
