"""All tensors that a run keeps: the shared model, the copies that some clients have of its tensors, and moments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from subfleet.protocol.errors import ConfigError

__all__ = ["ModelState", "packed", "unpacked"]

Tensors = Mapping[str, Tensor]
_COPY, _MOMENT = "copy", "moment"


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
    """

    shared: Tensors
    copies: Mapping[str, Tensors] = field(default_factory=_none)
    moments: Mapping[str, Tensors] = field(default_factory=_none)

    def seen_with(self, cohorts: Mapping[str, str]) -> dict[str, Tensor]:
        """The whole model as a client sees it.

        Args:
            cohorts: of which cohort its copy of a tensor is, by tensor name; those not named are shared.
        """
        return {
            name: self.copies.get(cohorts[name], {}).get(name, tensor) if name in cohorts else tensor
            for name, tensor in self.shared.items()
        }


def packed(state: ModelState) -> dict[str, Tensor]:
    """A state as one flat mapping: `name`, `copy/cohort/name` and `moment/kind/name`."""
    return {
        **state.shared,
        **{f"{_COPY}/{key}/{name}": tensor for key, own in state.copies.items() for name, tensor in own.items()},
        **{f"{_MOMENT}/{key}/{name}": tensor for key, own in state.moments.items() for name, tensor in own.items()},
    }


def unpacked(tensors: Tensors) -> ModelState:
    """The state that was packed.

    Raises:
        ConfigError: a name is none of a packed state's.
    """
    shared: dict[str, Tensor] = {}
    others: dict[str, dict[str, dict[str, Tensor]]] = {_COPY: {}, _MOMENT: {}}
    for path, tensor in tensors.items():
        kind, *rest = path.split("/")
        if not rest:
            shared[path] = tensor
        elif kind in others and len(rest) == 2:
            others[kind].setdefault(rest[0], {})[rest[1]] = tensor
        else:
            raise ConfigError(
                f"a stored model names the tensor {path!r:.120}, but must name copies, moments or tensors"
            )
    return ModelState(shared=shared, copies=others[_COPY], moments=others[_MOMENT])
