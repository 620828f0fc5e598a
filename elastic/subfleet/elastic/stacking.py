"""The changes of all clients side by side, tensor by tensor, and what is made of each element of them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.submodel import Architecture

__all__ = [
    "ReadChanges",
    "Rule",
    "StackMember",
    "find_held_elements",
    "merge_changes",
    "stack_changes",
    "sum_squares",
]

ReadChanges = Callable[[str], Sequence[Tensor | None]]
"""Gives every member's change of a tensor, in the order of the members; None where its submodel lacks the tensor."""

_CHUNK = 2**16
"""Elements that are reduced at once, so that little memory is taken beside the stack."""

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
class StackMember:
    """A client of the round.

    Attributes:
        architecture: the submodel that it trained.
        weight: its fraction of a mean, above 0.
        counted: by tensor, which elements of its change count as held, bool; it broadcasts against the local tensor,
            such as (classes, 1) for the rows of a head. Of tensors that are not named all do.
    """

    architecture: Architecture
    weight: float
    counted: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def marks(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """1 where its local tensor counts, else 0: int8, of that shape."""
        ones = torch.ones(shape, dtype=torch.int8, device=device)
        return ones * self.counted[name].to(device) if name in self.counted else ones


def merge_changes(
    network: Network,
    state: Mapping[str, Tensor],
    members: Sequence[StackMember],
    read: ReadChanges,
    rule: Rule,
) -> dict[str, Tensor]:
    """The model that a rule makes of the changes of all members."""
    new = {}
    for name, values, held, weights in stack_changes(network, state, members, read):
        old = state[name]
        flat_old, pieces = old.reshape(-1), []
        if not len(values):
            new[name] = old.clone()
            continue
        for start in range(0, flat_old.numel(), _CHUNK):
            rows = slice(start, start + _CHUNK)
            counts = held[:, rows].sum(dim=0)
            change = _reduce_chunk(values[:, rows], held[:, rows], weights, counts, rule)
            moved = (flat_old[rows].to(torch.float64) + change).to(old.dtype)
            # A change of exactly 0 is left out: -0.0 + 0.0 would not be -0.0.
            pieces.append(torch.where((counts > 0) & (change != 0), moved, flat_old[rows]))
        new[name] = torch.cat(pieces).reshape(old.shape)
    return new


def _reduce_chunk(values: Tensor, held: Tensor, weights: Tensor, counts: Tensor, rule: Rule) -> Tensor:
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


def stack_changes(
    network: Network, names: Iterable[str], members: Sequence[StackMember], read: ReadChanges
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Tensor by tensor: its name, values and who holds them, (holders, elements), and the holders' weights.

    Raises:
        ProtocolError: a change has another shape than its submodel's tensor, or is not finite.
    """
    places = [(tensor_maps(network, member.architecture), network.shapes(member.architecture)) for member in members]
    for name in names:
        shape = network.tensors[name].shape
        given = zip(members, places, read(name), strict=True)
        holders = [(member, maps, shapes, change) for member, (maps, shapes), change in given if change is not None]
        device = holders[0][3].device if holders else torch.device("cpu")
        values = torch.zeros((len(holders), *shape), device=device)
        held = torch.zeros((len(holders), *shape), dtype=torch.int8, device=device)
        for place, (member, maps, shapes, change) in enumerate(holders):
            if name not in maps or tuple(change.shape) != shapes[name] or not bool(torch.isfinite(change).all()):
                raise ProtocolError(
                    f"tensor {name!r} of an update has the shape {tuple(change.shape)}, but must be finite and have "
                    f"the shape {shapes.get(name)} of its submodel"
                )
            maps[name].scatter(change, values[place])
            maps[name].scatter(member.marks(name, shapes[name], device), held[place])
        weights = torch.tensor([member.weight for member, *_ in holders], dtype=torch.float64, device=device)
        flat = (len(holders), math.prod(shape))
        yield name, values.reshape(flat), held.reshape(flat).bool(), weights


def find_held_elements(
    network: Network, state: Mapping[str, Tensor], members: Sequence[StackMember]
) -> dict[str, Tensor]:
    """Which elements of some tensors of the model any of the members hold, bool."""
    held = {name: torch.zeros(tensor.shape, dtype=torch.int32, device=tensor.device) for name, tensor in state.items()}
    for member in members:
        shapes = network.shapes(member.architecture)
        for name, tensor_map in tensor_maps(network, member.architecture).items():
            if name in held:
                tensor_map.scatter(member.marks(name, shapes[name], held[name].device).int(), held[name])
    return {name: count > 0 for name, count in held.items()}


def sum_squares(tensor: Tensor) -> float:
    """Sum of the squares of all elements, in float64."""
    return float(tensor.to(torch.float64).square().sum())
