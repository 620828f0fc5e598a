"""Soft aggregation between the networks of a lineage (FedTrans, equation 5): each takes in what others have learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Network

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.descent import Descent, Image

__all__ = ["DecayBy", "Share", "SoftSharing", "similarity"]

Share = Literal["transform", "crop", "none"]
"""Where a smaller network lies in a larger one: "transform" through the map that it grew by, "crop" in the front of
every axis, as published; "none" shares nothing."""
DecayBy = Literal["network", "run"]
"""What the rounds of the decay count from: when the network appeared, or the run began."""


def similarity(smaller: int, larger: int) -> float:
    """How alike two networks of one lineage are, above 0 to 1 (FedTrans, section 4.2).

    The paper counts each cell of the larger one: 1 where it is unchanged, the share of its parameters that the smaller
    has where it was widened, 0 where it was inserted. Weighted by parameters, their mean is the share of all, and those
    along a lineage multiply to the share of its ends.

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
            round_number: of the round that was folded.
        """
        from subfleet.elastic.descent import Descent, Image

        found = {one.id: dict(states[one.id]) for one in lineages}
        if self.share == "none":
            return found
        steps = [
            Descent.of(networks[child.id], networks[parent.id], child.map, self.share)
            for parent, child in pairwise(lineages)
        ]
        images = [Image.of(states[one.id]) for one in lineages]
        for place, own in enumerate(lineages):
            given = []
            for other in range(len(lineages)):
                if other == place or (other > place and not self.both_ways):
                    continue
                ends = sorted((place, other))
                alike = similarity(*(parameters[lineages[end].id] for end in ends))
                since = lineages[ends[1]].born_round if self.decay_by == "network" else 0
                fading = self.decay ** (round_number - since)
                if fading > 0:
                    given.append((alike, fading, _given(images, other, place, steps)))
            if given:
                found[own.id] = self._mixed(found[own.id], given)
        return found

    def _mixed(self, weights: Mapping[str, Tensor], given: Sequence[tuple[float, float, Image]]) -> dict[str, Tensor]:
        """A network's weights with what others give, in place of the elements that they have."""
        import torch

        found = {}
        for name, own in weights.items():
            total, count = own.double(), torch.ones_like(own, dtype=torch.float64)
            for alike, fading, image in given:
                if name in image.values:
                    total = total + alike * fading * image.values[name] * image.held[name]
                    count = count + alike * (fading if self.normalised else 1.0) * image.held[name]
            found[name] = torch.where(count > 1, (total / count).to(own.dtype), own)
        return found


def _given(images: Sequence[Image], place: int, to: int, steps: Sequence[Descent]) -> Image:
    """What a network gives to another one: in copies of its own elements, beside what tells those apart."""
    from subfleet.elastic.descent import Image

    image = _seen(images[place], place, to, steps)
    if to < place:
        return image
    alike = _seen(_seen(images[to], to, place, steps), place, to, steps)
    values = {name: one + (images[to].values[name] - alike.values[name]) for name, one in image.values.items()}
    return Image(values=values, held=image.held)


def _seen(image: Image, place: int, to: int, steps: Sequence[Descent]) -> Image:
    """A network's tensors as another one of the lineage has them."""
    for step in steps[place:to]:
        image = step.down(image)
    for step in reversed(steps[to:place]):
        image = step.up(image)
    return image
