"""NeFL: nested submodels of any width and depth, with norms and block steps of their own for each size.

Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE Transactions
on Mobile Computing 2025 (arXiv 2308.07761), section 3 and algorithm 1.

Client half: train the given submodel; each skippable block adds a learnable multiple of what it computes, where the
model has `learnable_steps`.
Server half: a client gets a size out of a few around the largest that fits. Weights are averaged over all clients that
hold them, whatever their size; what is inconsistent between sizes (norms, their statistics, steps) is averaged among
clients of the same size only. A block that nobody held stays as it was, where the public code zeroes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.elastic.norm_layers import norm_tensors
from subfleet.methods.aggregator import UNIFORM, Aggregator, Participant, Weighting, weigh_by
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.roles import Roles
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count
from subfleet.protocol.submodel import Architecture

__all__ = ["NeFL"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class NeFL:
    """Parameters of NeFL.

    Attributes:
        neighbours: a client's size is drawn from the largest that fits and this many below it, 0 or more. The paper
            also draws from those above, which a budget does not carry.
        weighting: "uniform" counts each client as 1, as the paper's code does; "samples" by its samples.
    """

    TYPE: ClassVar[str] = "nefl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="NeFL",
        paper="Kang et al., NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients, "
        "IEEE TMC 2025",
        varies=("width", "depth"),
        judges=("norms",),
        published={"neighbours": Published(value=2), "weighting": UNIFORM},
    )
    neighbours: Count = 2
    weighting: Weighting = "uniform"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return (
            "submodels above the largest that fits are never drawn",
            *those_true({"blocks have no learnable steps (model.learnable_steps)": not setting.learnable_steps}),
        )

    def roles(self) -> Roles:
        """A bank of norms and steps for each size."""
        return Roles(
            assigner=Assigner(assign=self._assign),
            aggregator=Aggregator(weigh=weigh_by(self.weighting), sharing_groups=norm_bank),
        )

    def _assign(self, context: AssignmentContext) -> Assignment:
        fitting = [one for one in context.candidates if context.allows(one)][-1 - self.neighbours :]
        return Assignment(candidate=context.draw.stream("size").choice(fitting) if fitting else None)


def norm_bank(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
    """The tensors of norms, and steps, are those of the client's size."""
    steps = {name for name, decl in network.tensors.items() if decl.role == "step"}
    return dict.fromkeys(norm_tensors(network) | steps, client.size.architecture_id)
