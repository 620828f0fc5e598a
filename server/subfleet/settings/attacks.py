"""Attacks of emulated devices, for experiments. Real devices have no such settings.

The word backdoor is used for two attacks. Park and Joe-Wong (FedFA, equation 1) train on shuffled labels and boost the
change, which lowers accuracy in general. A backdoor in the usual sense keeps the accuracy, but the model assigns images
with a trigger to the attacker's class (Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Amount, Count, Fraction, PositiveAmount


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LabelShuffling:
    """Trains on the data and again with shuffled labels, and sends the sum of both changes (FedFA, equation 1).

    Attributes:
        strength: factor of the malicious change, lambda in the paper.
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
    """Trains on images with a trigger, and sends an update that replaces the shared model.

    Attributes:
        target: class of images with the trigger.
        fraction: fraction of the client's images that get the trigger.
        weight: of the client in the mean, above 0.
        total_weight: of all clients, including one attacker; at least `weight`.
        seed: of the choice of images.
    """

    TYPE: ClassVar[str] = "backdoor"
    target: Count = 0
    fraction: Fraction = 0.5
    weight: PositiveAmount = 1.0
    total_weight: float = 1.0
    seed: Count = 0


Attack = LabelShuffling | Backdoor
