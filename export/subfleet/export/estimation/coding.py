"""Gives a network axes of prime sizes, so that each size in its program shows the axes that it is the product of.

A traced value of 2 * 3 * 3 * 29 * 43 numbers runs over the two axes with 29 and 43 groups: in a submodel that keeps 4
and 7 of these it has 2 * 3 * 3 * 4 * 7. Axes of layers that are far apart share a prime.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from torch import nn

from subfleet.elastic.building import sized_module
from subfleet.elastic.network import LocalShapes, Network

_LEAST_PRIME, _FAR, _BORDER = 11, 16, 9
"""The number of tensors between layers that share a prime; the most by which borders and kernels enlarge inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """The primes of axes.

    Attributes:
        primes: the number of groups of each axis that submodels cut.
        tensors: positions in the network of the tensors that run over each axis.
    """

    network: Network
    primes: Mapping[str, int]
    tensors: Mapping[str, tuple[int, ...]]

    @property
    def local_shapes(self) -> LocalShapes:
        """The shapes of the network in these sizes."""
        sizes = {
            name: axis.granularity * self.primes[name] if name in self.primes else axis.size
            for name, axis in self.network.axes.items()
        }
        shapes = {decl.name: decl.local_shape(sizes) for decl in self.network.tensors.values()}
        return LocalShapes(sizes=sizes, tensors=shapes, parts=frozenset(self.network.parts))

    def build_module(self) -> nn.Module:
        """Build the network in these sizes; its weights are uninitialised, and never read."""
        return sized_module(self.network.config, self.local_shapes).to_empty(device="cpu")

    def decode(self, size: int, tensor: int) -> tuple[float, dict[str, int]]:
        """Decode a size of the coded program for submodels: a number times powers of what they keep of axes.

        The size occurs in the layer of a tensor, given by its position in the network.
        """
        number, powers = float(size), dict[str, int]()
        for prime in dict.fromkeys(self.primes.values()):
            while size and size % prime == 0:
                size //= prime
                axes = (axis for axis, own in self.primes.items() if own == prime)
                nearest = min(axes, key=lambda axis: min(abs(position - tensor) for position in self.tensors[axis]))
                powers[nearest] = powers.get(nearest, 0) + 1
                number /= prime * self.network.axes[nearest].granularity
        return number, powers


def code_axes(network: Network, batch_size: int) -> Coding:
    """Give each axis a prime that divides no other size of the program."""
    config = network.config
    tensors: dict[str, tuple[int, ...]] = {}
    for index, decl in enumerate(network.tensors.values()):
        for axis in decl.axis_names:
            tensors[axis] = (*tensors.get(axis, ()), index)
    fixed = (*config.input_shape, *network.other_sizes)
    scales = {size >> halvings for size in fixed for halvings in range(size.bit_length())}
    others = {size + more for size in scales for more in range(-_BORDER, _BORDER)} | {batch_size, config.class_count}
    primes: dict[str, int] = {}
    for name in (name for name in tensors if network.axes[name].kind not in {"class", "kernel"}):
        near = {index + step for index in tensors[name] for step in range(-_FAR, _FAR)}
        used = {primes[other] for other in primes if near.intersection(tensors[other])}
        usable = (n for n in count(_LEAST_PRIME) if n not in used and all(n % factor for factor in range(2, n)))
        primes[name] = next(prime for prime in usable if all(other < 1 or other % prime for other in others))
    return Coding(network=network, primes=primes, tensors=tensors)
