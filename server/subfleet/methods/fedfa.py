"""FedFA: fixed architectures of any width and depth, layer grafting and scalable aggregation.

Park and Joe-Wong, "Federated Learning with Flexible Architectures", ECML PKDD 2024, section 4 and algorithm 1.

Client half: each client keeps one architecture: the largest that fits its log (see `sizes`), or without one when it is
given its first; with choice "score" the one of several whose gradients on its own data have the highest ZiCo score
(algorithm 1, lines 1 and 2; section 5.1); with "declared" the one that it has declared. Logits of classes that it lacks
count as 0 where `class_mask` is on.
Server half: the last block of a shallow section also stands for the blocks that the section lacks (grafting), so that
sizes without a block that can are none of the run's; and every client's weights are brought to the mean size of all,
layer by layer, before the mean (scaling). Each is a switch.

What is brought to the mean size is a client's weights, by the paper's formula and algorithm. Its text speaks of
updates: a boosted change shows in its own size long before it shows in that of the weights, and `scaled` = "changes"
goes by that.

With fidelity "paper", copies are of weights and sizes are L2 norms: both move a model that nobody has trained. With
"fixed", copies are of what the block learned, and sizes are those of the elements that all clients hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.elastic.weight_sizes import NORMS, Central, WeightNorm
from subfleet.methods.aggregator import Aggregator, ClientUpdate, Replacement
from subfleet.methods.assigner import Assigner, AssignmentContext
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.heterofl import with_class_mask
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import SLICES, whole_depth, with_fixed_sizes
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.candidate_scores import MAX_CANDIDATES
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate, ordered

if TYPE_CHECKING:  # who reads settings needs no PyTorch; the server half imports what it computes with
    from torch import Tensor

    from subfleet.elastic.grafting import Graft

__all__ = ["FedFA"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FedFA:
    """Parameters of FedFA.

    Attributes:
        grafting: whether a shallow client's last blocks stand for those that it lacks.
        scaling: whether weights are brought to the mean size.
        fidelity: "paper" or "fixed", see above.
        scaled: what scaling brings to the mean size: "weights" or "changes", see above.
        norm: in place of the fidelity's.
        central: which weights count as the inner 95 %.
        class_mask: whether logits of absent classes count as 0.
        choice: "largest" gives each client the largest size that fits first; "score" has it score some that fit on its
            own data; "declared" goes by what it declares.
        proposals: how many sizes a client scores at most, 2 to 16.
        depth: architectures may also leave out blocks; False varies widths alone, the paper's "FedFA (Width)".
    """

    TYPE: ClassVar[str] = "fedfa"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedFA",
        paper="Park and Joe-Wong, Federated Learning with Flexible Architectures, ECML PKDD 2024",
        varies=("width", "depth"),
        published={
            "grafting": Published(value=True, told="nothing is grafted"),
            "scaling": Published(value=True, told="nothing is scaled"),
            "fidelity": Published(value="paper", told="models that nobody trained do not change (fidelity)"),
            "norm": Published(value=None, told=None),
            "central": None,  # the text has three readings
            "class_mask": Published(value=True, told="outputs of classes that a client lacks are trained too"),
            "choice": Published(value="declared", told=None),
            "proposals": None,
            "depth": Published(value=True, told="architectures differ only in width"),
            "scaled": Published(
                value="weights",
                told="changes are scaled, not weights",
                matters=lambda method: method.scaling,
            ),
        },
    )
    grafting: bool = True
    scaling: bool = True
    fidelity: Literal["paper", "fixed"] = "fixed"
    norm: WeightNorm | None = None
    central: Central = "absolute"
    class_mask: bool = True
    choice: Literal["largest", "score", "declared"] = field(default="largest", metadata=ADDED_LATER)
    proposals: Annotated[int, Range(least=2, most=MAX_CANDIDATES)] = field(default=4, metadata=ADDED_LATER)
    depth: bool = field(default=True, metadata=ADDED_LATER)
    scaled: Literal["weights", "changes"] = field(default="weights", metadata=ADDED_LATER)

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return those_true(
            {
                "architectures are chosen by the log or the first budget, not declared": self.choice == "largest",
                f"the best-scoring of at most {self.proposals} candidates is used": self.choice == "score",
                f"what is scaled is as large as {self.norm!r} says": self.norm not in (None, NORMS["paper"]),
            }
        )

    def roles(self) -> Roles:
        """Grafted and scaled updates."""
        propose = self._propose if self.choice == "score" else None
        base = Roles(
            assigner=Assigner(space=self._space, propose=propose), aggregator=Aggregator(transform=self._transform)
        )
        unions = replace(SLICES, holds=_is_graftable) if self.grafting else SLICES
        base = with_fixed_sizes(base, "declared" if self.choice == "declared" else "largest", unions)
        return with_class_mask(base) if self.class_mask else base

    def _space(self, network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
        from subfleet.elastic.grafting import check_grafting

        if not self.depth:
            return whole_depth(network, rates)
        if not self.grafting:
            return uniform_space(network, rates)
        check_grafting(network)
        return tuple(size for size in uniform_space(network, rates) if _is_graftable(network, size))

    def _propose(self, context: AssignmentContext) -> tuple[Candidate, ...]:
        """To a client that has no size yet: the largest that fits, and one drawn from each of equal parts of the rest.

        Their weights, and those to train on afterwards, together keep to the link's budget.
        """
        fitting = [one for one in context.candidates if context.allows(one) and context.lasts(one)]
        if context.previous is not None or not fitting:
            return ()
        *smaller, largest = fitting
        count = min(self.proposals - 1, len(smaller))
        stream = context.draw.stream("proposals")
        parts = (smaller[part * len(smaller) // count : (part + 1) * len(smaller) // count] for part in range(count))
        proposed = [largest]
        left_bytes = math.inf if context.budget.downlink_bytes is None else context.budget.downlink_bytes
        left_bytes -= 2 * largest.weight_bytes
        for drawn in [stream.choice(part) for part in parts]:
            if drawn.weight_bytes <= left_bytes:
                left_bytes -= drawn.weight_bytes
                proposed.append(drawn)
        return ordered(proposed)

    def _transform(
        self, network: Network, state: Mapping[str, Tensor], trained: Sequence[ClientUpdate]
    ) -> Sequence[Replacement]:
        from subfleet.elastic.scaling import compute_scale_factors, scale_change

        grafted = [self._grafted(network, state, one) for one in trained]
        if not self.scaling:
            return grafted
        received = [self._scaled_with(network, state, one) for one in grafted]
        weights = [
            (one.architecture, {name: old[name] + change for name, change in one.change.items()})
            for one, old in zip(grafted, received, strict=True)
        ]
        norm = self.norm or NORMS[self.fidelity]
        factors = compute_scale_factors(network, weights, norm=norm, central=self.central)
        return [
            Replacement(architecture=one.architecture, change=scale_change(old, one.change, found))
            for one, old, found in zip(grafted, received, factors, strict=True)
        ]

    def _scaled_with(self, network: Network, state: Mapping[str, Tensor], one: Replacement) -> Mapping[str, Tensor]:
        """What is scaled together with a change: the weights that it moves, or nothing."""
        from subfleet.elastic.maps import extract

        if self.scaled == "weights":
            return extract(network, one.architecture, state)
        return {name: change.new_zeros(change.shape) for name, change in one.change.items()}

    def _grafted(self, network: Network, state: Mapping[str, Tensor], one: ClientUpdate) -> Replacement:
        from subfleet.elastic.grafting import graft, graft_change

        if not self.grafting:
            return Replacement(architecture=one.client.architecture, change=one.change)
        found = graft(network, one.client.architecture)
        if self.fidelity == "paper":
            return Replacement(architecture=found.architecture, change=graft_change(network, found, state, one.change))
        return Replacement(architecture=found.architecture, change=_copied_change(found, one.change))


def _is_graftable(network: Network, size: Architecture) -> bool:
    from subfleet.elastic.grafting import is_graftable

    return is_graftable(network, size)


def _copied_change(found: Graft, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each copy learns what its source learned."""
    return {name: change[source] for name, source in found.sources.items()}
