"""FedADP: clients with architectures of their own, which are copied from and to one union.

"FedADP: Unified Model Aggregation for Federated Learning with Heterogeneous Model Architectures", 2025.

Client half: train the given network, which has the client's own architecture in all rounds.
Server half: the model is the union of all architectures, section by section the greatest depth and width. A client
receives the union made narrower and shallower; its update is made wider by copies and deeper by layers that compute
nothing, and averaged. Both happen here, so that a client trains its own network alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from subfleet.elastic.axes import factors_of
from subfleet.elastic.lineage import Copied, Inheritance, Replicated
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.aggregator import (
    COUNTED_EQUALLY,
    AggregationContext,
    Aggregator,
    ClientUpdate,
    Exchange,
    ModelState,
    Participant,
    Replacement,
    Tensor,
    Weighting,
    weigh_by,
)
from subfleet.methods.assigner import Assigner, open_stream
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import UNDECLARED, FixedSize, with_fixed_sizes
from subfleet.methods.uniting import Succession, Unions
from subfleet.protocol.submodel import Architecture

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from subfleet.elastic.replication import Replication

Copies = Literal["drawn", "cyclic"]
"""Which of a client's neurons the additional neurons of the union copy; see `FedADP.copies`."""

_MOST_TIMES = 16.0
"""The most parameters of a declared network, as a multiple of the median. Every network is copied to the union's width
and back, so one far larger network would cost all clients."""
_CLIENTS = "clients/"
"""Prefix of the names under which each client that has taken part is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedADP:
    """Parameters of FedADP.

    Attributes:
        merge: "group" gives a client the means of its neurons' copies in the union, so that it gets back what it
            learned, and aggregates changes. "paper" gives it the first neurons, divides the weights that read the
            others among them, and averages whole networks.
        absent: "keep" leaves the layers that a client lacks to the others; with "identity" it counts there as an
            identity.
        copies: which of a client's neurons each additional neuron of the union copies: "drawn" once for each client,
            where the paper draws in every round; or "cyclic", from the first on, so that clients of the same width, or
            of whole multiples, have the same copies.
        weighting: the weight of an update.
        choice: "largest" or "declared", see `subfleet.methods.sizes`.
    """

    TYPE: ClassVar[str] = "fedadp"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedADP",
        paper="FedADP: Unified Model Aggregation for Federated Learning with Heterogeneous Model Architectures, 2025",
        varies=("width", "depth"),
        departures={"the server widens and deepens updates, so clients train only their own networks": always},
    )
    merge: Literal["group", "paper"] = parameter(
        "group", paper="paper", otherwise="clients receive means of copies, and changes are aggregated"
    )
    absent: Literal["keep", "identity"] = parameter(
        "keep", paper="identity", otherwise="a client does not change layers that it lacks"
    )
    copies: Copies = parameter(
        "drawn",
        paper="drawn in every round",
        otherwise={
            "drawn": "copied neurons are drawn once per client, about equally often",
            "cyclic": "neurons are copied in cyclic order",
        },
    )
    weighting: Weighting = parameter("samples", otherwise=COUNTED_EQUALLY)
    choice: FixedSize = parameter("largest", paper="declared", otherwise=UNDECLARED)

    def roles(self) -> Roles:
        """A union of all architectures."""
        plain = self.merge == "group" and self.absent == "keep"
        union = Roles(
            assigner=Assigner(space=_list_sizes, exchange=self._exchange),
            aggregator=Aggregator(
                weigh=weigh_by(self.weighting),
                transform=None if plain else self._transform,
                after_round=partial(_keep_copies, self.copies),
                model="client",
            ),
        )
        unions = Unions(holds=_holds, succeed=partial(succeed_union, self.copies), most_times=_MOST_TIMES)
        return with_fixed_sizes(union, self.choice, unions)

    def _exchange(self, network: Network, client: Participant, kept: Mapping[str, Tensor]) -> Exchange:
        from subfleet.elastic.exchanges import Narrowing

        replication = _build_replication(self.copies, network, client, kept)
        return replication if self.merge == "group" else Narrowing(replication=replication)

    def _transform(
        self, network: Network, state: Mapping[str, Tensor], clients: Sequence[ClientUpdate]
    ) -> Sequence[Replacement]:
        return [self._replicate(network, state, client) for client in clients]

    def _replicate(self, network: Network, state: Mapping[str, Tensor], client: ClientUpdate) -> Replacement:
        """The change of the union by a client's network, made as wide and deep as the union."""
        from subfleet.elastic.exchanges import Narrowing

        exchange = cast("Replication | Narrowing", client.exchange)  # as `_exchange` makes it
        replication = exchange.replication if isinstance(exchange, Narrowing) else exchange
        trained = {name: client.received[name] + change for name, change in client.change.items()}
        if self.merge == "group":
            change = replication.up(client.change)
        else:
            change = {name: tensor - state[name] for name, tensor in replication.up(trained).items()}
        if self.absent == "keep":
            return Replacement(architecture=replication.moved, change=change)
        # The client counts with an identity for each layer that it lacks.
        whole = replication.grow(trained, state)
        lacking = {name: tensor - state[name] for name, tensor in whole.items() if name not in change}
        return Replacement(architecture=network.full_architecture(), change={**change, **lacking})


def _holds(network: Network, size: Architecture) -> bool:
    from subfleet.elastic.replication import is_replicable

    return is_replicable(network, size)


def _list_sizes(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """The sizes that the union can replicate."""
    return tuple(size for size in uniform_space(network, rates) if _holds(network, size))


def _copy(copies: Copies, network: Network, size: Architecture, stream: random.Random) -> Replication:
    from subfleet.elastic.replication import Replication

    return Replication.cycle(network, size) if copies == "cyclic" else Replication.draw(network, size, stream)


def _build_replication(
    copies: Copies, network: Network, client: Participant, kept: Mapping[str, Tensor]
) -> Replication:
    """The copies of a client's neurons in the union: the remembered ones, else new ones.

    They are made once for each client; otherwise the union's neurons would change their meaning in every round.
    """
    drawn = _copy(copies, network, client.size, open_stream(f"{client.client_id}/{network.id}/copies"))
    copied, shares = (
        {
            axis: tuple(kept[name].tolist())
            for axis in drawn.sources
            if (name := _name(kind, client.client_id, axis)) in kept
        }
        for kind in ("copies", "shares")
    )
    return replace(drawn, sources=MappingProxyType({**drawn.sources, **copied}), shares=MappingProxyType(shares))


def _name(kind: str, client_id: str, axis: str) -> str:
    return f"{kind}/{client_id}/{axis}"


def _keep_copies(copies: Copies, context: AggregationContext) -> ModelState:
    """Remember the copies of the clients that sent updates."""
    import torch

    kept = dict(context.after.kept)
    tensor = partial(torch.tensor, dtype=torch.int32, device=next(iter(context.after.shared.values())).device)
    for client in context.clients:
        kept[f"{_CLIENTS}{client.client_id}"] = tensor([1])  # even if it copies nothing
        for axis, source in _build_replication(copies, context.network, client, context.before.kept).sources.items():
            kept[_name("copies", client.client_id, axis)] = tensor(source)
    return replace(context.after, kept=MappingProxyType(kept))


def succeed_union(copies: Copies, succession: Succession) -> tuple[Inheritance, ModelState]:
    """A successor with the same copy of every client's network: it copies the union's copies."""
    import torch

    from subfleet.elastic.model_state import ModelState
    from subfleet.elastic.replication import size_in

    parent, network, state = succession.parent, succession.network, succession.state
    like = next(iter(state.shared.values()))
    larger = _copy(copies, network, size_in(network, parent), succession.stream)
    kept = {name: mark for name, mark in state.kept.items() if name.startswith(_CLIENTS)}
    known = {name.removeprefix(_CLIENTS) for name in kept}
    for axis, own in _match_axes(network, parent).items():
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
    grown = ModelState(shared=larger.grow(state.shared, succession.first), kept=MappingProxyType(kept))
    return (Copied() if network.config == parent.config else how), grown


def _match_axes(network: Network, parent: Network) -> dict[str, str]:
    """By axis of a union, the corresponding axis of the union that it succeeds, according to their common tensors."""
    axes = dict[str, str]()
    for name, decl in network.tensors.items():
        before = parent.tensors.get(name)
        for dim, own in zip(decl.axes, () if before is None else before.axes, strict=False):
            for axis, old in zip(factors_of(dim, 0), factors_of(own, 0), strict=False):
                if isinstance(axis, str) and isinstance(old, str):
                    axes[axis] = old
    return axes
