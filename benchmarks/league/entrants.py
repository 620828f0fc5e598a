"""Who plays in the league: every method with its usual parameters, and some in more than one form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.server.methods import METHODS
from subfleet.server.methods.fedavg import FedAvg

__all__ = ["ENTRANTS", "Entrant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A method as it plays: what it changes in the league's configuration.

    Attributes:
        config: fields of `ServerConfig`.
        model: fields of its `ModelConfig`, where a method needs the network to be another one.
    """

    config: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)


_FORMS: Mapping[str, Entrant] = MappingProxyType(
    {"fedavg-smallest": Entrant(config={"method": FedAvg(model="smallest")})}
)
"""Further forms of methods, by name."""

ENTRANTS: Mapping[str, Entrant] = MappingProxyType(
    {**{name: Entrant(config={"method": kind()}) for name, kind in METHODS.items()}, **_FORMS}
)
"""By name; a new method plays under the name that configurations give it."""
