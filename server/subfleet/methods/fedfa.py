"""FedFA: fixed architectures of any width and depth, layer grafting and scalable aggregation.

Park and Joe-Wong, "Federated Learning with Flexible Architectures", ECML PKDD 2024, section 4 and algorithm 1.

Client half: each client keeps one architecture: the largest that fits its log (see `sizes`), or without a log its first
budget; with choice "score" the one of several with the highest ZiCo score, which rates gradients on the client's own
data (algorithm 1, lines 1 and 2; section 5.1); with "declared" the one that it has declared. With `class_mask`, logits
of classes that it lacks count as 0.
Server half: the last block of a shallow section also stands for the blocks that the section lacks (grafting), so a size
without a block that can do so is left out of the space; and every client's weights are brought to the mean size of all,
layer by layer, before the mean (scaling). Each is a switch.

The paper's formula and algorithm bring a client's weights to the mean size, but its text speaks of updates. A boosted
change shows in its own size long before it shows in the size of the weights; `scaled` = "changes" scales changes.

With fidelity "paper", weights are copied and sizes are L2 norms: both move a model that nobody has trained. With
"fixed", what the block learned is copied, and sizes are those of the elements that all clients hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.elastic.technique_settings import NORMS, Central, WeightNorm
from subfleet.methods.aggregator import Aggregator, ClientUpdate, Replacement, Tensor
from subfleet.methods.assigner import Assigner, AssignmentContext
from subfleet.methods.describing import MethodInfo, parameter
from subfleet.methods.heterofl import with_class_mask
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import SLICES, list_widths, with_fixed_sizes
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.candidate_scores import MAX_CANDIDATES
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate, order_candidates


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FedFA:
    """Parameters of FedFA.

    Attributes:
        grafting: whether a shallow client's last blocks stand for the blocks that it lacks.
        scaling: whether weights are brought to the mean size.
        fidelity: "paper" or "fixed", see above.
        scaled: what scaling brings to the mean size: "weights" or "changes", see above.
        norm: in place of the fidelity's.
        central: which weights count as the inner 95 %.
        class_mask: whether logits of absent classes count as 0.
        choice: "largest" gives each client the largest size that fits first; "score" has it score some that fit on its
            own data; "declared" uses the size that it declares.
        proposals: the most sizes that a client scores, 2 to 16.
        depth: architectures may also leave out blocks; False varies widths alone, the paper's "FedFA (Width)".
    """

    TYPE: ClassVar[str] = "fedfa"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedFA",
        paper="Park and Joe-Wong, Federated Learning with Flexible Architectures, ECML PKDD 2024",
        varies=("width", "depth"),
        departures={
            "architectures are chosen by the log or the first budget, not declared": (
                lambda method, setting: method.choice == "largest"
            ),
            "the best-scoring of at most {method.proposals} candidates is used": (
                lambda method, setting: method.choice == "score"
            ),
            "the size of what is scaled is its norm {method.norm!r}": (
                lambda method, setting: method.norm not in (None, NORMS["paper"])
            ),
        },
    )
    grafting: bool = parameter(True, otherwise="nothing is grafted")
    scaling: bool = parameter(True, otherwise="nothing is scaled")
    fidelity: Literal["paper", "fixed"] = parameter(
        "fixed", paper="paper", otherwise="models that nobody trained do not change (fidelity)"
    )
    norm: WeightNorm | None = parameter(None, otherwise=None)
    central: Central = "absolute"  # the text allows three readings
    class_mask: bool = parameter(True, otherwise="outputs of classes that a client lacks are trained too")
    choice: Literal["largest", "score", "declared"] = parameter("largest", paper="declared", otherwise=None)
    proposals: Annotated[int, Range(least=2, most=MAX_CANDIDATES)] = 4
    depth: bool = parameter(True, otherwise="architectures differ only in width")
    scaled: Literal["weights", "changes"] = parameter(
        "weights", otherwise="changes are scaled, not weights", matters=lambda method: method.scaling
    )

    def roles(self) -> Roles:
        """Grafted and scaled updates."""
        propose = self._propose if self.choice == "score" else None
        roles = Roles(
            assigner=Assigner(space=self._list_sizes, propose=propose), aggregator=Aggregator(transform=self._transform)
        )
        unions = replace(SLICES, holds=_is_graftable) if self.grafting else SLICES
        roles = with_fixed_sizes(roles, "declared" if self.choice == "declared" else "largest", unions)
        return with_class_mask(roles) if self.class_mask else roles

    def _list_sizes(self, network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
        from subfleet.elastic.grafting import check_grafting

        if not self.depth:
            return list_widths(network, rates)
        if not self.grafting:
            return uniform_space(network, rates)
        check_grafting(network)
        return tuple(size for size in uniform_space(network, rates) if _is_graftable(network, size))

    def _propose(self, context: AssignmentContext) -> tuple[Candidate, ...]:
        """For a client without a size: the largest that fits, and one drawn from each of equal parts of the others.

        Their weights, and those for training afterwards, together stay within the link's budget.
        """
        lasting = context if context.lasting is None else replace(context, budget=context.lasting)
        fitting = [candidate for candidate in context.fitting if lasting.allows(candidate)]
        if context.previous is not None or not fitting:
            return ()
        *smaller, largest = fitting
        count = min(self.proposals - 1, len(smaller))
        stream = context.draw.stream("proposals")
        parts = (smaller[part * len(smaller) // count : (part + 1) * len(smaller) // count] for part in range(count))
        proposed = [largest]
        left_bytes = math.inf if context.budget.downlink_bytes is None else context.budget.downlink_bytes
        left_bytes -= 2 * largest.weight_bytes
        for candidate in [stream.choice(part) for part in parts]:
            if candidate.weight_bytes <= left_bytes:
                left_bytes -= candidate.weight_bytes
                proposed.append(candidate)
        return order_candidates(proposed)

    def _transform(
        self, network: Network, state: Mapping[str, Tensor], updates: Sequence[ClientUpdate]
    ) -> Sequence[Replacement]:
        from subfleet.elastic.maps import extract
        from subfleet.elastic.scaling import compute_scale_factors, scale_change

        grafted = [self._graft(network, state, update) for update in updates]
        if not self.scaling:
            return grafted
        received = [
            extract(network, graft.architecture, state)
            if self.scaled == "weights"
            else {name: change.new_zeros(change.shape) for name, change in graft.change.items()}
            for graft in grafted
        ]
        trained = [
            (graft.architecture, {name: old[name] + change for name, change in graft.change.items()})
            for graft, old in zip(grafted, received, strict=True)
        ]
        norm = self.norm or NORMS[self.fidelity]
        factors = compute_scale_factors(network, trained, norm=norm, central=self.central)
        return [
            Replacement(architecture=graft.architecture, change=scale_change(old, graft.change, factor))
            for graft, old, factor in zip(grafted, received, factors, strict=True)
        ]

    def _graft(self, network: Network, state: Mapping[str, Tensor], update: ClientUpdate) -> Replacement:
        from subfleet.elastic.grafting import graft, graft_change

        if not self.grafting:
            return Replacement(architecture=update.client.architecture, change=update.change)
        plan = graft(network, update.client.architecture)
        if self.fidelity == "paper":
            change = graft_change(network, plan, state, update.change)
        else:  # each copy learns what its source learned
            change = {name: update.change[source] for name, source in plan.sources.items()}
        return Replacement(architecture=plan.architecture, change=change)


def _is_graftable(network: Network, size: Architecture) -> bool:
    from subfleet.elastic.grafting import is_graftable

    return is_graftable(network, size)
