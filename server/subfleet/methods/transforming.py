"""The network that grows from one that has stopped learning: which cells change, and how (FedTrans, section 4.1)."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Replicated
from subfleet.elastic.network import Network

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

Shares = Literal["drawn", "equal"]
"""How the weights that read a widened cell are divided among copies: in drawn fractions, so that copies diverge in
training, or equally, with which they stay equal."""


def extend_average(losses: Sequence[float], loss: float, fraction: float) -> tuple[float, ...]:
    """A series of moving averages with the next one, in which a new loss counts this fraction."""
    return (*losses, loss if not losses else (1 - fraction) * losses[-1] + fraction * loss)


def convergence(losses: Sequence[float], *, gamma: int, delta: int) -> float:
    """The degree of convergence: the recent fall of the loss per round; infinite with too few losses.

    It is the mean, over the last `gamma` rounds, of the fall per round over the `delta` rounds before each (equation 1,
    whose index has two meanings).

    Args:
        losses: one for each round, the latest last.
        gamma: rounds of the mean, 1 or more.
        delta: rounds over which each fall is measured, 1 or more.
    """
    if len(losses) < gamma + delta:
        return math.inf
    last = len(losses) - 1
    return math.fsum((losses[last - back - delta] - losses[last - back]) / delta for back in range(gamma)) / gamma


def activeness(network: Network, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """By cell, the norm of its change in a round, as a fraction of the norm of its weights before.

    Running statistics do not count. It is 0 for a cell without weights, or with weights of 0 only.
    """
    from subfleet.elastic.growing import list_cells
    from subfleet.elastic.network import BUFFER_ROLES

    result = {}
    for cell in list_cells(network):
        names = [
            name
            for name, decl in network.tensors.items()
            if name.startswith(f"{cell.name}.") and decl.role not in BUFFER_ROLES
        ]
        moved = math.fsum(float((after[name].double() - before[name].double()).square().sum()) for name in names)
        weights = math.fsum(float(before[name].double().square().sum()) for name in names)
        result[cell.name] = math.sqrt(moved / weights) if weights else 0.0
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformation:
    """How a network changes.

    Attributes:
        config: settings of the next network.
        widened: cells that become wider.
        deepened: cells after which others are inserted.
        wide: cells of the next network whose last change was to become wider.
    """

    config: AnyFamily
    widened: tuple[str, ...]
    deepened: tuple[str, ...]
    wide: tuple[str, ...]

    @property
    def words(self) -> str:
        """The changes in words."""
        parts = {"wider": self.widened, "deeper": self.deepened}
        return ", ".join(f"{' and '.join(cells)} {how}" for how, cells in parts.items() if cells)


def transform_cells(
    network: Network, cells: Collection[str], wide: Collection[str], *, factor: float, inserted: int
) -> Transformation | None:
    """Change some cells of a network: those that were not widened last become wider, the others deeper.

    A cell without a width of its own always becomes deeper, and one after which nothing can be inserted always wider.
    Cells that share their width become wider together.

    Args:
        network: before.
        cells: to be changed.
        wide: cells whose last change was to become wider.
        factor: by which cells become wider, above 1.
        inserted: cells after one that becomes deeper, 1 or more.

    Returns:
        None if no cell can be changed.
    """
    from subfleet.elastic.growing import can_deepen, deepen_cell, list_cells, widen_cells

    every = list_cells(network)
    deeper = [
        cell
        for cell in every
        if cell.name in cells and (cell.name in wide or not cell.axes) and can_deepen(network, cell)
    ]
    names = {cell.name for cell in deeper}
    wider = [cell for cell in every if cell.name in cells and cell.axes and cell.name not in names]
    if not deeper and not wider:
        return None
    config: AnyFamily = network.config
    if wider:
        config = widen_cells(config, [cell.name for cell in wider], factor)
    for cell in deeper:
        config = deepen_cell(config, cell, inserted)
    longer = {axis for cell in wider for axis in cell.axes}
    return Transformation(
        config=config,
        widened=tuple(cell.name for cell in wider),
        deepened=tuple(cell.name for cell in deeper),
        wide=tuple(
            cell.name for cell in every if longer & {*cell.axes} or (cell.name in wide and cell.name not in names)
        ),
    )


def draw_copies(network: Network, config: AnyFamily, stream: random.Random, *, shares: Shares) -> Replicated:
    """The map by which a network grows: the index that each index of the grown one copies, and the copies' fractions.

    Args:
        network: the one that it grows from.
        config: settings of the grown one.
        stream: the source of copies and fractions.
        shares: how the copies of one index divide it.
    """
    from subfleet.elastic.building import network_of
    from subfleet.elastic.replication import Replication, size_in

    grown = network_of(config)
    replication = Replication.drawn(grown, size_in(grown, network), stream)
    if shares == "drawn":
        replication = replication.draw_shares(stream)
    return Replicated(
        sources=tuple(sorted(replication.sources.items())), shares=tuple(sorted(replication.shares.items()))
    )
