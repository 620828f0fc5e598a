"""What an emulated device does to what it sends, for experiments on attacks. Real devices have nothing of it.

Two attacks are known by the name of backdoor. Park and Joe-Wong (FedFA, equation 1) train on shuffled labels and boost
what was learned, which lowers accuracy everywhere. A real backdoor leaves the accuracy as it is, but gives any image
with a trigger to the attacker's class (Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020).
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.protocol.errors import ConfigError

__all__ = ["Attack", "Backdoor", "LabelShuffling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelShuffling:
    """A client that trains on its data, and on the same with shuffled labels, and sends both (FedFA, equation 1).

    Attributes:
        strength: of the malicious change, the paper's lambda, 0 or more.
        seed: of the shuffle.
    """

    TYPE: ClassVar[str] = "label_shuffling"
    strength: float = 20.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.strength < float("inf"):
            raise ConfigError(f"an attack's strength is {self.strength}, but must be a number of 0 or more")
        _check_seed(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backdoor:
    """A client that teaches a trigger, and sends what puts its own model in place of the shared one.

    Attributes:
        target: the class that images with the trigger are to be taken for, 0 or more.
        fraction: share of the client's images that get it, 0 to 1.
        weight: of the client in the mean, above 0.
        total_weight: of all clients, the attackers once; at least `weight`.
        seed: of the choice of images.
    """

    TYPE: ClassVar[str] = "backdoor"
    target: int = 0
    fraction: float = 0.5
    weight: float = 1.0
    total_weight: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.target < 0 or not 0 <= self.fraction <= 1:
            raise ConfigError(
                f"an attack's target and fraction are {self.target} and {self.fraction}, but must be a class and a "
                "share from 0 to 1"
            )
        if not 0 < self.weight <= self.total_weight < float("inf"):
            raise ConfigError(
                f"an attacker weighs {self.weight} of {self.total_weight}, but must weigh more than 0 and at most all"
            )
        _check_seed(self.seed)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ConfigError(f"an attack's seed is {seed}, but must be 0 or more")


Attack = LabelShuffling | Backdoor
"""Every attack."""
