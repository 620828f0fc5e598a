"""All that a run keeps of its model: of each network shared tensors, copies that some clients have, moments, sizes.

With it, what of it devices have trained, and which part of it therefore is the model.
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

__all__ = ["ModelState", "pack_state", "unpack_state"]

Tensors = Mapping[str, Tensor]
_COPY, _MOMENT, _KEPT, _NETWORK, _UNTRAINED = "copy", "moment", "kept", "network", "untrained"
_SIZES, _LINEAGE, _MODEL = "sizes/json", "lineage/json", "model/json"


def _none() -> Mapping[str, Tensors]:
    return MappingProxyType({})


def _nothing() -> Tensors:
    return MappingProxyType({})


def _no_other() -> "Mapping[str, ModelState]":
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelState:
    """The state of a federated model.

    Attributes:
        shared: the whole model, by tensor name.
        copies: by sharing group, the tensors that its clients train apart from all others, in the full shape; a tensor
            that a sharing group has not trained yet is the shared one.
        moments: of a server optimiser, by kind and tensor name.
        kept: whatever else a method remembers in tensors, of any shape, by names of its own.
        sizes: that clients had whose updates are in it, sorted by their ids, where copies go by them; else none.
        lineage: of its network; None for the one that the run begins with, as long as that is in use.
        untrained: by name of a shared tensor, True for each element that no device has trained; a tensor that is not
            named has none. Those of `copies` were trained by the clients of their sharing group.
        model: the submodel that devices have trained and that is evaluated as the model; None before the first
            aggregation, and where the method has no model for all.
        others: by their ids, the states of the run's other networks that are in use; a state of those has none.
    """

    shared: Tensors
    copies: Mapping[str, Tensors] = field(default_factory=_none)
    moments: Mapping[str, Tensors] = field(default_factory=_none)
    kept: Tensors = field(default_factory=_nothing)
    sizes: tuple[Architecture, ...] = ()
    lineage: Lineage | None = None
    untrained: Tensors = field(default_factory=_nothing)
    model: Architecture | None = None
    others: "Mapping[str, ModelState]" = field(default_factory=_no_other)

    @classmethod
    def first(cls, shared: Tensors, lineage: Lineage | None = None) -> "ModelState":
        """A network as it begins: weights that were drawn nobody has trained, those of another network somebody has."""
        if lineage is not None and not isinstance(lineage.map, Drawn):
            return cls(shared=shared, lineage=lineage)
        untrained = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in shared.items()}
        return cls(shared=shared, lineage=lineage, untrained=untrained)

    def of(self, network_id: str) -> "ModelState":
        """The state of one network; empty stands for the one that the run begins with.

        Raises:
            ConfigError: it has retired, or never was.
        """
        found = self.others.get(network_id) if network_id else self
        if found is None or not found.shared:
            raise ConfigError(f"the model has no network {network_id!r:.80}: it has retired, or there was none")
        return found

    def with_network(self, network_id: str, state: "ModelState") -> "ModelState":
        """The model with another state of one of its networks, or of a new one."""
        if not network_id:
            return replace(state, others=self.others)
        return replace(self, others=MappingProxyType({**self.others, network_id: state}))

    def without_network(self, network_id: str, lineage: Lineage) -> "ModelState":
        """The model without a network that retires."""
        if not network_id:
            return ModelState(shared={}, lineage=lineage, others=self.others)
        kept = {name: state for name, state in self.others.items() if name != network_id}
        return replace(self, others=MappingProxyType(kept))

    @property
    def tensor_bytes(self) -> int:
        """Of its tensors: those of every network, the copies of sharing groups, moments, and what a method keeps.

        What is noted of who has trained them does not count.
        """
        parts = (self.shared, *self.copies.values(), *self.moments.values(), self.kept)
        own = sum(tensor.nbytes for part in parts for tensor in part.values())
        return own + sum(state.tensor_bytes for state in self.others.values())

    @property
    def network_ids(self) -> tuple[str, ...]:
        """Of the networks that are in use, the one that the run begins with first."""
        return (*([""] if self.shared else []), *sorted(self.others))

    def view_with(self, sharing_groups: Mapping[str, str]) -> dict[str, Tensor]:
        """The whole model as a client sees it.

        Args:
            sharing_groups: of which sharing group its copy of a tensor is, by tensor name; those not named are shared.
        """
        return {
            name: self.copies.get(sharing_groups[name], {}).get(name, tensor) if name in sharing_groups else tensor
            for name, tensor in self.shared.items()
        }

    def map_tensors(self, change: Callable[[Tensors], Tensors]) -> "ModelState":
        """The state with all tensors of its networks changed alike: the shared ones, the copies and the moments.

        Args:
            change: some tensors of one network, in the full shape, by name, to what becomes of them.
        """
        return replace(
            self,
            shared=change(self.shared),
            copies={key: change(own) for key, own in self.copies.items()},
            moments={kind: change(own) for kind, own in self.moments.items()},
            others={name: state.map_tensors(change) for name, state in self.others.items()},
        )

    def reorder(self, order: Callable[[Lineage | None], Iterable[str]]) -> "ModelState":
        """The same with the tensors of each network in an order of their names, which a checkpoint does not keep.

        Args:
            order: a network's lineage to the names of all its tensors.
        """
        names = tuple(order(self.lineage))
        alone = replace(self, others=_no_other()).map_tensors(
            lambda some: {name: some[name] for name in names if name in some}
        )
        return replace(alone, others={name: state.reorder(order) for name, state in self.others.items()})

    def to(self, device: torch.device) -> "ModelState":
        """The same on a device: whatever is done with it afterwards is done there."""

        def moved(tensors: Tensors) -> Tensors:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        others = {name: state.to(device) for name, state in self.others.items()}
        alone = replace(self, others=_no_other()).map_tensors(moved)
        return replace(alone, kept=moved(self.kept), untrained=moved(self.untrained), others=others)


def pack_state(state: ModelState) -> dict[str, Tensor]:
    """A state as one flat mapping.

    Names are `name`, `copy/sharing_group/name`, `moment/kind/name`, `kept/name` and `untrained/name`; sizes, lineage
    and model are bytes of JSON. Of another network all names begin with `network/id/`.
    """
    texts = {_SIZES: state.sizes, _LINEAGE: state.lineage, _MODEL: state.model}
    others = {name: pack_state(other) for name, other in state.others.items()}
    return {
        **{path: from_numpy(np.frombuffer(canonical_json(one), np.uint8).copy()) for path, one in texts.items() if one},
        **state.shared,
        **{f"{_COPY}/{key}/{name}": tensor for key, own in state.copies.items() for name, tensor in own.items()},
        **{f"{_MOMENT}/{key}/{name}": tensor for key, own in state.moments.items() for name, tensor in own.items()},
        **{f"{_KEPT}/{name}": tensor for name, tensor in state.kept.items()},
        **{f"{_UNTRAINED}/{name}": tensor for name, tensor in state.untrained.items()},
        **{f"{_NETWORK}/{key}/{path}": tensor for key, own in others.items() for path, tensor in own.items()},
    }


def unpack_state(tensors: Tensors) -> ModelState:
    """The state that was packed.

    Raises:
        ConfigError: a name is none of a packed state's.
        ProtocolError: the sizes are no sizes, or a lineage is none.
    """
    own: dict[str, Tensor] = {}
    others: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        kind, *rest = path.split("/", maxsplit=2)
        if kind == _NETWORK and len(rest) == 2:
            others.setdefault(rest[0], {})[rest[1]] = tensor
        else:
            own[path] = tensor
    return replace(
        _network(own), others=MappingProxyType({name: _network(inside) for name, inside in sorted(others.items())})
    )


def _network(tensors: Tensors) -> ModelState:
    """The state of one network."""
    sizes: tuple[Architecture, ...] = ()
    lineage: Lineage | None = None
    model: Architecture | None = None
    shared: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    untrained: dict[str, Tensor] = {}
    parts: dict[str, dict[str, dict[str, Tensor]]] = {_COPY: {}, _MOMENT: {}}
    for path, tensor in tensors.items():
        kind, *rest = path.split("/")
        if path == _SIZES:
            sizes = from_plain(tuple[Architecture, ...], _json_of(tensor))
        elif path == _LINEAGE:
            lineage = from_plain(Lineage, _json_of(tensor))
        elif path == _MODEL:
            model = from_plain(Architecture, _json_of(tensor))
        elif not rest:
            shared[path] = tensor
        elif kind == _KEPT:
            kept["/".join(rest)] = tensor
        elif kind == _UNTRAINED and len(rest) == 1:
            untrained[rest[0]] = tensor
        elif kind in parts and len(rest) == 2:
            parts[kind].setdefault(rest[0], {})[rest[1]] = tensor
        else:
            raise ConfigError(
                f"a stored model names the tensor {path!r:.120}, but must name copies, moments, networks or tensors"
            )
    return ModelState(
        shared=shared,
        copies=parts[_COPY],
        moments=parts[_MOMENT],
        kept=kept,
        sizes=sizes,
        lineage=lineage,
        untrained=untrained,
        model=model,
    )


def _json_of(tensor: Tensor) -> Any:
    content = tensor.numpy().tobytes()
    return parse_json(content, max_bytes=len(content))
