"""The state of a run's model: for each network its shared tensors, copies of sharing groups, moments and sizes.

It also records which elements devices have trained, and so which part is the model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, from_numpy

from subfleet.elastic.lineage import Drawn, Lineage
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.submodel import Architecture

__all__ = ["ModelState"]

Tensors = Mapping[str, Tensor]
_TEXTS: Mapping[str, Any] = MappingProxyType(
    {"sizes": tuple[Architecture, ...], "lineage": Lineage, "model": Architecture}
)
"""Fields of a state that are stored as JSON, with their types."""


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelState:
    """The state of a federated model.

    Attributes:
        shared: tensors of the whole model by name.
        copies: by sharing group, the tensors that only its clients train, in the full shape; until a sharing group has
            trained a tensor, it uses the shared one.
        moments: moments of a server optimiser by kind and tensor name.
        kept: other tensors that a method remembers, of any shape and name.
        sizes: the submodels of the clients whose updates it contains, sorted by id, if copies depend on them; else
            empty.
        lineage: lineage of its network; None for the run's first network while that is in use.
        untrained: masks of the elements that no device has trained, by name of a shared tensor; unnamed tensors have
            none. Elements of `copies` were trained by their sharing group.
        model: the trained submodel that is evaluated as the model; None before the first aggregation, and if the method
            has no model for all.
        others: states of the run's other networks in use, by id; these have no others.
    """

    shared: Tensors
    copies: Mapping[str, Tensors] = field(default_factory=_empty)
    moments: Mapping[str, Tensors] = field(default_factory=_empty)
    kept: Tensors = field(default_factory=_empty)
    sizes: tuple[Architecture, ...] = ()
    lineage: Lineage | None = None
    untrained: Tensors = field(default_factory=_empty)
    model: Architecture | None = None
    others: "Mapping[str, ModelState]" = field(default_factory=_empty)

    @classmethod
    def first(cls, shared: Tensors, lineage: Lineage | None = None) -> "ModelState":
        """The initial state of a network: drawn weights are untrained, those of another network are trained."""
        if lineage is not None and not isinstance(lineage.map, Drawn):
            return cls(shared=shared, lineage=lineage)
        untrained = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in shared.items()}
        return cls(shared=shared, lineage=lineage, untrained=untrained)

    def of(self, network_id: str) -> "ModelState":
        """The state of one network; the empty id is the run's first network.

        Raises:
            ConfigError: the network has retired or never existed.
        """
        state = self.others.get(network_id) if network_id else self
        if state is None or not state.shared:
            raise ConfigError(f"the model has no network {network_id!r:.80}: it has retired or never existed")
        return state

    def with_network(self, network_id: str, state: "ModelState") -> "ModelState":
        """The model with a new state of one network, which may be a new network."""
        if not network_id:
            return replace(state, others=self.others)
        return replace(self, others=MappingProxyType({**self.others, network_id: state}))

    def without_network(self, network_id: str, lineage: Lineage) -> "ModelState":
        """The model without a retired network."""
        if not network_id:
            return ModelState(shared={}, lineage=lineage, others=self.others)
        others = {name: state for name, state in self.others.items() if name != network_id}
        return replace(self, others=MappingProxyType(others))

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors: of every network, copies of sharing groups, moments, and tensors that a method keeps.

        Masks of untrained elements do not count.
        """
        parts = (self.shared, *self.copies.values(), *self.moments.values(), self.kept)
        own = sum(tensor.nbytes for part in parts for tensor in part.values())
        return own + sum(state.tensor_bytes for state in self.others.values())

    @property
    def network_ids(self) -> tuple[str, ...]:
        """Ids of the networks in use, the run's first network first."""
        return (*([""] if self.shared else []), *sorted(self.others))

    def view_with(self, sharing_groups: Mapping[str, str]) -> dict[str, Tensor]:
        """The whole model as a client sees it.

        Args:
            sharing_groups: the client's sharing group by tensor name; unnamed tensors are shared.
        """
        return {
            name: self.copies.get(sharing_groups[name], {}).get(name, tensor) if name in sharing_groups else tensor
            for name, tensor in self.shared.items()
        }

    def map_tensors(self, change: Callable[[Tensors], Tensors]) -> "ModelState":
        """Apply a function to the shared tensors, copies and moments of all networks.

        Args:
            change: maps some tensors of one network, in the full shape, by name, to new ones.
        """
        return replace(
            self,
            shared=change(self.shared),
            copies={key: change(own) for key, own in self.copies.items()},
            moments={kind: change(own) for kind, own in self.moments.items()},
            others={name: state.map_tensors(change) for name, state in self.others.items()},
        )

    def reorder(self, order: Callable[[Lineage | None], Iterable[str]]) -> "ModelState":
        """Put the tensors of each network in order; a checkpoint does not keep the order.

        Args:
            order: maps a network's lineage to the names of its tensors, in order.
        """
        names = tuple(order(self.lineage))
        alone = replace(self, others=_empty()).map_tensors(
            lambda some: {name: some[name] for name in names if name in some}
        )
        return replace(alone, others={name: state.reorder(order) for name, state in self.others.items()})

    def to(self, device: torch.device) -> "ModelState":
        """Move all tensors to a device."""

        def move(tensors: Tensors) -> Tensors:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        others = {name: state.to(device) for name, state in self.others.items()}
        alone = replace(self, others=_empty()).map_tensors(move)
        return replace(alone, kept=move(self.kept), untrained=move(self.untrained), others=others)


def pack_state(state: ModelState) -> dict[str, Tensor]:
    """Flatten a state to one mapping.

    Names are `name`, `copy/sharing_group/name`, `moment/kind/name`, `kept/name` and `untrained/name`; sizes, lineage
    and model are bytes of JSON. Names of another network begin with `network/id/`.
    """
    texts = {name: getattr(state, name) for name in _TEXTS}
    others = {name: pack_state(other) for name, other in state.others.items()}
    return {
        **{f"{name}/json": _encode_text(value) for name, value in texts.items() if value},
        **state.shared,
        **{f"copy/{key}/{name}": tensor for key, own in state.copies.items() for name, tensor in own.items()},
        **{f"moment/{key}/{name}": tensor for key, own in state.moments.items() for name, tensor in own.items()},
        **{f"kept/{name}": tensor for name, tensor in state.kept.items()},
        **{f"untrained/{name}": tensor for name, tensor in state.untrained.items()},
        **{f"network/{key}/{path}": tensor for key, own in others.items() for path, tensor in own.items()},
    }


def _encode_text(value: Any) -> Tensor:
    return from_numpy(np.frombuffer(canonical_json(value), np.uint8).copy())


def unpack_state(tensors: Tensors) -> ModelState:
    """Restore a state from the mapping of `pack_state`.

    Raises:
        ConfigError: a name is not one of a packed state.
        ProtocolError: sizes or a lineage cannot be decoded.
    """
    own: dict[str, Tensor] = {}
    others: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        kind, *rest = path.split("/", maxsplit=2)
        if kind == "network" and len(rest) == 2:
            others.setdefault(rest[0], {})[rest[1]] = tensor
        else:
            own[path] = tensor
    return replace(
        _network(own), others=MappingProxyType({name: _network(inside) for name, inside in sorted(others.items())})
    )


def _network(tensors: Tensors) -> ModelState:
    """The state of one network."""
    fields: dict[str, Any] = {name: {} for name in ("shared", "copies", "moments", "kept", "untrained")}
    for path, tensor in tensors.items():
        match path.split("/"):
            case ["sizes" | "lineage" | "model" as name, "json"]:
                content = tensor.numpy().tobytes()
                fields[name] = from_plain(_TEXTS[name], parse_json(content, max_bytes=len(content)))
            case [name]:
                fields["shared"][name] = tensor
            case ["kept", *names]:
                fields["kept"]["/".join(names)] = tensor
            case ["untrained", name]:
                fields["untrained"][name] = tensor
            case ["copy", group, name]:
                fields["copies"].setdefault(group, {})[name] = tensor
            case ["moment", kind, name]:
                fields["moments"].setdefault(kind, {})[name] = tensor
            case _:
                raise ConfigError(
                    f"a stored model has the name {path!r:.120}, but must name copies, moments, networks or tensors"
                )
    return ModelState(**fields)
