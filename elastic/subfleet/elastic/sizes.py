"""Sizes of many subnets at once: a column for each different size, a row for each subnet.

A size is a number times powers of axes, in a block that a subnet may leave out: a tensor's numbers, or what a value of
a training step takes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from subfleet.elastic.axes import kept_indices
from subfleet.elastic.network import Network
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Floats", "SizeTable"]

Floats = npt.NDArray[np.float64]
_Key = tuple[str | None, float, tuple[tuple[str, int], ...], tuple[str, ...], int]
_Told = tuple[Floats, Floats, npt.NDArray[np.int64], list[tuple[int, int, int]]]


class SizeTable:
    """The columns, and how they follow from what subnets keep.

    Args:
        network: whose subnets they are of.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._columns: dict[_Key, int] = {}
        self._compiled: _Told | None = None

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
            powers: of how many indices a subnet keeps of an axis.
            block: without which the size is 0; None for a part that is always kept.
            channels: axes of which too few make the size 0.
            least: indices of each of these that are enough.
        """
        key = (block, number, tuple(sorted(powers.items())), tuple(channels), least)
        return self._columns.setdefault(key, len(self._columns))

    def of(self, specs: Sequence[SubnetSpec]) -> Floats:
        """The sizes of subnets, which are not checked: (subnets, columns)."""
        axes, blocks = self._network.axes, [block.name for block in self._network.blocks]
        whole = {name: axis.size for name, axis in axes.items()}
        kept = [
            [*{**whole, **{name: len(kept_indices(one, axes[name].size)) for name, one in spec.axes}}.values()]
            for spec in specs
        ]
        within = [[name in spec.blocks for name in blocks] for spec in specs]
        return self._of(np.array(kept, dtype=np.float64), np.array(within, dtype=np.float64).reshape(len(specs), -1))

    def random(self, count: int) -> Floats:
        """The sizes of random subnets, of any width and depth alike: (subnets, columns)."""
        draw, axes = np.random.default_rng(0), self._network.axes.values()
        step = np.array([1 if axis.kind == "kernel" else axis.granularity for axis in axes])
        groups = np.array([axis.size for axis in axes]) / step
        kept = step * np.maximum(np.rint(groups ** draw.random((count, len(groups)))), 1)
        within = draw.random((count, len(self._network.blocks))) < draw.random((count, 1))
        return self._of(kept, np.float64(within))

    def _of(self, kept: Floats, within: Floats) -> Floats:
        """Args: kept: indices of each axis, (subnets, axes). within: 1 for each kept block, (subnets, blocks)."""
        numbers, powers, blocks, least = self._told()
        found: Floats = numbers * np.exp(np.log(kept) @ powers)
        found *= np.column_stack([within, np.ones(len(kept))])[:, blocks]
        for axis, column, channels in least:
            found[:, column] *= kept[:, axis] >= channels
        return found

    def _told(self) -> _Told:
        """What columns follow from: numbers, powers of axes, blocks, and the least size of an axis."""
        if self._compiled is None or len(self._compiled[0]) < len(self):
            axes = {name: place for place, name in enumerate(self._network.axes)}
            places: dict[str | None, int] = {block.name: place for place, block in enumerate(self._network.blocks)}
            powers = np.zeros((len(axes), len(self)))
            for (_, _, of_axes, _, _), column in self._columns.items():
                for name, power in of_axes:
                    powers[axes[name], column] = power
            numbers = np.array([key[1] for key in self._columns], dtype=np.float64)
            blocks = np.array([places.get(key[0], -1) for key in self._columns], dtype=np.int64)
            least = [(axes[name], column, key[4]) for key, column in self._columns.items() for name in key[3]]
            self._compiled = numbers, powers, blocks, least
        return self._compiled
