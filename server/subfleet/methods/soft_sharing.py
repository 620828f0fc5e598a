"""Networks of one lineage share weights and clients' utilities, by their similarity (FedTrans, equations 2 to 5)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Network
from subfleet.methods.selector import LastUpdate

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.inheriting import Descent, MappedTensor

Share = Literal["transform", "crop", "none"]
"""Where a smaller network lies in a larger one: "transform", where its growth map puts it; "crop", in the front of
every axis, as published; "none" shares nothing."""
DecayBy = Literal["network", "run"]
"""The first round of the decay: when the network appeared, or when the run began."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftSharing:
    """How networks of a lineage share weights, in addition to the mean of each.

        W_j <- (W_j + sum_i c_ij T_ij(W_i)) / (1 + sum_i c_ij),   c_ij = decay^t s_ij,   i grew before j

    Elements that a network alone has keep their bits. If T_ij copies elements, W_i replaces the part of W_j that i can
    represent, and the differences between copies remain j's own. Otherwise each round would pull the copies together
    again, and a wider network could never do more than the one that it grew from.

    Attributes:
        share: see `Share`.
        decay: factor on what is shared, for each round of the decay, 0 to 1.
        decay_by: see `DecayBy`.
        normalised: with False, the divisor has no decay, as printed, and a network loses a part of its weights in every
            round.
        both_ways: larger networks give to smaller ones too.
    """

    share: Share
    decay: float
    decay_by: DecayBy = "network"
    normalised: bool = True
    both_ways: bool = False

    def mix(
        self,
        lineages: Sequence[Lineage],
        networks: Mapping[str, Network],
        states: Mapping[str, Mapping[str, Tensor]],
        parameters: Mapping[str, int],
        round_number: int,
    ) -> dict[str, dict[str, Tensor]]:
        """The networks' weights after they have shared.

        Args:
            lineages: of the networks, each of which grew from the one before.
            networks: by id, their declarations.
            states: by id, their weights.
            parameters: by id, those in their cells.
            round_number: of the aggregated round.
        """
        from subfleet.elastic.inheriting import Descent

        mixed = {lineage.id: dict(states[lineage.id]) for lineage in lineages}
        if self.share == "none":
            return mixed
        steps = [
            Descent.of(networks[child.id], networks[parent.id], child.map, self.share)
            for parent, child in pairwise(lineages)
        ]
        own = [states[lineage.id] for lineage in lineages]
        for place, lineage in enumerate(lineages):
            givers = self._weigh_givers(place, lineages, parameters, round_number)
            for name in own[place]:  # tensor by tensor, to hold few copies at a time
                given = [
                    (count, weight, _give(name, own, other, place, steps))
                    for other, (count, weight) in givers.items()
                    if name in own[other]
                ]
                if given:
                    mixed[lineage.id][name] = _average(own[place][name], given)
        return mixed

    def _weigh_givers(
        self, place: int, lineages: Sequence[Lineage], parameters: Mapping[str, int], round_number: int
    ) -> dict[int, tuple[float, float]]:
        """By place of a network that gives to this one: what its elements add to the divisor, and their weight."""
        givers = {}
        for other in range(len(lineages) if self.both_ways else place):
            if other == place:
                continue
            first, second = (lineages[end] for end in sorted((place, other)))
            since = second.born_round if self.decay_by == "network" else 0
            fading = self.decay ** (round_number - since)
            alike = similarity(parameters[first.id], parameters[second.id])
            if fading > 0:
                givers[other] = (alike * (fading if self.normalised else 1.0), alike * fading)
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
    name: str, own: Sequence[Mapping[str, Tensor]], giver: int, place: int, steps: Sequence[Descent]
) -> MappedTensor:
    """What a network gives to another one: in copies of its own elements, plus the differences between these copies."""
    from subfleet.elastic.inheriting import MappedTensor

    image = _project(name, MappedTensor(values=own[giver][name].double()), giver, place, steps)
    if place < giver:
        return image
    whole = MappedTensor(values=own[place][name].double())
    alike = _project(name, _project(name, whole, place, giver, steps), giver, place, steps)
    return replace(image, values=image.values + (whole.values - alike.values))


def _project(name: str, image: MappedTensor, place: int, to: int, steps: Sequence[Descent]) -> MappedTensor:
    """A tensor of a network as another one of the lineage has it."""
    for step in steps[place:to]:
        image = step.down(name, image)
    for step in reversed(steps[to:place]):
        image = step.up(name, image)
    return image
