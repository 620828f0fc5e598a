"""Scalable aggregation: every client's weights are brought to the mean size of all, layer by layer.

Park and Joe-Wong, "Federated Learning with Flexible Architectures" (FedFA), section 4.3. The paper divides by an L2
norm, which grows with the number of weights, so that wide clients are scaled down although they learned nothing: what
only they hold shrinks round after round without any training. Norms of one weight's size, or of the weights that all
clients have in common, do not.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.elastic.maps import TensorMap, tensor_maps
from subfleet.elastic.network import Network, Role
from subfleet.elastic.technique_settings import Central, WeightNorm
from subfleet.protocol.submodel import Architecture

__all__ = ["compute_scale_factors", "scale_change"]

_SCALED_ROLES: frozenset[Role] = frozenset({"weight", "residual", "embedding", "symbol"})
_LEAST_NORM = 1e-12
Client = tuple[Architecture, Mapping[str, Tensor]]


def compute_scale_factors(
    network: Network, clients: Sequence[Client], *, norm: WeightNorm = "common", central: Central = "absolute"
) -> tuple[dict[str, float], ...]:
    """The factor that brings each client's weights to the mean norm of all, by tensor.

    Biases, norms and steps keep the factor 1, and so does a tensor without any size. The factors are the same in
    whichever order the clients come.

    Args:
        network: the declaration.
        clients: submodel and trained tensors of each; where depths differ, after grafting.
        norm: how large weights are.
        central: which of them count.

    Returns:
        For each client a factor for each of its tensors. The mean is taken over the clients that hold the tensor.

    Raises:
        ConfigError: an architecture is no submodel of this network.
    """
    maps = [tensor_maps(network, architecture) for architecture, _ in clients]
    found: list[dict[str, float]] = [dict.fromkeys(held, 1.0) for held in maps]
    for name, decl in network.tensors.items():
        holders = [place for place, held in enumerate(maps) if name in held]
        if decl.role not in _SCALED_ROLES or len(decl.shape) < 2 or not holders:
            continue
        tensors = [clients[place][1][name] for place in holders]
        if norm == "common":
            tensors = _select_common(decl.shape, [maps[place][name] for place in holders], tensors)
        sizes = [_measure(tensor, norm, central) for tensor in tensors]
        mean = math.fsum(sizes) / len(sizes)
        for place, size in zip(holders, sizes, strict=True):
            # Exactly 1 for equals, whose mean may be rounded.
            found[place][name] = 1.0 if size < _LEAST_NORM or len(set(sizes)) == 1 else mean / size
    return tuple(found)


def scale_change(
    received: Mapping[str, Tensor], change: Mapping[str, Tensor], factors: Mapping[str, float]
) -> dict[str, Tensor]:
    """The change to a client's weights multiplied by its factors: factor * (received + change) - received.

    A factor of 1 leaves every bit of the change.

    Args:
        received: what the client began with.
        change: trained minus received.
        factors: by tensor.
    """
    return {
        name: tensor if factors[name] == 1 else _scale(received[name], tensor, factors[name])
        for name, tensor in change.items()
    }


def _scale(received: Tensor, change: Tensor, factor: float) -> Tensor:
    old = received.double()
    return (factor * (old + change.double()) - old).to(change.dtype)


def _select_common(shape: tuple[int, ...], maps: Sequence[TensorMap], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of each client's tensor, the elements that all of them hold, as a flat tensor."""
    holders = _embed(shape, maps, [torch.ones_like(tensor) for tensor in tensors])
    shared = sum(holders) == len(tensors)
    # In the order of the full tensor: equal elements have equal norms, whatever the order in which a client holds them.
    return [tensor[shared] for tensor in _embed(shape, maps, tensors)]


def _embed(shape: tuple[int, ...], maps: Sequence[TensorMap], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Each client's tensor at its place in one of the full shape, with 0 elsewhere."""
    for tensor_map, tensor in zip(maps, tensors, strict=True):
        into = tensor.new_zeros(shape)
        tensor_map.scatter(tensor, into)
        yield into


def _measure(tensor: Tensor, norm: WeightNorm, central: Central) -> float:
    weights = tensor.detach().double().flatten()
    if not len(weights):
        return 0.0
    squares = _CENTRAL[central](weights).square()
    return math.sqrt(float(squares.mean() if norm == "rms" else squares.sum()))


def _absolute(weights: Tensor) -> Tensor:
    sizes = weights.abs()
    return sizes[sizes <= _percentile(sizes, 0.95)]


def _below(weights: Tensor) -> Tensor:
    return weights[weights <= _percentile(weights, 0.95)]


def _between(weights: Tensor) -> Tensor:
    return weights[(weights >= -_percentile(-weights, 0.975)) & (weights <= _percentile(weights, 0.975))]


def _percentile(values: Tensor, share: float) -> Tensor:
    """The smallest value that this fraction of the values does not exceed; torch.quantile takes no large tensors."""
    return values.kthvalue(math.ceil(share * len(values))).values


_CENTRAL: Mapping[Central, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"absolute": _absolute, "below": _below, "between": _between}
)
