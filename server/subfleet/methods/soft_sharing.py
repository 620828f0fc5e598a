"""Soft aggregation between the networks of a lineage (FedTrans, equation 5): each takes in what others have learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Network

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.descent import Descent, MappedTensor

__all__ = ["DecayBy", "Share", "SoftSharing", "similarity"]

Share = Literal["transform", "crop", "none"]
"""Where a smaller network lies in a larger one: "transform" through the map that it grew by, "crop" in the front of
every axis, as published; "none" shares nothing."""
DecayBy = Literal["network", "run"]
"""What the rounds of the decay count from: when the network appeared, or the run began."""


def similarity(smaller: int, larger: int) -> float:
    """How alike two networks of one lineage are, above 0 to 1 (FedTrans, section 4.2).

    The paper counts each cell of the larger one: 1 where it is unchanged, the fraction of its parameters that the
    smaller has where it was widened, 0 where it was inserted. Weighted by parameters, their mean is the fraction of
    all, and those along a lineage multiply to the fraction of its ends.

    Args:
        smaller: parameters in the cells of the smaller network, 1 or more.
        larger: in those of the larger one.
    """
    return min(1.0, smaller / larger)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftSharing:
    """How networks of a lineage share, in place of each its own mean.

        W_j <- (W_j + sum_i c_ij T_ij(W_i)) / (1 + sum_i c_ij),   c_ij = decay^t s_ij,   i grew before j

    Elements that a network has to itself keep their bits. Where T_ij copies, W_i takes the place of what W_j is to it
    alone, the nearest that i could be; what tells the copies apart is j's own. Else each round would pull them together
    again, and a network that became wider could never do more than the one that it grew from.

    Attributes:
        share: see `Share`.
        decay: of what is shared, for each round since the network appeared, 0 to 1.
        decay_by: see `DecayBy`.
        normalised: with False, the sum below has no decay, as printed: a network then loses a part of its weights in
            every round.
        both_ways: larger networks give to smaller ones, too.
    """

    share: Share
    decay: float
    decay_by: DecayBy = "network"
    normalised: bool = True
    both_ways: bool = False

    def shared(
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
            round_number: of the round that was aggregated.
        """
        from subfleet.elastic.descent import Descent

        found = {one.id: dict(states[one.id]) for one in lineages}
        if self.share == "none":
            return found
        steps = [
            Descent.of(networks[child.id], networks[parent.id], child.map, self.share)
            for parent, child in pairwise(lineages)
        ]
        own = [states[one.id] for one in lineages]
        for place, lineage in enumerate(lineages):
            giving = self._giving(place, lineages, parameters, round_number)
            for name in own[place]:  # one after the other, so that few copies are held at a time
                given = [
                    (count, weight, _given(name, own, other, place, steps))
                    for other, (count, weight) in giving.items()
                    if name in own[other]
                ]
                if given:
                    found[lineage.id][name] = _mixed(own[place][name], given)
        return found

    def _giving(
        self, place: int, lineages: Sequence[Lineage], parameters: Mapping[str, int], round_number: int
    ) -> dict[int, tuple[float, float]]:
        """Which networks give something to one: by their places what the elements of each count, and its weights."""
        found = {}
        for other in range(len(lineages) if self.both_ways else place):
            if other == place:
                continue
            first, second = (lineages[end] for end in sorted((place, other)))
            since = second.born_round if self.decay_by == "network" else 0
            fading = self.decay ** (round_number - since)
            alike = similarity(parameters[first.id], parameters[second.id])
            if fading > 0:
                found[other] = (alike * (fading if self.normalised else 1.0), alike * fading)
        return found


def _mixed(own: Tensor, given: Sequence[tuple[float, float, MappedTensor]]) -> Tensor:
    """A tensor with what others give, in place of the elements that they have."""
    import torch

    total, count = own.double(), torch.ones((), dtype=torch.float64, device=own.device)
    for counted, weight, image in given:
        if image.held is None:
            total, count = total + weight * image.values, count + counted
        else:
            total, count = total + weight * image.values * image.held, count + counted * image.held
    return torch.where(count > 1, (total / count).to(own.dtype), own)


def _given(
    name: str, own: Sequence[Mapping[str, Tensor]], giver: int, place: int, steps: Sequence[Descent]
) -> MappedTensor:
    """What a network gives to another one: in copies of its own elements, beside what tells those apart."""
    from subfleet.elastic.descent import MappedTensor

    image = _seen(name, MappedTensor(values=own[giver][name].double()), giver, place, steps)
    if place < giver:
        return image
    whole = MappedTensor(values=own[place][name].double())
    alike = _seen(name, _seen(name, whole, place, giver, steps), giver, place, steps)
    return replace(image, values=image.values + (whole.values - alike.values))


def _seen(name: str, image: MappedTensor, place: int, to: int, steps: Sequence[Descent]) -> MappedTensor:
    """A tensor of a network as another one of the lineage has it."""
    for step in steps[place:to]:
        image = step.down(name, image)
    for step in reversed(steps[to:place]):
        image = step.up(name, image)
    return image
