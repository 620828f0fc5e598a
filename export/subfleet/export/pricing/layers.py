"""A subnet as the layers that its program runs, with all that their part in the program may depend on."""

from collections.abc import Iterable
from dataclasses import dataclass

from subfleet.elastic.axes import factors_of
from subfleet.elastic.network import Network
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Layer", "by_layer", "layers_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a subnet, by the axes that its tensors run over.

    Attributes:
        name: the same in every subnet.
        kind: of each axis 1 where a single group of its indices is kept, else 0; of a kernel, its side. Runtimes leave
            out much of what they do along an axis of length 1, and choose other algorithms for other kernels.
        sizes: indices that are kept, of all axes but kernels.
    """

    name: str
    kind: tuple[int, ...]
    sizes: tuple[int, ...]


def by_layer(tensors: Iterable[str]) -> dict[str, list[str]]:
    """Names of the tensors of each layer, by the layer's name, in order."""
    layers: dict[str, list[str]] = {}
    for name in tensors:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def layers_of(network: Network, spec: SubnetSpec) -> tuple[Layer, ...]:
    """The layers of a subnet, in network order.

    Tensors' shapes would not do: two heads of four and four heads of two have tensors of the same shapes.

    Raises:
        ConfigError: the spec is no subnet of the network.
    """
    sizes = network.sizes(spec)
    kept = frozenset(spec.blocks)
    tensors = (decl.name for decl in network.tensors.values() if decl.block is None or decl.block in kept)
    return tuple(_layer(network, name, own, sizes) for name, own in by_layer(tensors).items())


def _layer(network: Network, name: str, tensors: Iterable[str], sizes: dict[str, int]) -> Layer:
    decls = [network.tensors[tensor] for tensor in tensors]
    factors = (
        factor
        for decl in decls
        for dim, size in zip(decl.axes, decl.shape, strict=True)
        for factor in factors_of(dim, size)
    )
    axes = [network.axes[factor] for factor in dict.fromkeys(factors) if isinstance(factor, str)]
    return Layer(
        name=name,
        kind=tuple(
            sizes[axis.name] if axis.kind == "kernel" else int(sizes[axis.name] == axis.granularity) for axis in axes
        ),
        sizes=tuple(sizes[axis.name] for axis in axes if axis.kind != "kernel"),
    )
