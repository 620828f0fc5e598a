"""Pre-activation residual networks, of convolutions for images or of linear layers for vectors.

One declaration and one builder serve both families; they differ in the kernel of a layer, in strides and in what comes
before and after the residual sections. A block computes `x + layer2(relu(norm2(layer1(relu(norm1(x))))))`. Layers have
no bias, as each is followed by a norm or by the next block's. Where a section changes the shape, a shortcut layer
projects `relu(norm1(x))`.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.network import Block, LocalShapes, ModelConfig, Network, Role, TensorDecl
from subfleet.elastic.zoo.convolution import PreactBlock, group_norm
from subfleet.protocol.errors import ConfigError

__all__ = ["build_mlp", "build_resnet", "declare_mlp", "declare_resnet"]

Shapes = Mapping[str, tuple[int, ...]]


def declare_resnet(config: ModelConfig) -> Network:
    """Declare a residual network of 3x3 convolutions; each section after the first halves height and width.

    Raises:
        ConfigError: the input is no image, or so small that a group of one channel ends as one value, without variance.
    """
    if len(config.input_shape) != 3:
        raise ConfigError(
            f"input_shape is {config.input_shape}, but family 'preact_resnet' needs (channels, height, width)"
        )
    return _declare(config, input_size=config.input_shape[0], kernel=(3, 3))


def declare_mlp(config: ModelConfig) -> Network:
    """Declare a residual network of linear layers; inputs of any shape are flattened.

    Raises:
        ConfigError: group_size is 1: a group of one value has no variance.
    """
    return _declare(config, input_size=math.prod(config.input_shape), kernel=())


def build_resnet(config: ModelConfig, local: LocalShapes) -> nn.Module:
    """The module of a residual network of convolutions, for inputs (batch, channels, height, width)."""
    shapes = local.tensors
    return nn.Sequential(OrderedDict([*_trunk(config, shapes, stride=2), ("pool", SpatialMean()), _head(shapes)]))


def build_mlp(config: ModelConfig, local: LocalShapes) -> nn.Module:
    """The module of a residual network of linear layers, for inputs (batch, ...)."""
    shapes = local.tensors
    return nn.Sequential(OrderedDict([("flatten", nn.Flatten()), *_trunk(config, shapes, stride=1), _head(shapes)]))


class SpatialMean(nn.Module):
    """The mean over height and width. A plain mean, whose gradient every export target has."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels)."""
        return x.mean(dim=(2, 3))


def _declare(config: ModelConfig, *, input_size: int, kernel: tuple[int, ...]) -> Network:
    positions = _positions(config, kernel)
    if config.group_size * positions[-1] < 2:
        raise ConfigError(
            f"group_size is {config.group_size}, but must be 2 or more where a channel ends as a single value, as with "
            f"family {config.family!r} and input_shape {config.input_shape}"
        )
    axes = {"class": Axis(name="class", size=config.class_count, kind="class", granularity=config.class_count)}
    blocks = []
    stem_shape = (config.widths[0], input_size, *kernel)
    tensors = [_layer_decl("stem.weight", stem_shape, (_stream(0), None), None, positions[0])]
    for section, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        inner_axes = [f"{_block_name(section, position)}.inner" for position in range(depth)]
        for name in (_stream(section), *inner_axes):
            axes[name] = Axis(name=name, size=width, kind="channel", granularity=config.group_size)
        for position in range(depth):
            tensors += _block_decls(config, section, position, kernel)
        blocks += [Block(name=_block_name(section, position), section=section) for position in range(1, depth)]
    last = _stream(len(config.widths) - 1)
    tensors += _norm_decls("norm", config.widths[-1], last, None, positions[-1])
    head_shape = (config.class_count, config.widths[-1])
    tensors.append(_layer_decl("head.weight", head_shape, ("class", last), None, 1))
    tensors.append(TensorDecl(name="head.bias", shape=head_shape[:1], axes=("class",), block=None, role="bias"))
    return Network(
        config=config,
        axes=MappingProxyType(axes),
        blocks=tuple(blocks),
        tensors=MappingProxyType({decl.name: decl for decl in tensors}),
    )


def _block_decls(config: ModelConfig, section: int, position: int, kernel: tuple[int, ...]) -> Iterator[TensorDecl]:
    name = _block_name(section, position)
    block = name if position else None
    projects = position == 0 and section > 0
    before = section - 1 if projects else section
    outer_in, outer, inner = _stream(before), _stream(section), f"{name}.inner"
    width_in, width = config.widths[before], config.widths[section]
    places_in, places = _positions(config, kernel)[before], _positions(config, kernel)[section]
    yield from _norm_decls(f"{name}.norm1", width_in, outer_in, block, places_in)
    yield _layer_decl(f"{name}.layer1.weight", (width, width_in, *kernel), (inner, outer_in), block, places)
    yield from _norm_decls(f"{name}.norm2", width, inner, block, places)
    yield TensorDecl(
        name=f"{name}.layer2.weight",
        shape=(width, width, *kernel),
        axes=(outer, inner, *(None for _ in kernel)),
        block=block,
        role="residual",
        positions=places,
    )
    if projects:
        shape = (width, width_in, *(1 for _ in kernel))
        yield _layer_decl(f"{name}.shortcut.weight", shape, (outer, outer_in), block, places)


def _positions(config: ModelConfig, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Height times width in each section; 1 where layers are linear."""
    if not kernel:
        return (1,) * len(config.widths)
    height, width = config.input_shape[1:]
    return tuple(
        math.ceil(height / 2**section) * math.ceil(width / 2**section) for section in range(len(config.widths))
    )


def _layer_decl(
    name: str, shape: tuple[int, ...], axes: tuple[str | None, str | None], block: str | None, positions: int
) -> TensorDecl:
    every_axis = axes + (None,) * (len(shape) - 2)
    return TensorDecl(name=name, shape=shape, axes=every_axis, block=block, role="weight", positions=positions)


def _norm_decls(name: str, size: int, axis: str, block: str | None, positions: int) -> Iterator[TensorDecl]:
    roles: tuple[tuple[str, Role], ...] = (("weight", "gain"), ("bias", "bias"))
    for suffix, role in roles:
        yield TensorDecl(
            name=f"{name}.{suffix}", shape=(size,), axes=(axis,), block=block, role=role, positions=positions
        )


def _stream(section: int) -> str:
    return f"section{section}.stream"


def _block_name(section: int, position: int) -> str:
    return f"section{section}.block{position}"


def _trunk(config: ModelConfig, shapes: Shapes, *, stride: int) -> Iterator[tuple[str, nn.Module]]:
    yield "stem", _layer(shapes["stem.weight"], 1)
    for section, depth in enumerate(config.depths):
        kept = OrderedDict[str, nn.Module]()
        for position in range(depth):
            inside = _inside(shapes, f"{_block_name(section, position)}.")
            if inside:
                step = stride if position == 0 and section > 0 else 1
                kept[f"block{position}"] = _block(inside, config.group_size, step)
        yield f"section{section}", nn.Sequential(kept)
    yield "norm", _norm(shapes["norm.weight"], config.group_size)
    yield "relu", nn.ReLU()


def _inside(shapes: Shapes, prefix: str) -> Shapes:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _head(shapes: Shapes) -> tuple[str, nn.Module]:
    class_count, size = shapes["head.weight"]
    return "head", nn.Linear(size, class_count)


def _block(shapes: Shapes, group_size: int, stride: int) -> PreactBlock:
    """One residual block, of the shapes that its tensors have."""
    return PreactBlock(
        norm1=_norm(shapes["norm1.weight"], group_size),
        layer1=_layer(shapes["layer1.weight"], stride),
        norm2=_norm(shapes["norm2.weight"], group_size),
        layer2=_layer(shapes["layer2.weight"], 1),
        shortcut=_layer(shapes["shortcut.weight"], stride) if "shortcut.weight" in shapes else None,
    )


def _layer(shape: tuple[int, ...], stride: int) -> nn.Module:
    size_out, size_in, *kernel = shape
    if not kernel:
        return nn.Linear(size_in, size_out, bias=False)
    return nn.Conv2d(size_in, size_out, kernel[0], stride=stride, padding=kernel[0] // 2, bias=False)


def _norm(shape: tuple[int, ...], group_size: int) -> nn.Module:
    return group_norm(shape[0], group_size)
