"""Which network suits a client, as far as losses tell: utilities, and the odds that they give (FedTrans, 4.2)."""

import math
import statistics
from collections.abc import Mapping, Sequence

from subfleet.methods.selector import LastUpdate
from subfleet.methods.soft_sharing import similarity

__all__ = ["Utilities", "believed", "inherited", "moved_utilities", "odds"]

Utilities = Mapping[str, Mapping[str, float]]
"""Of each network for each client that has trained."""

_LARGEST = 10.0
"""Beyond which nothing is told apart: a softmax of 20 more is certain."""
_USUAL = 10.0
"""Times the median of a round's losses that one of them counts at most."""
_ALIKE = 1e-8
"""Standard deviation of losses below which nobody's is out of the usual."""


def odds(utilities: Sequence[float]) -> list[float]:
    """The chances of networks to be drawn, above 0 and with sum 1: the softmax of their utilities (equation 2)."""
    largest = max(utilities)
    powers = [math.exp(one - largest) for one in utilities]
    return [one / math.fsum(powers) for one in powers]


def believed(losses: Mapping[str, float]) -> dict[str, float]:
    """A round's losses by client, each from 0 to ten times their median.

    A client may claim any number. So bounded, one of several clients neither decides alone which losses are out of the
    usual, nor whether a network has learned.
    """
    largest = _USUAL * max(0.0, statistics.median(losses.values())) if losses else 0.0
    return {name: min(max(loss, 0.0), largest) for name, loss in losses.items()}


def moved_utilities(
    utilities: Utilities, clients: Mapping[str, LastUpdate], parameters: Mapping[str, int]
) -> Utilities:
    """Utilities after a round (equation 4).

    By as many standard deviations as a client's loss is above the mean of all who trained in the round, each network's
    utility for it falls, in the share in which that is alike to the one that the client trained. Where nobody's loss is
    out of the usual, none moves.

    Args:
        utilities: before.
        clients: by id, what they trained.
        parameters: of each network, those in its cells.

    Returns:
        Utilities from -10 to 10.
    """
    losses = believed({name: past.loss for name, past in clients.items()})
    mean = math.fsum(losses.values()) / len(losses) if losses else 0.0
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in losses.values()) / len(losses)) if losses else 0.0
    if deviation < _ALIKE:
        return utilities
    found = dict(utilities)
    for name, past in clients.items():
        trained, own = parameters[past.size.network], utilities.get(name, {})
        standard = (losses[name] - mean) / deviation
        moved = {}
        for network, count in parameters.items():
            value = own.get(network, 0.0) - standard * similarity(*sorted((count, trained)))
            moved[network] = min(max(value, -_LARGEST), _LARGEST)
        found[name] = moved
    return found


def inherited(utilities: Utilities, born: str, parent: str) -> Utilities:
    """Utilities in which a network that appears has those of another one."""
    return {name: {**own, born: own[parent]} if parent in own else own for name, own in utilities.items()}
