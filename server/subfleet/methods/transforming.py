"""From a network that learns little more to the one that takes over: which cells change, and how (FedTrans, 4.1)."""

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

__all__ = ["Shares", "Transformation", "activeness", "convergence", "copied", "moving", "transformed"]

Shares = Literal["drawn", "equal"]
"""How what reads a widened cell is divided among copies: in shares that are drawn, so that copies part in training, or
equally, by which they stay equal for ever."""


def moving(losses: Sequence[float], loss: float, share: float) -> tuple[float, ...]:
    """A row of moving losses with the next one, in which a new loss counts its share."""
    return (*losses, loss if not losses else (1 - share) * losses[-1] + share * loss)


def convergence(losses: Sequence[float], *, gamma: int, delta: int) -> float:
    """The degree of convergence: how much the loss has fallen a round, of late; infinite before it can be told.

    The mean over the last `gamma` rounds of what the loss fell in the `delta` rounds before each, for each of these
    (equation 1, whose index means two things).

    Args:
        losses: one a round, the latest last.
        gamma: rounds that are looked at, 1 or more.
        delta: rounds over which each fall is measured, 1 or more.
    """
    if len(losses) < gamma + delta:
        return math.inf
    last = len(losses) - 1
    return math.fsum((losses[last - back - delta] - losses[last - back]) / delta for back in range(gamma)) / gamma


def activeness(network: Network, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """How far a round has moved each cell: the norm of its change, as a fraction of that of its weights before.

    Running statistics take no part. A cell without weights, or of zeros alone, has none.
    """
    from subfleet.elastic.cells import list_cells
    from subfleet.elastic.network import BUFFER_ROLES

    found = {}
    for cell in list_cells(network):
        names = [
            name
            for name, decl in network.tensors.items()
            if name.startswith(f"{cell.name}.") and decl.role not in BUFFER_ROLES
        ]
        moved = math.fsum(float((after[name].double() - before[name].double()).square().sum()) for name in names)
        weights = math.fsum(float(before[name].double().square().sum()) for name in names)
        found[cell.name] = math.sqrt(moved / weights) if weights else 0.0
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformation:
    """What becomes of a network.

    Attributes:
        config: settings of the next one.
        widened: cells that become wider.
        deepened: cells behind which others are inserted.
        wide: cells of the next one whose last change was to become wider.
    """

    config: AnyFamily
    widened: tuple[str, ...]
    deepened: tuple[str, ...]
    wide: tuple[str, ...]

    @property
    def told(self) -> str:
        """What was changed, for people."""
        parts = {"wider": self.widened, "deeper": self.deepened}
        return ", ".join(f"{' and '.join(cells)} {how}" for how, cells in parts.items() if cells)


def transformed(
    network: Network, cells: Collection[str], wide: Collection[str], *, factor: float, inserted: int
) -> Transformation | None:
    """A network with some of its cells changed: wider where they were not widened last, else deeper.

    A cell that has no width of its own becomes deeper, and one that nothing can be inserted behind becomes wider, in
    every turn. Where cells share their width, all of them become wider with one.

    Args:
        network: as it is.
        cells: that are changed.
        wide: cells whose last change was to become wider.
        factor: by which cells become wider, above 1.
        inserted: cells behind one that becomes deeper, 1 or more.

    Returns:
        None where none of them can be changed.
    """
    from subfleet.elastic.cells import can_deepen, deepen_cell, list_cells, widen_cells

    every = list_cells(network)
    deeper = [
        cell
        for cell in every
        if cell.name in cells and (cell.name in wide or not cell.axes) and can_deepen(network, cell)
    ]
    behind = {cell.name for cell in deeper}
    wider = [cell for cell in every if cell.name in cells and cell.axes and cell.name not in behind]
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
            cell.name for cell in every if longer & {*cell.axes} or (cell.name in wide and cell.name not in behind)
        ),
    )


def copied(network: Network, config: AnyFamily, stream: random.Random, *, shares: Shares) -> Replicated:
    """The map by which a network grows: what each index of the grown one copies, and how much each copy counts.

    Args:
        network: the one that it grows from.
        config: settings of the grown one.
        stream: that the copies, and their shares, are drawn from.
        shares: of the copies of one index.
    """
    from subfleet.elastic.building import network_of
    from subfleet.elastic.replication import Replication, size_in

    grown = network_of(config)
    found = Replication.drawn(grown, size_in(grown, network), stream)
    if shares == "drawn":
        found = found.draw_shares(stream)
    return Replicated(sources=tuple(sorted(found.sources.items())), shares=tuple(sorted(found.shares.items())))
