"""What a method's model is: what is evaluated after a round, and what people are told that it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["FOR_ALL", "EvaluatedKind", "EvaluatedModel", "ModelKind"]

ModelKind = Literal["trained", "whole", "client", "architecture", "cluster", "tier", "network"]
"""One model for all clients:

"trained"       the whole network where devices have trained all of it, else the largest submodel that one has trained
"whole"         the whole network, whose parts clients train in turn: what nobody has trained yet is told

One for each client, whose mean is told:

"client"        a model of its own
"architecture"  that of all clients of its architecture
"cluster"       that of its cluster
"tier"          that of its tier of devices
"network"       one of the run's networks
"""
EvaluatedKind = Literal[ModelKind, "paths"]
"""What was evaluated; "paths" of a supernet, which predicts nothing by itself."""
FOR_ALL: frozenset[str] = frozenset({"trained", "whole"})
"""The kinds by which there is one model for all clients."""

_OWN: Mapping[str, str] = MappingProxyType(
    {
        "client": "its own model",
        "architecture": "its architecture's model",
        "cluster": "its cluster's model",
        "tier": "its tier's network",
        "network": "the network that it has",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """The model whose accuracy a round tells.

    Attributes:
        kind: as the method says, or "paths".
        submodel: of one model for all, its display name; empty where that is the whole network.
        architecture_id: of the same, the submodel's identity.
        network: of the same, the id of its network; empty for the one that the run began with.
        count: models that the accuracy is the mean of: 1 for all, else one for each client, or path.
        untrained: fraction of the parameters evaluated that no device has trained, 0 to 1.
    """

    kind: EvaluatedKind
    submodel: str = ""
    architecture_id: str = ""
    network: str = ""
    count: int = 1
    untrained: float = 0.0

    @property
    def told(self) -> str:
        """In words, such as "the full model" or "the mean of 5 devices, each with its own model"."""
        text = self._model
        return f"{text}, {max(self.untrained, 0.001):.1%} untrained" if self.untrained else text

    @property
    def short(self) -> str:
        """For a table: "full", the name of a submodel, or who has models of their own, such as "each client"."""
        text = "random paths" if self.kind == "paths" else self.submodel or "full"
        text = text if self.kind in {*FOR_ALL, "paths"} else f"each {self.kind}"
        return f"{text}, {max(self.untrained, 0.001):.1%} untrained" if self.untrained else text

    @property
    def _model(self) -> str:
        if self.kind == "paths":
            return f"the mean of {self.count} random paths of the supernet"
        if self.kind in _OWN:
            return f"the mean of {self.count} device{'s' * (self.count != 1)}, each with {_OWN[self.kind]}"
        return f"submodel {self.submodel}, the largest that devices have trained" if self.submodel else "the full model"
