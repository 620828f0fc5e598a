"""Derive a network's declaration and all submodules from one builder.

A family names its axes and builds a module from sizes. Each size remembers its axis, so building the full network shows
how the dimensions of each tensor are tied, and running its narrowest submodel shows at how many positions each tensor
is applied. No layer is described twice. Only properties that layers do not show are declared separately: tensors with
unusual first values, and the products of attention.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from subfleet.elastic.axes import Axis, Dim, Product, Sums, add_sums, factors_of
from subfleet.elastic.families.choice_block import ChoiceBlock
from subfleet.elastic.network import (
    Block,
    Family,
    Identity,
    LocalShapes,
    MatrixProduct,
    Network,
    OperatorChoice,
    Role,
    Start,
    TensorDecl,
)
from subfleet.protocol.errors import ConfigError

__all__ = ["Blueprint", "OwnTensors", "Sizes"]


class TiedSize(int):
    """An integer size of a layer that knows the axis it is tied to.

    A product of sizes is tied to the product of their axes, the left one outermost: the rows of fused queries, keys and
    values are `3 * (heads * head_width)`. Other arithmetic gives plain, untied numbers.

    Attributes:
        dim: the axis or product of axes that it is tied to.
        full: the size in the full network.
    """

    dim: Dim
    full: int

    def __new__(cls, size: int, dim: Dim, full: int) -> "TiedSize":
        """Create a size from its value, the axis it is tied to, and its value in the full network."""
        tied = super().__new__(cls, size)
        tied.dim, tied.full = dim, full
        return tied

    def __mul__(self, other: object) -> "TiedSize":
        return _product(self, other) if isinstance(other, int) else NotImplemented

    def __rmul__(self, other: object) -> "TiedSize":
        return _product(other, self) if isinstance(other, int) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return TiedSize, (int(self), self.dim, self.full)


def fraction_of(size: int) -> float:
    """The fraction of a size relative to the full network; 1 for a plain number."""
    return size / size.full if isinstance(size, TiedSize) else 1.0


@runtime_checkable
class OwnTensors(Protocol):
    """A custom layer with tensors of more than one value.

    Attributes:
        own_sizes: the sizes of each tensor, by its name in the layer.
    """

    own_sizes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a network to build.

    Attributes:
        whole: sizes of axes and sums in the full network.
        kept: number of kept indices by axis and sum.
        parts: names of the kept skippable blocks and operators.
    """

    whole: Mapping[str, int]
    kept: Mapping[str, int]
    parts: frozenset[str]

    def __getitem__(self, axis: str) -> TiedSize:
        return TiedSize(self.kept[axis], axis, self.whole[axis])


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A family's network for given settings.

    Attributes:
        axes: all axes, in any order.
        sums: as in `Network`.
        blocks: the skippable blocks in network order, named after their modules.
        build: builds a module of these sizes, with the kept parts only.
        choices: as in `Network`; operators are named after the modules inside their choice's module.
        roles: roles, by name, of tensors that do not follow from their layer, such as "residual" weights that start at
            0, so that their blocks start as the identity.
        products: as in `Network`.
        kept_of_norms: as in `Network`.
        group_size: as in `Network`.
        symbols: as in `Network`.
        other_sizes: as in `Network`.
        identities: as in `Network`.
        positions: number of positions of a sample at which each tensor is applied; None counts them, which the layers
            of PyTorch allow.
        starts: first values of tensors that do not follow from their roles, see `TensorDecl`.
        frozen: names of tensors that training never changes.
    """

    axes: tuple[Axis, ...]
    blocks: tuple[Block, ...]
    build: Callable[[Sizes], nn.Module]
    sums: Sums = field(default_factory=dict)
    choices: tuple[OperatorChoice, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    products: tuple[MatrixProduct, ...] = ()
    kept_of_norms: int = 2
    group_size: int = 4
    symbols: int = 0
    other_sizes: tuple[int, ...] = ()
    identities: Mapping[str, Identity] = field(default_factory=dict)
    positions: Mapping[str, int] | None = None
    starts: Mapping[str, Start] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()


def declare(config: Family, blueprint: Blueprint) -> Network:
    """Derive the declaration of a network.

    Raises:
        ConfigError: an axis is not a multiple of its granularity, blocks do not match the family's sections or name
            unknown axes, or the input is too small for the network.
    """
    depths = config.depths
    inside = Counter(block.section for block in blueprint.blocks)
    if any(not 0 <= section < len(depths) or count > depths[section] for section, count in inside.items()):
        raise ConfigError(
            f"family {config.TYPE!r} has {dict(inside)} skippable blocks by section, but sections of {depths} blocks; "
            "fix the package of this family"
        )
    names = {axis.name for axis in blueprint.axes}
    for block in blueprint.blocks:
        if (block.reads or block.gives) and not {block.reads, block.gives} <= names:
            raise ConfigError(
                f"block {block.name!r} of family {config.TYPE!r} reads {block.reads!r} and gives {block.gives!r}, but "
                "must name two axes or none; fix the package of this family"
            )
    for axis in blueprint.axes:
        if axis.size % axis.granularity and axis.kind != "kernel":
            raise ConfigError(
                f"axis {axis.name!r} of family {config.TYPE!r} has size {axis.size}, but must be a multiple of "
                f"group_size {axis.granularity}; change the widths"
            )
    return Network(
        config=config,
        axes=MappingProxyType({axis.name: axis for axis in blueprint.axes}),
        sums=MappingProxyType(dict(blueprint.sums)),
        blocks=blueprint.blocks,
        choices=MappingProxyType({choice.name: choice for choice in blueprint.choices}),
        tensors=MappingProxyType({decl.name: decl for decl in _decls(config, blueprint)}),
        products=blueprint.products,
        kept_of_norms=blueprint.kept_of_norms,
        group_size=blueprint.group_size,
        symbols=blueprint.symbols,
        other_sizes=blueprint.other_sizes,
        identities=MappingProxyType(dict(blueprint.identities)),
    )


def module_of(blueprint: Blueprint, local: LocalShapes) -> nn.Module:
    """Build a module of a submodel's size."""
    return blueprint.build(Sizes(whole=_list_whole_sizes(blueprint), kept=local.sizes, parts=local.parts))


def _list_whole_sizes(blueprint: Blueprint) -> dict[str, int]:
    return add_sums(blueprint.sums, {axis.name: axis.size for axis in blueprint.axes})


_OWN_ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "bias": "bias",
        "bias_ih_l0": "bias",
        "bias_hh_l0": "bias",
        "running_mean": "mean",
        "running_var": "variance",
        "step": "step",
    }
)
_LSTM_GATES, _GRU_GATES = 4, 3
_PLACED = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.LSTM, nn.GRU)
"""Layers that are applied at many positions of a sample; of an embedding, each symbol only reads one row."""


def _product(left: int, right: int) -> TiedSize:
    fulls = [factor.full if isinstance(factor, TiedSize) else factor for factor in (left, right)]
    dims = [factor.dim if isinstance(factor, TiedSize) else None for factor in (left, right)]
    factors = (factor for dim, full in zip(dims, fulls, strict=True) for factor in factors_of(dim, full))
    return TiedSize(int(left) * int(right), Product(factors=tuple(factors)), math.prod(fulls))


def _build_full(blueprint: Blueprint, counts: Mapping[str, int]) -> nn.Module:
    """Build a module with all parts; unnamed axes are whole."""
    whole = _list_whole_sizes(blueprint)
    kept = add_sums(blueprint.sums, {**whole, **counts})
    return blueprint.build(Sizes(whole=whole, kept=kept, parts=frozenset(_parts(blueprint))))


def _parts(blueprint: Blueprint) -> tuple[str, ...]:
    return (
        *(block.name for block in blueprint.blocks),
        *(part for choice in blueprint.choices for part in choice.parts),
    )


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules in this context without allocating or drawing their weights.

    PyTorch's meta device alone would load its compiler to draw normal values, which takes seconds.
    """
    with torch.device("meta"), _Undrawn():
        yield


_DRAWING = frozenset({nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_})


class _Undrawn(TorchFunctionMode):
    """Skips the functions that fill a layer's tensors with random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func in _DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _decls(config: Family, blueprint: Blueprint) -> Iterator[TensorDecl]:
    """Yield the declaration of every tensor of the full module, in the order of its state."""
    with without_weights():
        module = _build_full(blueprint, {})
    counted = _count_positions(config, blueprint) if blueprint.positions is None else {}
    positions, parts = blueprint.positions or {}, _parts(blueprint)
    for path, layer in module.named_modules():
        owner = next((name for name in parts if f"{path}.".startswith(f"{name}.")), None)
        for own, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            name = f"{path}.{own}" if path else own
            role = _OWN_ROLES.get(own, "gain" if tensor.ndim == 1 else "weight")
            yield TensorDecl(
                name=name,
                shape=tuple(tensor.shape),
                axes=_dims(layer, own, tensor.ndim),
                part=owner,
                role=blueprint.roles.get(name, role),
                positions=positions.get(name, counted.get(path, 1)),
                start=blueprint.starts.get(name),
                frozen=name in blueprint.frozen,
            )


def _dims(layer: nn.Module, own: str, rank: int) -> tuple[Dim, ...]:
    """The axes that the dimensions of a layer's tensor are tied to; one-dimensional tensors run over the outputs."""
    sizes: tuple[int, ...]
    match layer:
        case nn.Conv2d():
            # A filter of a grouped convolution only reads the channels of its group.
            channels = layer.in_channels if layer.groups == 1 else layer.in_channels // layer.groups
            sizes = (layer.out_channels, channels, *layer.kernel_size)
        case nn.Linear():
            sizes = (layer.out_features, layer.in_features)
        case nn.GroupNorm():
            sizes = (layer.num_channels,)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            sizes = (layer.num_features,)
        case nn.LayerNorm():
            sizes = layer.normalized_shape
        case nn.Embedding():
            sizes = (layer.num_embeddings, layer.embedding_dim)
        case nn.LSTM() | nn.GRU():
            gates = _LSTM_GATES if isinstance(layer, nn.LSTM) else _GRU_GATES
            sizes = (gates * layer.hidden_size, layer.hidden_size if "hh" in own else layer.input_size)
        case OwnTensors() if own in layer.own_sizes:
            sizes = layer.own_sizes[own]
        case _:
            sizes = (1,) * rank
    return tuple(size.dim if isinstance(size, TiedSize) else None for size in sizes[:rank])


def _count_positions(config: Family, blueprint: Blueprint) -> dict[str, int]:
    """Count the positions of one sample where each layer is applied, by running the narrowest network of that depth.

    The number does not depend on widths. A run of the full network on the meta device would load PyTorch's compiler,
    which takes seconds.
    """
    with torch.random.fork_rng(devices=[]), _Undrawn():  # weights do not matter; keeps the random state
        module = _build_full(
            blueprint, {axis.name: axis.granularity for axis in blueprint.axes if axis.kind != "kernel"}
        )
    module.eval()
    positions: dict[str, int] = {}

    def record(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
            channels_last = isinstance(layer, nn.Linear | nn.LayerNorm | nn.LSTM | nn.GRU)
            positions[path] = math.prod(inputs[0].shape[1:-1] if channels_last else outputs.shape[2:])

        return hook

    choices = [layer for layer in module.modules() if isinstance(layer, ChoiceBlock)]
    runs = max((len(choice.operators) for choice in choices), default=1)
    handles = [
        layer.register_forward_hook(record(path))
        for path, layer in module.named_modules()
        if isinstance(layer, _PLACED)
    ]
    try:
        with torch.no_grad():
            dtype = torch.int64 if blueprint.symbols else torch.float32
            for run in range(runs):  # until every operator of every choice was drawn
                for choice in choices:
                    choice.drawn = choice.operators[run % len(choice.operators)]
                module(torch.zeros(1, *config.input_shape, dtype=dtype))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"input_shape is {config.input_shape} and group_size is {blueprint.group_size}, but family "
            f"{config.TYPE!r} needs a larger input, fewer sections that halve it, or larger groups: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return positions
