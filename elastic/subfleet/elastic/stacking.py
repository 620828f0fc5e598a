"""The changes of all clients side by side, tensor by tensor, and what is made of each element of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Member", "ReadChanges", "Rule", "largest_tensor", "merged", "square_sum", "stack_bytes", "stacked"]

ReadChanges = Callable[[str], Sequence[Tensor | None]]
"""Gives every member's change of a tensor, in the order of the members; None where its subnet lacks the tensor."""

_CHUNK = 2**16
_CHUNK_BYTES = 64
"""Of each client's element in a chunk: sorted values, their places, weights and products in float64."""


Reduce = Callable[[Tensor, Tensor], Tensor]
"""One value for each element, float64, of values ascending along the clients and of how many of them count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of an element.

    Attributes:
        reduce: makes the change where enough clients share an element; None always takes the weighted mean.
        least_clients: how many are enough.
        stay: elsewhere an element stays as it is; else it takes the weighted mean.
    """

    reduce: Reduce | None = None
    least_clients: int = 1
    stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client of the round.

    Attributes:
        spec: the subnet that it trained.
        weight: its share of a mean, above 0.
    """

    spec: SubnetSpec
    weight: float


def merged(
    network: Network,
    state: Mapping[str, Tensor],
    members: Sequence[Member],
    read: ReadChanges,
    rule: Rule,
) -> dict[str, Tensor]:
    """The model that a rule makes of the changes of all members."""
    new = {}
    for name, old in state.items():
        values, held, weights = stacked(network, name, members, read(name))
        flat_old, pieces = old.reshape(-1), []
        if not len(values):
            new[name] = old.clone()
            continue
        for start in range(0, flat_old.numel(), _CHUNK):
            rows = slice(start, start + _CHUNK)
            counts = held[:, rows].sum(dim=0)
            change = _changes(values[:, rows], held[:, rows], weights, counts, rule)
            moved = (flat_old[rows].to(torch.float64) + change).to(old.dtype)
            # A change of exactly 0 is left out: -0.0 + 0.0 would not be -0.0.
            pieces.append(torch.where((counts > 0) & (change != 0), moved, flat_old[rows]))
        new[name] = torch.cat(pieces).reshape(old.shape)
    return new


def _changes(values: Tensor, held: Tensor, weights: Tensor, counts: Tensor, rule: Rule) -> Tensor:
    """How far each element of a chunk moves, in float64."""
    if rule.reduce is None:
        return _weighted_mean(values, held, weights)
    ordered = values.masked_fill(~held, math.inf).sort(dim=0).values
    reduced = rule.reduce(ordered, counts)
    shared = counts >= rule.least_clients
    if bool(shared.all()):
        return reduced
    return torch.where(shared, reduced, 0.0 if rule.stay else _weighted_mean(values, held, weights))


def _weighted_mean(values: Tensor, held: Tensor, weights: Tensor) -> Tensor:
    """Of each element over those who hold it; sorted before it is summed, so that the order of clients is no matter."""
    shares = torch.where(held, weights.unsqueeze(1), 0.0)
    products = torch.where(held, values, 0).to(torch.float64) * shares
    total = shares.sort(dim=0).values.sum(dim=0)
    return products.sort(dim=0).values.sum(dim=0) / torch.where(total > 0, total, 1.0)


def stacked(
    network: Network, name: str, members: Sequence[Member], changes: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Values and who holds them, (holders, elements), and the holders' weights."""
    shape = network.tensors[name].shape
    holders = [(member, found) for member, found in zip(members, changes, strict=True) if found is not None]
    device = holders[0][1].device if holders else torch.device("cpu")
    values = torch.zeros((len(holders), *shape), device=device)
    held = torch.zeros((len(holders), *shape), dtype=torch.int8, device=device)
    for place, (member, change) in enumerate(holders):
        found = tensor_maps(network, member.spec).get(name)
        local_shape = network.shapes(member.spec).get(name)
        if found is None or tuple(change.shape) != local_shape or not bool(torch.isfinite(change).all()):
            raise ProtocolError(
                f"tensor {name!r} of an update has the shape {tuple(change.shape)}, but must be finite and have the "
                f"shape {local_shape} of its subnet"
            )
        found.scatter(change, values[place])
        found.scatter(torch.ones_like(change, dtype=torch.int8), held[place])
    weights = torch.tensor([member.weight for member, _ in holders], dtype=torch.float64, device=device)
    flat = (len(holders), math.prod(shape))
    return values.reshape(flat), held.reshape(flat).bool(), weights


def square_sum(tensor: Tensor) -> float:
    """Sum of the squares of all elements, in float64."""
    return float(tensor.to(torch.float64).square().sum())


def largest_tensor(network: Network) -> int:
    """Elements of the largest tensor."""
    return max(math.prod(decl.shape) for decl in network.tensors.values())


def stack_bytes(network: Network, client_count: int) -> int:
    """Changes as read and stacked in float32, who holds them (twice while it is built), and the scratch of a chunk."""
    largest = largest_tensor(network)
    return client_count * (largest * (4 + 4 + 2) + min(largest, _CHUNK) * _CHUNK_BYTES)
