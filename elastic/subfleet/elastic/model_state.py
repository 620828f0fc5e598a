"""All that a run keeps of its model: shared tensors, the copies that some clients have of them, moments, and sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, from_numpy

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["ModelState", "packed", "unpacked"]

Tensors = Mapping[str, Tensor]
_COPY, _MOMENT = "copy", "moment"
_SIZES = "sizes/json"


def _none() -> Mapping[str, Tensors]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelState:
    """The state of a federated model.

    Attributes:
        shared: the whole model, by tensor name.
        copies: by cohort, the tensors that its clients train apart from all others, in the full shape; a tensor that
            a cohort has not trained yet is the shared one.
        moments: of a server optimiser, by kind and tensor name.
        sizes: that clients had whose updates are in it, sorted by their ids, where copies go by them; else none.
    """

    shared: Tensors
    copies: Mapping[str, Tensors] = field(default_factory=_none)
    moments: Mapping[str, Tensors] = field(default_factory=_none)
    sizes: tuple[SubnetSpec, ...] = ()

    def seen_with(self, cohorts: Mapping[str, str]) -> dict[str, Tensor]:
        """The whole model as a client sees it.

        Args:
            cohorts: of which cohort its copy of a tensor is, by tensor name; those not named are shared.
        """
        return {
            name: self.copies.get(cohorts[name], {}).get(name, tensor) if name in cohorts else tensor
            for name, tensor in self.shared.items()
        }

    def mapped(self, change: Callable[[Tensors], Tensors]) -> "ModelState":
        """The state with all of its tensors changed alike: the shared ones, the copies and the moments.

        Args:
            change: some tensors of the model, in the full shape, by name, to what becomes of them.
        """
        return replace(
            self,
            shared=change(self.shared),
            copies={key: change(own) for key, own in self.copies.items()},
            moments={kind: change(own) for kind, own in self.moments.items()},
        )

    def on(self, device: torch.device) -> "ModelState":
        """The same on a device: whatever is done with it afterwards is done there."""
        return self.mapped(lambda tensors: {name: tensor.to(device) for name, tensor in tensors.items()})


def packed(state: ModelState) -> dict[str, Tensor]:
    """A state as one flat mapping: `name`, `copy/cohort/name`, `moment/kind/name`, and sizes as bytes of JSON."""
    sizes = from_numpy(np.frombuffer(canonical_json(state.sizes), np.uint8).copy())
    return {
        **({_SIZES: sizes} if state.sizes else {}),
        **state.shared,
        **{f"{_COPY}/{key}/{name}": tensor for key, own in state.copies.items() for name, tensor in own.items()},
        **{f"{_MOMENT}/{key}/{name}": tensor for key, own in state.moments.items() for name, tensor in own.items()},
    }


def unpacked(tensors: Tensors) -> ModelState:
    """The state that was packed.

    Raises:
        ConfigError: a name is none of a packed state's.
        ProtocolError: the sizes are no sizes.
    """
    sizes: tuple[SubnetSpec, ...] = ()
    shared: dict[str, Tensor] = {}
    others: dict[str, dict[str, dict[str, Tensor]]] = {_COPY: {}, _MOMENT: {}}
    for path, tensor in tensors.items():
        kind, *rest = path.split("/")
        if path == _SIZES:
            content = tensor.numpy().tobytes()
            sizes = from_plain(tuple[SubnetSpec, ...], parse_json(content, max_bytes=len(content)))
        elif not rest:
            shared[path] = tensor
        elif kind in others and len(rest) == 2:
            others[kind].setdefault(rest[0], {})[rest[1]] = tensor
        else:
            raise ConfigError(
                f"a stored model names the tensor {path!r:.120}, but must name copies, moments or tensors"
            )
    return ModelState(shared=shared, copies=others[_COPY], moments=others[_MOMENT], sizes=sizes)
