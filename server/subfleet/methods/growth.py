"""The networks of FedTrans: what they share, how useful they are to clients, and how one grows from another."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage, Replicated
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.methods.selector import LastUpdate

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.inheriting import Descent, MappedTensor
    from subfleet.methods.fedtrans import FedTrans

Share = Literal["transform", "crop", "none"]
"""Where a smaller network lies in a larger one: "transform", where its growth map puts it; "crop", in the front of
every axis, as published; "none" shares nothing."""
Utilities = Mapping[str, Mapping[str, float]]
"""By client that has trained, the utility of each network."""

_LARGEST = 10.0
"""The largest utility; differences above 20 make no difference in a softmax."""
_USUAL = 10.0
"""The largest loss that counts, as a multiple of the median of a round."""
_ALIKE = 1e-8
"""Standard deviation of losses below which no loss is unusual."""


def similarity(smaller: int, larger: int) -> float:
    """The similarity of two networks of one lineage, above 0 to 1 (FedTrans, section 4.2).

    The paper counts each cell of the larger one: 1 if it is unchanged, the fraction of its parameters that the smaller
    one has if it was widened, 0 if it was inserted. Weighted by parameters, the mean is the fraction of all of them,
    and similarities along a lineage multiply to that of its ends.

    Args:
        smaller: parameters in the cells of the smaller network, 1 or more.
        larger: parameters in the cells of the larger one.
    """
    return min(1.0, smaller / larger)


def odds(utilities: Sequence[float]) -> list[float]:
    """The probabilities of networks, above 0 and with sum 1: the softmax of their utilities (equation 2)."""
    largest = max(utilities)
    powers = [math.exp(utility - largest) for utility in utilities]
    return [power / math.fsum(powers) for power in powers]


def clip_losses(losses: Mapping[str, float]) -> dict[str, float]:
    """A round's losses by client, each from 0 to ten times their median.

    A client may claim any loss. Clipped, one of several clients decides neither which losses are unusual nor whether a
    network has learned.
    """
    largest = _USUAL * max(0.0, statistics.median(losses.values())) if losses else 0.0
    return {name: min(max(loss, 0.0), largest) for name, loss in losses.items()}


def update_utilities(
    utilities: Utilities, clients: Mapping[str, LastUpdate], parameters: Mapping[str, int]
) -> Utilities:
    """The utilities after a round (equation 4).

    If a client's loss is so many standard deviations above the mean of the round, the utility of each network for it
    falls by as much, times the network's similarity to the one that the client trained. If no loss is unusual, nothing
    changes.

    Args:
        utilities: before.
        clients: by id, what they trained.
        parameters: by network, those in its cells.

    Returns:
        Utilities from -10 to 10.
    """
    losses = clip_losses({name: past.loss for name, past in clients.items()})
    mean = math.fsum(losses.values()) / len(losses) if losses else 0.0
    deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses.values()) / len(losses)) if losses else 0.0
    if deviation < _ALIKE:
        return utilities
    after = dict(utilities)
    for name, past in clients.items():
        trained, own = parameters[past.size.network], utilities.get(name, {})
        standard = (losses[name] - mean) / deviation
        moved = {}
        for network, count in parameters.items():
            value = own.get(network, 0.0) - standard * similarity(*sorted((count, trained)))
            moved[network] = min(max(value, -_LARGEST), _LARGEST)
        after[name] = moved
    return after


def inherit_utilities(utilities: Utilities, born: str, parent: str) -> Utilities:
    """The utilities with those of a new network, which are its parent's."""
    return {name: {**own, born: own[parent]} if parent in own else own for name, own in utilities.items()}


def share_weights(
    method: FedTrans,
    lineages: Sequence[Lineage],
    networks: Mapping[str, Network],
    states: Mapping[str, Mapping[str, Tensor]],
    parameters: Mapping[str, int],
    round_number: int,
) -> dict[str, dict[str, Tensor]]:
    """The networks' weights after they have shared, in addition to the mean of each (equation 5).

        W_j <- (W_j + sum_i c_ij T_ij(W_i)) / (1 + sum_i c_ij),   c_ij = decay^t s_ij,   i grew before j

    Elements that a network alone has keep their bits. If T_ij copies elements, W_i replaces the part of W_j that i can
    represent, and the differences between copies remain j's own. Otherwise each round would pull the copies together
    again, and a wider network could never do more than the one that it grew from.

    Without `FedTrans.normalised`, the divisor has no decay, as printed, and a network loses a part of its weights in
    every round.

    Args:
        method: its parameters `share`, `decay`, `decay_by`, `normalised` and `large_to_small`.
        lineages: of the networks; each grew from the one before.
        networks: by id, their declarations.
        states: by id, their weights.
        parameters: by id, those in their cells.
        round_number: of the aggregated round.
    """
    from subfleet.elastic.inheriting import Descent

    mixed = {lineage.id: dict(states[lineage.id]) for lineage in lineages}
    if method.share == "none":
        return mixed
    steps = [
        Descent.of(networks[child.id], networks[parent.id], child.map, method.share)
        for parent, child in pairwise(lineages)
    ]
    own = [states[lineage.id] for lineage in lineages]
    for index, lineage in enumerate(lineages):
        givers = _weigh_givers(method, index, lineages, parameters, round_number)
        for name in own[index]:  # tensor by tensor, to hold few copies at a time
            given = [
                (count, weight, _give(name, own, other, index, steps))
                for other, (count, weight) in givers.items()
                if name in own[other]
            ]
            if given:
                mixed[lineage.id][name] = _average(own[index][name], given)
    return mixed


def _weigh_givers(
    method: FedTrans, index: int, lineages: Sequence[Lineage], parameters: Mapping[str, int], round_number: int
) -> dict[int, tuple[float, float]]:
    """By index of a network that gives to this one: what its elements add to the divisor, and their weight."""
    givers = {}
    for other in range(len(lineages) if method.large_to_small else index):
        first, second = (lineages[end] for end in sorted((index, other)))
        since = second.born_round if method.decay_by == "network" else 0
        fading = method.decay ** (round_number - since)
        alike = similarity(parameters[first.id], parameters[second.id])
        if other != index and fading > 0:
            givers[other] = (alike * (fading if method.normalised else 1.0), alike * fading)
    return givers


def _average(own: Tensor, images: Sequence[tuple[float, float, MappedTensor]]) -> Tensor:
    """A tensor averaged with what others give for the elements that they have."""
    import torch

    total, count = own.double(), torch.ones((), dtype=torch.float64, device=own.device)
    for counted, weight, image in images:
        if image.held is None:
            total, count = total + weight * image.values, count + counted
        else:
            total, count = total + weight * image.values * image.held, count + counted * image.held
    return torch.where(count > 1, (total / count).to(own.dtype), own)


def _give(
    name: str, own: Sequence[Mapping[str, Tensor]], giver: int, taker: int, steps: Sequence[Descent]
) -> MappedTensor:
    """What a network gives to another one: in copies of its own elements, plus the differences between these copies."""
    from subfleet.elastic.inheriting import MappedTensor

    image = _project(name, MappedTensor(values=own[giver][name].double()), giver, taker, steps)
    if taker < giver:
        return image
    whole = MappedTensor(values=own[taker][name].double())
    alike = _project(name, _project(name, whole, taker, giver, steps), giver, taker, steps)
    return replace(image, values=image.values + (whole.values - alike.values))


def _project(name: str, image: MappedTensor, start: int, end: int, steps: Sequence[Descent]) -> MappedTensor:
    """A tensor of a network as another one of the lineage has it."""
    for step in steps[start:end]:
        image = step.down(name, image)
    for step in reversed(steps[end:start]):
        image = step.up(name, image)
    return image


Shares = Literal["drawn", "equal"]
"""How the weights that read a widened cell are divided among copies: in drawn fractions, so that copies diverge in
training, or equally, with which they stay equal."""


def convergence(losses: Sequence[float], *, gamma: int, delta: int) -> float:
    """The degree of convergence: the recent fall of the loss per round; infinite with too few losses.

    It is the mean, over the last `gamma` rounds, of the fall per round over the `delta` rounds before each (equation 1;
    its index has two meanings).

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
    result = {}
    for cell in network.cells:
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
        wide: cells of the next network that became wider in their last change.
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
    """Change some cells of a network: cells that were not widened last become wider, the others deeper.

    A cell without a width of its own always becomes deeper, and one after which nothing can be inserted always wider.
    Cells that share their width become wider together.

    Args:
        network: before.
        cells: to be changed.
        wide: cells that became wider in their last change.
        factor: by which cells become wider, above 1.
        inserted: cells after one that becomes deeper, 1 or more.

    Returns:
        None if no cell can be changed.
    """
    from subfleet.elastic.growing import can_deepen, deepen_cell, widen_cells

    every = network.cells
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
    replication = Replication.draw(grown, size_in(grown, network), stream)
    if shares == "drawn":
        replication = replication.draw_shares(stream)
    return Replicated(
        sources=tuple(sorted(replication.sources.items())), shares=tuple(sorted(replication.shares.items()))
    )
