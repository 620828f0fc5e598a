"""Who plays in the league: every method with its usual parameters, and some in more than one form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.distillation import DistillationSettings
from subfleet.server.methods import METHODS
from subfleet.server.methods.fedavg import FedAvg
from subfleet.server.methods.heterofl import HeteroFL

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
    {
        "fedavg-smallest": Entrant(config={"method": FedAvg(model="smallest")}),
        "heterofl-distilled": Entrant(config={"method": HeteroFL(), "distillation": DistillationSettings()}),
    }
)
"""Further forms of methods, by name."""

_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType({"nefl": {"learnable_steps": True}})
"""Methods whose paper adds something to the network."""

ENTRANTS: Mapping[str, Entrant] = MappingProxyType(
    {
        **{name: Entrant(config={"method": kind()}, model=_MODELS.get(name, {})) for name, kind in METHODS.items()},
        **_FORMS,
    }
)
"""By name; a new method plays under the name that configurations give it."""
