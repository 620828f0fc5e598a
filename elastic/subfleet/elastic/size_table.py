"""Tables of sizes for many submodels: a column for each size, a row for each submodel.

A size is a number times powers of axis sizes, in a block that a submodel may leave out. It counts the elements of a
tensor or of a value of a training step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from subfleet.elastic.axes import list_indices
from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Architecture

Floats = npt.NDArray[np.float64]
_Powers = tuple[tuple[str, int], ...]
_Key = tuple[str | None, float, _Powers, _Powers]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeColumns:
    """The columns of a size table as arrays.

    Attributes:
        numbers: constant factors, (columns,).
        powers: powers of the kept sizes of axes and sums, (axes and sums, columns).
        blocks: index of the part of each column among the network's parts, (columns,); -1 if it is always kept.
        least: axis, column, and the kept size of the axis below which the column is 0, (rules, 3).
    """

    numbers: Floats
    powers: Floats
    blocks: Integers
    least: Integers

    def of(self, network: Network, architectures: Sequence[Architecture]) -> Floats:
        """The sizes of submodels of the table's network, which are not checked: (submodels, columns)."""
        axes, parts = network.axes, network.parts
        whole = {name: axis.size for name, axis in axes.items()}
        counts = [
            [*{**whole, **{name: len(list_indices(own, axes[name].size)) for name, own in architecture.axes}}.values()]
            for architecture in architectures
        ]
        within = [[name in held for name in parts] for held in map(network.parts_of, architectures)]
        return self.compute_sizes(
            _append_sums(network, np.array(counts, dtype=np.float64)),
            np.array(within, dtype=np.float64).reshape(len(architectures), -1),
        )

    def compute_sizes(self, counts: Floats, within: Floats) -> Floats:
        """The sizes of submodels: (submodels, columns).

        Args:
            counts: kept size of each axis and sum, (submodels, axes and sums).
            within: 1 for each kept part, else 0, (submodels, parts).
        """
        sizes: Floats = self.numbers * np.exp(np.log(counts) @ self.powers)
        sizes *= np.column_stack([within, np.ones(len(counts))])[:, self.blocks]
        for axis, column, least in self.least:
            sizes[:, column] *= counts[:, axis] >= least
        return sizes


class SizeTable:
    """Collects the columns of a size table.

    Args:
        network: the network of the submodels.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._columns: dict[_Key, int] = {}

    def __len__(self) -> int:
        return len(self._columns)

    def column(
        self,
        number: float,
        powers: Mapping[str, int],
        block: str | None,
        *,
        least: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """The index of the column of a size, which is added if it is new.

        Args:
            number: constant factor.
            powers: powers of the kept sizes of axes and sums, by name.
            block: the part without which the size is 0; None if it is always kept.
            least: kept sizes of axes below which the size is 0, by name.
        """
        key = (block, number, tuple(sorted(powers.items())), tuple(sorted(least.items())))
        return self._columns.setdefault(key, len(self._columns))

    def of(self, architectures: Sequence[Architecture]) -> Floats:
        """The sizes of submodels, which are not checked: (submodels, columns)."""
        return self.columns().of(self._network, architectures)

    def random(self, count: int) -> Floats:
        """The sizes of random submodels, uniform over widths and depths: (submodels, columns)."""
        draw, axes = np.random.default_rng(0), self._network.axes.values()
        step = np.array([1 if axis.kind == "kernel" else axis.granularity for axis in axes])
        groups = np.array([axis.size for axis in axes]) / step
        counts = step * np.maximum(np.rint(groups ** draw.random((count, len(groups)))), 1)
        within = draw.random((count, len(self._network.parts))) < draw.random((count, 1))
        return self.columns().compute_sizes(_append_sums(self._network, counts), np.float64(within))

    def columns(self) -> SizeColumns:
        """The columns so far, as arrays."""
        axes = {name: index for index, name in enumerate((*self._network.axes, *self._network.sums))}
        parts: dict[str | None, int] = {name: index for index, name in enumerate(self._network.parts)}
        powers = np.zeros((len(axes), len(self)))
        for (_, _, of_axes, _), column in self._columns.items():
            for name, power in of_axes:
                powers[axes[name], column] = power
        least = [(axes[name], column, size) for key, column in self._columns.items() for name, size in key[3]]
        return SizeColumns(
            numbers=np.array([key[1] for key in self._columns], dtype=np.float64),
            powers=powers,
            blocks=np.array([parts.get(key[0], -1) for key in self._columns], dtype=np.int64),
            least=np.array(least, dtype=np.int64).reshape(-1, 3),
        )


def _append_sums(network: Network, counts: Floats) -> Floats:
    """The sizes of axes and sums, given the former: (submodels, axes and sums)."""
    if not network.sums:
        return counts
    by_axis = dict(zip(network.axes, counts.T, strict=True))
    sums = [
        sum(math.prod(factor if isinstance(factor, int) else by_axis[factor] for factor in part) for part in parts)
        for parts in network.sums.values()
    ]
    return np.column_stack([counts, *(np.broadcast_to(size, len(counts)) for size in sums)])
