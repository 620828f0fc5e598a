"""Sizes of many submodels at once: a column for each different size, a row for each submodel.

A size is a number times powers of axes, in a block that a submodel may leave out: a tensor's numbers, or what a value
of a training step takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subfleet.elastic.axes import kept_indices
from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Architecture

__all__ = ["Floats", "SizeColumns", "SizeTable"]

Floats = npt.NDArray[np.float64]
_Key = tuple[str | None, float, tuple[tuple[str, int], ...], tuple[str, ...], int]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeColumns:
    """What columns of sizes follow from: plain arrays, which read nothing and change nothing.

    Attributes:
        numbers: that powers of axes are multiplied with, (columns,).
        powers: of how many indices a submodel keeps of each axis, (axes, columns).
        blocks: places among the network's parts of those that columns belong to, (columns,); -1 for what
            is always kept.
        least: axis, column, and the indices of the axis below which the column is 0, (rules, 3).
    """

    numbers: Floats
    powers: Floats
    blocks: Integers
    least: Integers

    def of(self, network: Network, architectures: Sequence[Architecture]) -> Floats:
        """The sizes of submodels of the network that this was made for; they are not checked: (submodels, columns)."""
        axes, parts = network.axes, network.parts
        whole = {name: axis.size for name, axis in axes.items()}
        kept = [
            [*{**whole, **{name: len(kept_indices(one, axes[name].size)) for name, one in architecture.axes}}.values()]
            for architecture in architectures
        ]
        within = [[name in held for name in parts] for held in map(network.parts_of, architectures)]
        return self.at(
            np.array(kept, dtype=np.float64), np.array(within, dtype=np.float64).reshape(len(architectures), -1)
        )

    def at(self, kept: Floats, within: Floats) -> Floats:
        """The sizes of submodels: (submodels, columns).

        Args:
            kept: indices of each axis, (submodels, axes).
            within: 1 for each kept part, (submodels, parts).
        """
        found: Floats = self.numbers * np.exp(np.log(kept) @ self.powers)
        found *= np.column_stack([within, np.ones(len(kept))])[:, self.blocks]
        for axis, column, channels in self.least:
            found[:, column] *= kept[:, axis] >= channels
        return found


class SizeTable:
    """Collects columns, and tells how they follow from what submodels keep.

    Args:
        network: whose submodels they are of.
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
        channels: Sequence[str] = (),
        least: int = 0,
    ) -> int:
        """The column of a size.

        Args:
            number: that the powers are multiplied with.
            powers: of how many indices a submodel keeps of an axis.
            block: the part without which the size is 0; None for what is always kept.
            channels: axes of which too few make the size 0.
            least: indices of each of these that are enough.
        """
        key = (block, number, tuple(sorted(powers.items())), tuple(channels), least)
        return self._columns.setdefault(key, len(self._columns))

    def of(self, architectures: Sequence[Architecture]) -> Floats:
        """The sizes of submodels, which are not checked: (submodels, columns)."""
        return self.columns().of(self._network, architectures)

    def random(self, count: int) -> Floats:
        """The sizes of random submodels, of any width and depth alike: (submodels, columns)."""
        draw, axes = np.random.default_rng(0), self._network.axes.values()
        step = np.array([1 if axis.kind == "kernel" else axis.granularity for axis in axes])
        groups = np.array([axis.size for axis in axes]) / step
        kept = step * np.maximum(np.rint(groups ** draw.random((count, len(groups)))), 1)
        within = draw.random((count, len(self._network.parts))) < draw.random((count, 1))
        return self.columns().at(kept, np.float64(within))

    def columns(self) -> SizeColumns:
        """The columns so far, as arrays."""
        axes = {name: place for place, name in enumerate(self._network.axes)}
        places: dict[str | None, int] = {name: place for place, name in enumerate(self._network.parts)}
        powers = np.zeros((len(axes), len(self)))
        for (_, _, of_axes, _, _), column in self._columns.items():
            for name, power in of_axes:
                powers[axes[name], column] = power
        least = [(axes[name], column, key[4]) for key, column in self._columns.items() for name in key[3]]
        return SizeColumns(
            numbers=np.array([key[1] for key in self._columns], dtype=np.float64),
            powers=powers,
            blocks=np.array([places.get(key[0], -1) for key in self._columns], dtype=np.int64),
            least=np.array(least, dtype=np.int64).reshape(-1, 3),
        )
