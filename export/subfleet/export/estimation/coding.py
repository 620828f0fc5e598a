"""Gives a network axes of prime sizes, so that each size in its program shows the axes that it is the product of.

A traced value of 2 * 3 * 3 * 29 * 43 numbers runs over the two axes with 29 and 43 groups: in a submodel that keeps 4
and 7 of these it has 2 * 3 * 3 * 4 * 7. Axes of layers that are far apart share a prime. A sum of axes is recognised by
a prime factor of its size: 29 + 39 = 4 * 17 runs over the sum that 17 stands for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from torch import nn

from subfleet.elastic.axes import Factors, Sums, add_sums
from subfleet.elastic.building import sized_module
from subfleet.elastic.network import LocalShapes, Network
from subfleet.protocol.errors import ExportError

_LEAST_PRIME, _FAR, _BORDER = 11, 16, 9
"""The number of tensors between layers that share a prime; the most by which borders and kernels enlarge inputs."""
_MOST_PRIME = 5_000
_WHOLE = frozenset({"class", "kernel"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """The primes of axes and sums.

    Attributes:
        sizes: sizes of all axes and sums.
        primes: the prime factor that stands for each axis that submodels cut, and for each sum.
        tensors: positions in the network of the tensors that run over each axis or sum.
    """

    network: Network
    sizes: Mapping[str, int]
    primes: Mapping[str, int]
    tensors: Mapping[str, tuple[int, ...]]

    @property
    def local_shapes(self) -> LocalShapes:
        """The shapes of the network in these sizes."""
        shapes = {decl.name: decl.local_shape(self.sizes) for decl in self.network.tensors.values()}
        return LocalShapes(sizes=self.sizes, tensors=shapes, parts=frozenset(self.network.parts))

    def build_module(self) -> nn.Module:
        """Build the network in these sizes; its weights are uninitialised, and never read."""
        return sized_module(self.network.config, self.local_shapes).to_empty(device="cpu")

    def decode(self, size: int, tensor: int) -> tuple[float, dict[str, int]]:
        """Decode a size of the coded program for submodels: a number times powers of what they keep of axes and sums.

        The size occurs in the layer of a tensor, given by its position in the network.
        """
        number, powers = float(size), dict[str, int]()
        for prime in dict.fromkeys(self.primes.values()):
            while size and size % prime == 0:
                size //= prime
                names = (name for name, own in self.primes.items() if own == prime)
                nearest = min(names, key=lambda name: min(abs(position - tensor) for position in self.tensors[name]))
                powers[nearest] = powers.get(nearest, 0) + 1
                number /= self.sizes[nearest]
        return number, powers


def code_axes(network: Network, batch_size: int) -> Coding:
    """Give each axis a prime that divides no other size of the program, such that the size of each sum has one, too.

    Raises:
        ExportError: there are no such primes.
    """
    config = network.config
    products = (size for product in network.products for size in (*product.result, *product.summed))
    fixed = (*config.input_shape, *(size for size in products if isinstance(size, int)))
    scales = {size >> halvings for size in fixed for halvings in range(size.bit_length())}
    others = {size + more for size in scales for more in range(-_BORDER, _BORDER)} | {batch_size, config.class_count}
    tensors = _list_tensors(network)
    primes: dict[str, int] = {}
    sizes = {name: axis.size for name, axis in network.axes.items() if name not in tensors or axis.kind in _WHOLE}
    sums, numbers = _find_coded_sums(network, sizes)
    others |= numbers
    for name in (name for name in tensors if name in network.axes and name not in sizes):
        for prime in (number for number in range(_MOST_PRIME) if _is_free(number, name, primes, tensors, others)):
            sizes[name] = network.axes[name].granularity * prime
            coded = _code_sums(sums, sizes, {**primes, name: prime}, tensors, others)
            if coded is not None:
                primes = coded
                break
        else:
            raise ExportError(
                f"the sizes of axis {name!r} and of the sums that it is part of cannot be told apart in the network's "
                "program, so its memory cannot be estimated; keep this axis whole"
            )
    return Coding(network=network, sizes=add_sums(network.sums, sizes), primes=primes, tensors=tensors)


def _find_coded_sums(network: Network, whole: Mapping[str, int]) -> tuple[Sums, set[int]]:
    """Find the sums that need a prime of their own, and the constant factors of all other sums.

    A sum whose parts are multiples of the same axes is recognised by the primes of these axes.
    """
    coded, numbers = dict[str, tuple[Factors, ...]](), set[int]()
    for name, parts in network.sums.items():
        products = {tuple(sorted(factor for factor in part if _is_cut(factor, whole))) for part in parts}
        if len(products) > 1:
            coded[name] = parts
        else:
            fixed = (tuple(factor for factor in part if not _is_cut(factor, whole)) for part in parts)
            numbers.add(add_sums({name: tuple(fixed)}, whole)[name])
    return coded, numbers


def _is_cut(factor: str | int, whole: Mapping[str, int]) -> TypeGuard[str]:
    return isinstance(factor, str) and factor not in whole


def _code_sums(
    sums: Sums,
    sizes: Mapping[str, int],
    primes: dict[str, int],
    tensors: Mapping[str, tuple[int, ...]],
    others: Collection[int],
) -> dict[str, int] | None:
    """Let the largest prime factor of a sum stand for it, if all of its axes have sizes; None if one cannot.

    Sums of the same parts in another order share their prime.
    """
    alike = {_sort_parts(sums[name]): prime for name, prime in primes.items() if name in sums}
    for name, parts in sums.items():
        if name in primes or not all(isinstance(factor, int) or factor in sizes for part in parts for factor in part):
            continue
        size = add_sums({name: parts}, sizes)[name]
        prime = max(_list_prime_factors(size))
        rest = _list_prime_factors(size // prime)
        if _sort_parts(parts) in alike:
            primes[name] = alike[_sort_parts(parts)]
            continue
        if max(rest, default=1) >= _LEAST_PRIME or not _is_free(prime, name, primes, tensors, others):
            return None
        primes[name] = alike[_sort_parts(parts)] = prime
    return primes


def _sort_parts(parts: Sequence[Factors]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(tuple(sorted(map(str, part))) for part in parts))


def _is_free(
    number: int,
    name: str,
    primes: Mapping[str, int],
    tensors: Mapping[str, tuple[int, ...]],
    others: Collection[int],
) -> bool:
    """Whether a number is a prime that divides no other size of the program near the tensors of an axis or sum."""
    if number < _LEAST_PRIME or _list_prime_factors(number) != [number]:
        return False
    near = {index + step for index in tensors[name] for step in range(-_FAR, _FAR)}
    used = any(own == number and not near.isdisjoint(tensors[other]) for other, own in primes.items())
    return not used and all(other < 1 or other % number for other in others)


def _list_prime_factors(number: int) -> list[int]:
    factors, factor = list[int](), 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            factors.append(factor)
            number //= factor
    return [*factors, number] if number > 1 else factors


def _list_tensors(network: Network) -> dict[str, tuple[int, ...]]:
    """Positions in the network of the tensors that run over each axis or sum; or over the axes of a sum."""
    tensors: dict[str, tuple[int, ...]] = {}
    for index, decl in enumerate(network.tensors.values()):
        sums = (factor for dim in decl.factors for factor in dim if factor in network.sums)
        for name in dict.fromkeys((*network.list_axes(decl), *map(str, sums))):
            tensors[name] = (*tensors.get(name, ()), index)
    for name, parts in network.sums.items():
        if name not in tensors:
            own = (tensors.get(str(factor), ()) for part in parts for factor in part)
            tensors[name] = tuple(sorted(index for indices in own for index in indices))
    return tensors
