"""The cost of a submodel, computed from its shapes before any program is exported."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import MappingProxyType

import numpy as np

from subfleet.elastic.axes import factor_sizes
from subfleet.elastic.network import Network
from subfleet.elastic.size_table import Floats, SizeTable
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

_FLOAT_BYTES = 4
_WEIGHT_HALVES = 9
"""A step is a pure function with weights and momentum before and after it. On average half of the gradients exist at
once, because the optimiser consumes each as soon as it is computed; fewer in deep networks, more in shallow ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmodelCost:
    """The cost of one submodel.

    Attributes:
        parameters: number of parameters; exact.
        weight_bytes: their size as float32 without a container; exact.
        forward_macs: multiply-accumulates of one sample's forward pass in convolutions, linear and recurrent layers,
            and attention; exact.
        training_memory_bytes: estimated memory of a training step with momentum: weights, momentum, gradients, the
            batch, values kept for the backward pass, and the workspace of the largest layer. The planned peak of an
            exported program is more accurate.
    """

    parameters: int
    weight_bytes: int
    forward_macs: int
    training_memory_bytes: int


def estimate_cost(network: Network, architecture: Architecture, *, batch_size: int) -> SubmodelCost:
    """Estimate the cost of a submodel from the declaration.

    All tensors of a subspace count for parameters and bytes. For multiply-accumulates and memory beside the weights
    only the cheapest path counts, because a device draws paths within its budget.

    Args:
        network: the network.
        architecture: the submodel.
        batch_size: samples of one training step, at least 1.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or batch_size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}, but must be 1 or more")
    parts, parameters = _parts_costs(network, architecture)
    chosen = {part for choice in network.choices.values() for part in choice.parts}
    always = [cost for part, cost in parts.items() if part not in chosen]
    cheapest = [
        [parts.get(f"{name}.{operator}", _PartCost()) for operator in operators]
        for name, operators in network.operators_of(architecture).items()
    ]
    macs = sum(cost.macs for cost in always) + sum(min(cost.macs for cost in choice) for choice in cheapest)
    workspace = max(
        [cost.workspace for cost in always] + [min(cost.workspace for cost in choice) for choice in cheapest], default=0
    )
    weight_bytes = parameters * _FLOAT_BYTES
    if network.is_path(architecture):
        saved = math.prod(network.config.input_shape) + sum(cost.saved for cost in parts.values())
        weights_bytes = _WEIGHT_HALVES * weight_bytes // 2
    else:  # blocks are recomputed and keep only their inputs
        saved, weights_bytes = math.prod(network.config.input_shape), 2 * weight_bytes
    return SubmodelCost(
        parameters=parameters,
        weight_bytes=weight_bytes,
        forward_macs=macs,
        training_memory_bytes=weights_bytes + batch_size * (saved + workspace) * _FLOAT_BYTES,
    )


@dataclass(slots=True)
class _PartCost:
    """The cost of a part of a network, for one sample.

    Attributes:
        macs: multiply-accumulates of the forward pass.
        saved: numbers that are kept for the backward pass.
        workspace: numbers in the workspace of its largest layer.
    """

    macs: int = 0
    saved: int = 0
    workspace: int = 0


def _parts_costs(network: Network, architecture: Architecture) -> tuple[dict[str | None, _PartCost], int]:
    """The cost of each part of a submodel (None: parts that are always kept), and its number of parameters."""
    parts: dict[str | None, _PartCost] = {}
    parameters, shapes = 0, network.shapes(architecture)
    norms = {_layer_of(name) for name in shapes if network.tensors[name].role == "gain"}
    for name, shape in shapes.items():
        decl, count = network.tensors[name], math.prod(shape)
        own = parts.setdefault(decl.part, _PartCost())
        parameters += count
        if decl.role in ("weight", "residual"):
            own.macs += count * decl.positions
            # The gradient of a layer's weight is a matrix product of its unfolded inputs and its outputs' gradient.
            own.workspace = max(own.workspace, (math.prod(shape[1:]) + shape[0]) * decl.positions)
        elif decl.role == "gain":
            # A norm also keeps mean and variance of each group.
            own.saved += network.kept_of_norms * count * decl.positions + 2 * count // network.group_size
        elif decl.role == "bias" and _layer_of(name) not in norms:
            # A layer with a bias has no norm after it, so the next layer keeps its output.
            own.saved += count * decl.positions
    for part, result, summed in _products(network, architecture):
        own = parts.setdefault(part, _PartCost())
        own.macs += result * summed
        own.saved += result
    return parts, parameters


class Costs:
    """The exact costs of submodels, for searches that compare thousands of them.

    Args:
        network: the network.
    """

    def __init__(self, network: Network) -> None:
        self._network, sizes = network, SizeTable(network)
        parameters, macs = Counter[int](), Counter[int]()
        for decl in network.tensors.values():
            column = _column(sizes, [*chain.from_iterable(decl.factors)], decl.part)
            parameters[column] += 1
            macs[column] += decl.positions if decl.role in ("weight", "residual") else 0
        for product in network.products:
            macs[_column(sizes, [*product.result, *product.summed], product.part)] += 1
        self._columns, self._counts = sizes.columns(), np.zeros((len(sizes), 2))
        for kind, counts in enumerate((parameters, macs)):
            self._counts[list(counts), kind] = list(counts.values())

    def of(self, architectures: Sequence[Architecture]) -> list[tuple[int, int]]:
        """Parameters and forward multiply-accumulates for one sample of submodels; the submodels are not checked.

        For a subspace, the multiply-accumulates of its cheapest path.
        """
        sizes = np.rint(self._columns.of(self._network, architectures))
        costs = np.rint(sizes @ self._counts)
        if self._network.choices:
            costs[:, 1] -= self._unused_macs(sizes * self._counts[:, 1], architectures)
        return [(int(parameters), int(macs)) for parameters, macs in costs]

    def compute_by_part(self, architecture: Architecture) -> dict[str, tuple[int, int]]:
        """The same costs for each kept part of a submodel, by name; the empty name is all that is always kept."""
        costs = np.rint(self._columns.of(self._network, [architecture]))[0][:, None] * self._counts
        columns = {"": -1} | {name: column for column, name in enumerate(self._network.parts)}
        parts = {"", *self._network.parts_of(architecture)}
        sums = {
            name: costs[self._columns.blocks == column].sum(axis=0) for name, column in columns.items() if name in parts
        }
        return {name: (round(parameters), round(macs)) for name, (parameters, macs) in sums.items()}

    def _unused_macs(self, macs: Floats, architectures: Sequence[Architecture]) -> Floats:
        """Multiply-accumulates of the operators that are not on the cheapest path: (submodels,)."""
        columns = {name: column for column, name in enumerate(self._network.parts)}
        unused = np.zeros(len(architectures))
        for row, architecture in enumerate(architectures):
            for name, operators in self._network.operators_of(architecture).items():
                own = [macs[row, self._columns.blocks == columns[f"{name}.{operator}"]].sum() for operator in operators]
                unused[row] += sum(own) - min(own)
        return unused


@lru_cache(maxsize=8)  # a supernet has thousands of tensors, and each client needs its costs
def part_costs(network: Network) -> Mapping[str, tuple[int, int]]:
    """Parameters and multiply-accumulates of each part of a whole network; see `Costs.compute_by_part`."""
    return MappingProxyType(Costs(network).compute_by_part(network.full_architecture()))


def _column(sizes: SizeTable, factors: Sequence[str | int], block: str | None) -> int:
    axes = Counter(factor for factor in factors if isinstance(factor, str))
    return sizes.column(math.prod(factor for factor in factors if isinstance(factor, int)), axes, block)


def _layer_of(tensor_name: str) -> str:
    return tensor_name.rpartition(".")[0]


def _products(network: Network, architecture: Architecture) -> Iterator[tuple[str | None, int, int]]:
    """For each product of computed values in a submodel: its part, the size of its result, and the summed size."""
    sizes, parts = network.sizes(architecture), network.parts_of(architecture)
    for product in network.products:
        if product.part is None or product.part in parts:
            result, summed = (math.prod(factor_sizes(own, sizes)) for own in (product.result, product.summed))
            yield product.part, result, summed
