"""What a subnet costs, told from its shapes alone before any program is written."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from subfleet.elastic.axes import factors_of
from subfleet.elastic.network import Network
from subfleet.elastic.sizes import SizeTable
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Costs", "SubnetCost", "estimate_cost"]

_FLOAT_BYTES = 4
_WEIGHT_HALVES = 9
"""A step is a pure function: weights and momentum, each before and after it. Half of the gradients are there at once,
as the optimiser takes each as soon as the backward pass has told it: deep networks have fewer, shallow ones more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetCost:
    """The cost of one subnet.

    Attributes:
        parameters: numbers that it holds; exact.
        weight_bytes: of these as float32, without any container; exact.
        forward_macs: multiplications of one sample's forward pass in convolutions, linear and recurrent layers, and in
            attention; exact.
        training_memory_bytes: an estimate of the memory of one training step with momentum: weights, momentum and
            gradients, the batch, what the forward pass keeps for the backward pass, and the workspace of the largest
            layer. The planned peak of the exported program is the better number where there is one.
    """

    parameters: int
    weight_bytes: int
    forward_macs: int
    training_memory_bytes: int


def estimate_cost(network: Network, spec: SubnetSpec, *, batch_size: int) -> SubnetCost:
    """Count from the declaration.

    Args:
        network: the declaration.
        spec: the subnet.
        batch_size: samples of one training step, 1 or more.

    Raises:
        ConfigError: the spec is no subnet of this network, or batch_size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}, but must be 1 or more")
    parameters = macs = workspace = 0
    saved = math.prod(network.config.input_shape)
    shapes = network.shapes(spec)
    norms = {_layer_of(name) for name in shapes if network.tensors[name].role == "gain"}
    for name, shape in shapes.items():
        decl, count = network.tensors[name], math.prod(shape)
        parameters += count
        if decl.role in ("weight", "residual"):
            macs += count * decl.positions
            # The gradient of a layer's weight is a matrix product of its unfolded inputs and its outputs' gradient.
            workspace = max(workspace, (math.prod(shape[1:]) + shape[0]) * decl.positions)
        elif decl.role == "gain":
            # Beside these a norm keeps mean and spread of each group.
            saved += network.kept_of_norms * count * decl.positions + 2 * count // network.group_size
        elif decl.role == "bias" and _layer_of(name) not in norms:
            # A layer with a bias has no norm behind it, which would take it away: what follows keeps its output.
            saved += count * decl.positions
    for result, summed in _products(network, spec):
        macs += result * summed
        saved += result
    weight_bytes = parameters * _FLOAT_BYTES
    return SubnetCost(
        parameters=parameters,
        weight_bytes=weight_bytes,
        forward_macs=macs,
        training_memory_bytes=_WEIGHT_HALVES * weight_bytes // 2 + batch_size * (saved + workspace) * _FLOAT_BYTES,
    )


class Costs:
    """The exact part of what subnets cost, for searches that ask for thousands of them.

    Args:
        network: the declaration.
    """

    def __init__(self, network: Network) -> None:
        self._network, sizes = network, SizeTable(network)
        parameters, macs = Counter[int](), Counter[int]()
        for decl in network.tensors.values():
            factors = [one for dim, size in zip(decl.axes, decl.shape, strict=True) for one in factors_of(dim, size)]
            column = _column(sizes, factors, decl.block)
            parameters[column] += 1
            macs[column] += decl.positions if decl.role in ("weight", "residual") else 0
        for product in network.products:
            macs[_column(sizes, [*product.result, *product.summed], product.block)] += 1
        self._columns, self._told = sizes.columns(), np.zeros((len(sizes), 2))
        for place, counts in enumerate((parameters, macs)):
            self._told[list(counts), place] = list(counts.values())

    def of(self, specs: Sequence[SubnetSpec]) -> list[tuple[int, int]]:
        """Parameters, and multiply-accumulates of one sample's forward pass, of subnets, which are not checked."""
        found = np.rint(np.rint(self._columns.of(self._network, specs)) @ self._told)
        return [(int(parameters), int(macs)) for parameters, macs in found]


def _column(sizes: SizeTable, factors: Sequence[str | int], block: str | None) -> int:
    axes = Counter(factor for factor in factors if isinstance(factor, str))
    return sizes.column(math.prod(factor for factor in factors if isinstance(factor, int)), axes, block)


def _layer_of(tensor_name: str) -> str:
    return tensor_name.rpartition(".")[0]


def _products(network: Network, spec: SubnetSpec) -> Iterator[tuple[int, int]]:
    """Of each product of computed values in a subnet, how many numbers it gives, and how many each sums."""
    sizes = network.sizes(spec)
    for product in network.products:
        if product.block is None or product.block in spec.blocks:
            result, summed = (
                math.prod(factor if isinstance(factor, int) else sizes[factor] for factor in factors)
                for factors in (product.result, product.summed)
            )
            yield result, summed
