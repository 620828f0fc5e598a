"""One builder from which a network's declaration and every subnet's module follow.

A family says which axes there are and builds a module out of sizes. Each size remembers the axis that it was asked of,
so building the full network shows which dimensions of which tensor are tied to what, under which name, and running it
with shapes alone shows at how many places each tensor is applied. No layer is described twice.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.axes import Axis, Dim, Product
from subfleet.elastic.network import Block, LocalShapes, ModelConfig, Network, Role, TensorDecl
from subfleet.protocol.errors import ConfigError

__all__ = ["Blueprint", "Sizes", "TiedSize", "check_used", "declare", "module_of"]


class TiedSize(int):
    """A size of a layer that knows what it is tied to. To a layer it is a plain number.

    Arithmetic gives plain numbers, which are tied to nothing.

    Attributes:
        dim: what it is tied to.
        full: the size in the full network.
    """

    dim: Dim
    full: int

    def __new__(cls, size: int, dim: Dim, full: int) -> "TiedSize":
        """A size, what it is tied to, and the size in the full network."""
        tied = super().__new__(cls, size)
        tied.dim, tied.full = dim, full
        return tied

    def __reduce__(self) -> tuple[Any, ...]:
        return TiedSize, (int(self), self.dim, self.full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large a network is to be built.

    Attributes:
        axes: of the full network, by name.
        kept: how many indices it has, by axis.
        blocks: names of the skippable blocks that it has.
    """

    axes: Mapping[str, Axis]
    kept: Mapping[str, int]
    blocks: frozenset[str]

    def __getitem__(self, axis: str) -> TiedSize:
        return TiedSize(self.kept[axis], axis, self.axes[axis].size)

    def times(self, axis: str, inside: int) -> TiedSize:
        """The size of a dimension with `inside` entries for each index of an axis."""
        dim = Product(factors=(axis, inside))
        return TiedSize(self.kept[axis] * inside, dim, self.axes[axis].size * inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A family's network of one configuration.

    Attributes:
        axes: all, in any order.
        blocks: the skippable ones, in network order; their names are those of modules.
        build: sizes to a module, with these blocks of them alone.
        residual: names of the tensors that start at 0, so that their blocks start as the identity.
        kept_of_norms: as in `Network`.
    """

    axes: tuple[Axis, ...]
    blocks: tuple[Block, ...]
    build: Callable[[Sizes], nn.Module]
    residual: frozenset[str] = frozenset()
    kept_of_norms: int = 2


def declare(config: ModelConfig, blueprint: Blueprint) -> Network:
    """The declaration of a network.

    Raises:
        ConfigError: an axis is no multiple of its granularity, or the input is too small for the network.
    """
    for axis in blueprint.axes:
        if axis.size % axis.granularity and axis.kind != "kernel":
            raise ConfigError(
                f"axis {axis.name!r} of family {config.family!r} has size {axis.size}, but must be a multiple of "
                f"group_size {axis.granularity}; change the widths"
            )
    axes = {axis.name: axis for axis in blueprint.axes}
    sizes = Sizes(
        axes=axes,
        kept={axis.name: axis.size for axis in blueprint.axes},
        blocks=frozenset(block.name for block in blueprint.blocks),
    )
    with torch.device("meta"):
        module = blueprint.build(sizes)
    return Network(
        config=config,
        axes=MappingProxyType(axes),
        blocks=blueprint.blocks,
        tensors=MappingProxyType({decl.name: decl for decl in _decls(config, blueprint, module)}),
        kept_of_norms=blueprint.kept_of_norms,
    )


def module_of(blueprint: Blueprint, local: LocalShapes) -> nn.Module:
    """A module of a subnet's own size."""
    axes = {axis.name: axis for axis in blueprint.axes}
    held = {
        block.name for block in blueprint.blocks if any(name.startswith(f"{block.name}.") for name in local.tensors)
    }
    return blueprint.build(Sizes(axes=axes, kept=local.sizes, blocks=frozenset(held)))


def check_used(config: ModelConfig, used: Iterable[str], norms: Iterable[str]) -> None:
    """Make sure that a configuration sets nothing that its family has no use for.

    Args:
        config: the configuration.
        used: names of the optional fields that the family uses, besides norm and group_size.
        norms: that it knows.

    Raises:
        ConfigError: it sets another field, or has a norm that the family does not know.
    """
    known = {"norm", "group_size", "scaler", *used}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in known and isinstance(field.default, int | str | tuple) and value != field.default:
            raise ConfigError(
                f"{field.name} is {value!r}, but family {config.family!r} has no use for it; leave it out"
            )
    if config.norm not in norms:
        raise ConfigError(f"norm is {config.norm!r}, but family {config.family!r} knows {sorted(norms)}")
    if config.scaler and config.norm == "none":
        raise ConfigError("scaler is set and norm is 'none', but a scaler stands before norms; choose a norm")


_OWN_ROLES: Mapping[str, Role] = MappingProxyType(
    {"bias": "bias", "running_mean": "mean", "running_var": "variance", "step": "step"}
)


def _decls(config: ModelConfig, blueprint: Blueprint, module: nn.Module) -> Iterator[TensorDecl]:
    """Every tensor of the full module, in the order of its state."""
    places = _places(config, module)
    for path, layer in module.named_modules():
        owner = next((block.name for block in blueprint.blocks if f"{path}.".startswith(f"{block.name}.")), None)
        for own, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            name = f"{path}.{own}"
            role = _OWN_ROLES.get(own, "gain" if tensor.ndim == 1 else "weight")
            yield TensorDecl(
                name=name,
                shape=tuple(tensor.shape),
                axes=_dims(layer, tensor.ndim),
                block=owner,
                role="residual" if name in blueprint.residual else role,
                positions=places.get(path, 1),
            )


def _dims(layer: nn.Module, rank: int) -> tuple[Dim, ...]:
    """What the dimensions of a layer's tensors are tied to; its one-dimensional ones run over its outputs."""
    sizes: tuple[int, ...]
    match layer:
        case nn.Conv2d():
            # A filter of a grouped convolution sees the channels of its own group alone.
            seen = layer.in_channels if layer.groups == 1 else layer.in_channels // layer.groups
            sizes = (layer.out_channels, seen, *layer.kernel_size)
        case nn.Linear():
            sizes = (layer.out_features, layer.in_features)
        case nn.GroupNorm():
            sizes = (layer.num_channels,)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            sizes = (layer.num_features,)
        case _:
            sizes = (1,) * rank
    return tuple(size.dim if isinstance(size, TiedSize) else None for size in sizes[:rank])


def _places(config: ModelConfig, module: nn.Module) -> dict[str, int]:
    """At how many places of one sample each layer is applied, found by a run with shapes alone."""
    found: dict[str, int] = {}

    def record(path: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_layer: nn.Module, _inputs: Any, outputs: Tensor) -> None:
            found[path] = math.prod(outputs.shape[2:])

        return hook

    handles = [
        layer.register_forward_hook(record(path))
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d)
    ]
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(1, *config.input_shape, device="meta"))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"input_shape is {config.input_shape} and group_size is {config.group_size}, but family "
            f"{config.family!r} needs a larger input, or fewer sections that halve it, or larger groups: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return found
