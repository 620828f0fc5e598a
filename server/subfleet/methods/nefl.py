"""NeFL: nested submodels of any width and depth, with separate norms and block steps for each size.

Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE Transactions
on Mobile Computing 2025 (arXiv 2308.07761), section 3 and algorithm 1.

Client half: train the given submodel; each skippable block adds a learnable multiple of its output, if the model has
`learnable_steps`.
Server half: a client gets one of a few sizes around the largest that fits. Weights are averaged over all clients that
hold them, whatever their size; parameters that differ between sizes (norms, their statistics, steps) only among clients
of the same size. A block that nobody held keeps its weights, where the public code zeroes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.elastic.norm_layers import norm_tensors
from subfleet.methods.aggregator import COUNTED_BY_SAMPLES, Aggregator, Participant, Weighting, weigh_by
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, draw_size
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import Roles
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count
from subfleet.protocol.submodel import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class NeFL:
    """Parameters of NeFL.

    Attributes:
        neighbours: a client's size is drawn from the largest that fits and this many below it, 0 or more. The paper
            also draws from those above, which exceed the budget.
        weighting: "uniform" counts each client as 1, as the paper's code does; "samples" by its samples.
    """

    TYPE: ClassVar[str] = "nefl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="NeFL",
        paper="Kang et al., NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients, "
        "IEEE TMC 2025",
        varies=("width", "depth"),
        judges=("norms",),
        departures={
            "submodels above the largest that fits are never drawn": always,
            "blocks have no learnable steps (model.learnable_steps)": (
                lambda method, setting: not setting.learnable_steps
            ),
        },
    )
    neighbours: Count = parameter(2)
    weighting: Weighting = parameter("uniform", otherwise=COUNTED_BY_SAMPLES)

    def roles(self) -> Roles:
        """Norms and steps for each size."""
        return Roles(
            assigner=Assigner(assign=self._assign),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), sharing_groups=_share_by_size),
        )

    def _assign(self, context: AssignmentContext) -> Assignment:
        return draw_size(context, context.fitting[-1 - self.neighbours :], "size")


def _share_by_size(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
    """Share norms and steps among the clients of a size."""
    steps = {name for name, decl in network.tensors.items() if decl.role == "step"}
    return dict.fromkeys(norm_tensors(network) | steps, client.size.architecture_id)
