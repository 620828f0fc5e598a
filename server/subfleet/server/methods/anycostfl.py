"""AnycostFL: the most important channels first, so that every prefix holds what matters most.

Li et al., "AnycostFL: Efficient On-Demand Federated Learning over Heterogeneous Edge Devices", INFOCOM 2023.

Client half: train the given subnet with the given objective.
Server half: after each round the channels of every axis are sorted by their L2 norm, with one order for all tensors
that are tied to the axis, so that the model computes the same as before. A client gets the largest of a fine ladder of
widths that fits; changes are averaged element by element, weighted by samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.permuting import importance_order, permuted
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.methods.policies import AfterRound, MethodInfo, Policies
from subfleet.server.methods.sizes import whole_depth

__all__ = ["AnycostFL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnycostFL:
    """Parameters of AnycostFL.

    Attributes:
        steps: of the ladder of widths: 1/steps, 2/steps and so on up to 1.
    """

    TYPE: ClassVar[str] = "anycostfl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="AnycostFL",
        paper="Li et al., AnycostFL: Efficient On-Demand Federated Learning over Heterogeneous Edge Devices, INFOCOM "
        "2023",
        varies=("width",),
        status="without its compression of updates; sample weights in place of its tuned coefficients",
    )
    steps: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1000:
            raise ConfigError(f"steps is {self.steps}, but must be from 1 to 1000")

    def policies(self) -> Policies:
        """Sorted prefixes."""
        return Policies(space=self._space, after_round=sorted_model)

    def _space(self, network: Network, rates: Sequence[float]) -> tuple[SubnetSpec, ...]:
        return whole_depth(network, [step / self.steps for step in range(1, self.steps + 1)])


def sorted_model(context: AfterRound) -> ModelState:
    """The model with the most important channels of every axis first; moments of a server optimiser follow."""
    state = context.after
    order = importance_order(context.network, state.shared)
    moments = {kind: _follow(context.network, tensors, state.shared, order) for kind, tensors in state.moments.items()}
    return replace(state, shared=permuted(context.network, state.shared, order), moments=moments)


def _follow(
    network: Network, moments: Mapping[str, Tensor], shared: Mapping[str, Tensor], order: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    moved = permuted(network, {**shared, **moments}, order)
    return {name: moved[name] for name in moments}
