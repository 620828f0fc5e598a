"""FedADP: clients of architectures of their own, each of which one union is copied from and to.

"FedADP: Unified Model Aggregation for Federated Learning with Heterogeneous Model Architectures", 2025.

Client half: train the given network, whose architecture is the client's in all rounds.
Server half: the model is the union of all architectures, section by section the greatest depth and width. What a client
receives is the union made narrower and shallower; what comes back is made wider by copies and deeper by layers that
compute nothing, and averaged. Both happen here, so that a client moves its own network alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.axes import factors_of
from subfleet.elastic.lineage import Copied, Inheritance, Replicated
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.aggregator import (
    BY_SAMPLES,
    AggregationContext,
    Aggregator,
    ClientUpdate,
    Participant,
    Replacement,
    Weighting,
    weigh_by,
)
from subfleet.methods.assigner import Assigner, stream_of
from subfleet.methods.describing import MethodInfo, Published, Setting
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import DECLARED, FixedSize, with_fixed_sizes
from subfleet.methods.uniting import Succession, Unions
from subfleet.protocol.submodel import Architecture

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.exchanges import Exchange
    from subfleet.elastic.model_state import ModelState
    from subfleet.elastic.replication import Replication

__all__ = ["Copies", "FedADP"]

Copies = Literal["drawn", "cyclic"]
"""Which of a client's neurons the union's others copy; see `FedADP.copies`."""

_MOST_TIMES = 16.0
"""The median network's parameters, that one has at most in a union of declared ones. Whatever a client has is copied
to the union's width and back, by copies that are drawn, so that one far larger network costs all others."""
_CLIENTS = "clients/"
"""What names begin with of what is kept of each client that has taken part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedADP:
    """Parameters of FedADP.

    Attributes:
        merge: "group" gives a client the means of the copies that its own neurons have in the union, so that what it
            learned comes back to it, and moves the union by what clients have learned. "paper" gives it the first
            neurons, among which it shares out what reads the others, and makes the union the mean of all networks.
        absent: layers that a client lacks "keep" what the others make of them; or it counts there with an "identity".
        copies: which of a client's neurons each of the union's copies beyond them: "drawn" for each client, once, as
            published but for that it is once; or "cyclic", one after the other from the first on, so that the neurons
            of clients of one width, or of whole multiples, have the same copies.
        weighting: how much an update counts.
        choice: "largest" or "declared", see `subfleet.methods.sizes`.
    """

    TYPE: ClassVar[str] = "fedadp"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedADP",
        paper="FedADP: Unified Model Aggregation for Federated Learning with Heterogeneous Model Architectures, 2025",
        varies=("width", "depth"),
        published={
            "merge": Published(value="paper", told="clients receive means of copies, and changes are aggregated"),
            "absent": Published(value="identity", told="a client does not change layers that it lacks"),
            "copies": Published(
                value="drawn in every round",
                told={
                    "drawn": "copied neurons are drawn once per client, about equally often",
                    "cyclic": "neurons are copied in cyclic order",
                },
            ),
            "weighting": BY_SAMPLES,
            "choice": DECLARED,
        },
    )
    merge: Literal["group", "paper"] = "group"
    absent: Literal["keep", "identity"] = "keep"
    copies: Copies = "drawn"
    weighting: Weighting = "samples"
    choice: FixedSize = "largest"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ("the server widens and deepens updates, so clients train only their own networks",)

    def roles(self) -> Roles:
        """One union, of which each client has a copy of its own."""
        plain = self.merge == "group" and self.absent == "keep"
        union = Roles(
            assigner=Assigner(space=_space, exchange=self._exchange),
            aggregator=Aggregator(
                weigh=weigh_by(self.weighting),
                transform=None if plain else self._transform,
                after_round=partial(_keep_copies, self.copies),
                model="client",
            ),
        )
        unions = Unions(holds=_holds, succeed=partial(_succeed, self.copies), most_times=_MOST_TIMES)
        return with_fixed_sizes(union, self.choice, unions)

    def _exchange(self, network: Network, client: Participant, kept: Mapping[str, Tensor]) -> Exchange:
        from subfleet.elastic.narrowing import Narrowing

        replication = _replication(self.copies, network, client, kept)
        return replication if self.merge == "group" else Narrowing(replication=replication)

    def _transform(
        self, network: Network, state: Mapping[str, Tensor], clients: Sequence[ClientUpdate]
    ) -> Sequence[Replacement]:
        return [self._unified(network, state, client) for client in clients]

    def _unified(self, network: Network, state: Mapping[str, Tensor], client: ClientUpdate) -> Replacement:
        """What a client's network, made as wide and deep as the union, moves that by."""
        replication = _replication_of(client.exchange)
        trained = {name: client.received[name] + one for name, one in client.change.items()}
        if self.merge == "group":
            change = replication.up(client.change)
        else:
            change = {name: one - state[name] for name, one in replication.up(trained).items()}
        if self.absent == "keep":
            return Replacement(architecture=replication.moved, change=change)
        # A layer that the client lacks is one that computes nothing.
        whole = replication.grow(trained, state)
        lacking = {name: one - state[name] for name, one in whole.items() if name not in change}
        return Replacement(architecture=network.full_architecture(), change={**change, **lacking})


def _holds(network: Network, size: Architecture) -> bool:
    from subfleet.elastic.replication import is_replicable

    return is_replicable(network, size)


def _space(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """The sizes that the union can be made of."""
    return tuple(size for size in uniform_space(network, rates) if _holds(network, size))


def _replication_of(exchange: Exchange | None) -> Replication:
    from subfleet.elastic.narrowing import Narrowing
    from subfleet.elastic.replication import Replication

    if isinstance(exchange, Narrowing):
        return exchange.replication
    if not isinstance(exchange, Replication):
        raise TypeError(f"a client of FedADP has a copy of the union, but came with {exchange!r:.80}")
    return exchange


def _copied(copies: Copies, network: Network, size: Architecture, stream: random.Random) -> Replication:
    from subfleet.elastic.replication import Replication

    return Replication.cycle(network, size) if copies == "cyclic" else Replication.drawn(network, size, stream)


def _replication(copies: Copies, network: Network, client: Participant, kept: Mapping[str, Tensor]) -> Replication:
    """What the union's neurons copy of a client's: what is remembered of it, and else found for it.

    It is so once for each client: the union's neurons would otherwise mean something else in every round.
    """
    drawn = _copied(copies, network, client.size, stream_of(f"{client.client_id}/{network.id}/copies"))
    known = {
        kind: {
            axis: tuple(kept[_name(kind, client.client_id, axis)].tolist())
            for axis in drawn.sources
            if _name(kind, client.client_id, axis) in kept
        }
        for kind in ("copies", "shares")
    }
    sources = MappingProxyType({**drawn.sources, **known["copies"]})
    return replace(drawn, sources=sources, shares=MappingProxyType(known["shares"]))


def _name(kind: str, client_id: str, axis: str) -> str:
    return f"{kind}/{client_id}/{axis}"


def _keep_copies(copies: Copies, context: AggregationContext) -> ModelState:
    """The model with what the union's neurons copy of those whose updates are in it."""
    import torch

    kept, place = dict(context.after.kept), next(iter(context.after.shared.values())).device
    for client in context.clients:
        kept[f"{_CLIENTS}{client.client_id}"] = torch.ones(1, dtype=torch.int32, device=place)  # if it copies nothing
        for axis, source in _replication(copies, context.network, client, context.before.kept).sources.items():
            kept[_name("copies", client.client_id, axis)] = torch.tensor(source, dtype=torch.int32, device=place)
    return replace(context.after, kept=MappingProxyType(kept))


def _succeed(copies: Copies, succession: Succession) -> tuple[Inheritance, ModelState]:
    """A successor of which every client's network is the same copy as before: copies are made of the union's copies."""
    import torch

    from subfleet.elastic.building import init_state
    from subfleet.elastic.model_state import ModelState
    from subfleet.elastic.replication import size_in

    parent, network, state = succession.parent, succession.network, succession.state
    like = next(iter(state.shared.values()))
    first = {name: one.to(like) for name, one in init_state(network, succession.seed).items()}
    larger = _copied(copies, network, size_in(network, parent), succession.stream)
    kept = {name: one for name, one in state.kept.items() if name.startswith(_CLIENTS)}
    known = {name.removeprefix(_CLIENTS) for name in state.kept if name.startswith(_CLIENTS)}
    for axis, own in _axes_in(network, parent).items():
        if axis not in larger.sources:
            kept |= {
                _name(kind, client_id, axis): state.kept[_name(kind, client_id, own)]
                for kind in ("copies", "shares")
                for client_id in known
                if _name(kind, client_id, own) in state.kept
            }
            continue
        source = torch.tensor(larger.sources[axis], device=like.device)
        share = torch.tensor(larger.share_of(axis), dtype=torch.float64, device=like.device)
        for client_id in known:
            before = state.kept.get(
                _name("copies", client_id, own), torch.arange(parent.axes[own].size, device=like.device)
            )
            uniform = 1 / torch.bincount(before)[before].double()
            shares = state.kept.get(_name("shares", client_id, own), uniform)
            kept[_name("copies", client_id, axis)] = before[source].to(torch.int32)
            kept[_name("shares", client_id, axis)] = shares[source] * share
    how = Replicated(sources=tuple(sorted(larger.sources.items())))
    grown = ModelState(shared=larger.grow(state.shared, first), kept=MappingProxyType(kept))
    return (Copied() if network.config == parent.config else how), grown


def _axes_in(network: Network, parent: Network) -> dict[str, str]:
    """Of the axes of a union, what they are in the one that it succeeds, as the tensors of both tell."""
    found = dict[str, str]()
    for name, decl in network.tensors.items():
        before = parent.tensors.get(name)
        for dim, own in zip(decl.axes, () if before is None else before.axes, strict=False):
            for axis, one in zip(factors_of(dim, 0), factors_of(own, 0), strict=False):
                if isinstance(axis, str) and isinstance(one, str):
                    found[axis] = one
    return found
