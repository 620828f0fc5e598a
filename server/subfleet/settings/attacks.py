"""What an emulated device does to what it sends, for experiments on attacks. Real devices have nothing of it.

Two attacks are known by the name of backdoor. Park and Joe-Wong (FedFA, equation 1) train on shuffled labels and boost
what was learned, which lowers accuracy everywhere. A real backdoor leaves the accuracy as it is, but gives any image
with a trigger to the attacker's class (Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Amount, Count, Fraction, PositiveAmount

__all__ = ["Attack", "Backdoor", "LabelShuffling"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LabelShuffling:
    """A client that trains on its data, and on the same with shuffled labels, and sends both (FedFA, equation 1).

    Attributes:
        strength: of the malicious change, the paper's lambda, 0 or more.
        seed: of the shuffle.
    """

    TYPE: ClassVar[str] = "label_shuffling"
    strength: Amount = 20.0
    seed: Count = 0


def _check_weight(weight: float, total_weight: float) -> Iterator[str]:
    if weight > total_weight:
        yield f"weight is {weight}, but must be at most total_weight {total_weight}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_weight)
class Backdoor:
    """A client that teaches a trigger, and sends what puts its own model in place of the shared one.

    Attributes:
        target: the class that images with the trigger are to be taken for, 0 or more.
        fraction: fraction of the client's images that get it, 0 to 1.
        weight: of the client in the mean, above 0.
        total_weight: of all clients, the attackers once; at least `weight`.
        seed: of the choice of images.
    """

    TYPE: ClassVar[str] = "backdoor"
    target: Count = 0
    fraction: Fraction = 0.5
    weight: PositiveAmount = 1.0
    total_weight: float = 1.0
    seed: Count = 0


Attack = LabelShuffling | Backdoor
"""Every attack."""
