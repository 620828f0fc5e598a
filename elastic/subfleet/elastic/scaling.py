"""Scalable aggregation: the weights of each client are scaled to the mean norm of all clients, layer by layer.

Park and Joe-Wong, "Federated Learning with Flexible Architectures" (FedFA), section 4.3. The paper divides by an L2
norm, which grows with the number of weights. Wide clients are then scaled down even without training, and the weights
that only they hold shrink round after round. Norms per weight, or of the weights that all clients share, avoid this.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.elastic.maps import TensorMap, embed, tensor_maps
from subfleet.elastic.network import Network, Role
from subfleet.elastic.technique_settings import Central, WeightNorm
from subfleet.protocol.submodel import Architecture

_SCALED_ROLES: frozenset[Role] = frozenset({"weight", "residual", "embedding", "symbol"})
_LEAST_NORM = 1e-12
Client = tuple[Architecture, Mapping[str, Tensor]]


def compute_scale_factors(
    network: Network, clients: Sequence[Client], *, norm: WeightNorm = "common", central: Central = "absolute"
) -> tuple[dict[str, float], ...]:
    """Compute the factors that scale each client's tensors to the mean norm of all clients.

    Biases, norms, steps and tensors of norm 0 have the factor 1. The factors do not depend on the order of clients.

    Args:
        network: the network.
        clients: submodel and trained tensors of each client; after grafting if depths differ.
        norm: how the size of weights is measured.
        central: which weights count.

    Returns:
        The factors of each client by tensor. Means are over the clients that hold a tensor.

    Raises:
        ConfigError: an architecture is not a submodel of this network.
    """
    maps = [tensor_maps(network, architecture) for architecture, _ in clients]
    factors: list[dict[str, float]] = [dict.fromkeys(held, 1.0) for held in maps]
    for name, decl in network.tensors.items():
        holders = [client for client, held in enumerate(maps) if name in held]
        if decl.role not in _SCALED_ROLES or len(decl.shape) < 2 or not holders:
            continue
        tensors = [clients[client][1][name] for client in holders]
        if norm == "common":
            tensors = _select_common(decl.shape, [maps[client][name] for client in holders], tensors)
        sizes = [_measure(tensor, norm, central) for tensor in tensors]
        mean = math.fsum(sizes) / len(sizes)
        for client, size in zip(holders, sizes, strict=True):
            # Exactly 1 for equal sizes, because their mean may be rounded.
            factors[client][name] = 1.0 if size < _LEAST_NORM or len(set(sizes)) == 1 else mean / size
    return tuple(factors)


def scale_change(
    received: Mapping[str, Tensor], change: Mapping[str, Tensor], factors: Mapping[str, float]
) -> dict[str, Tensor]:
    """The change to a client's weights multiplied by its factors: factor * (received + change) - received.

    A factor of 1 keeps every bit of the change.

    Args:
        received: the client's weights before training.
        change: trained minus received.
        factors: factors by tensor.
    """
    return {
        name: tensor if factors[name] == 1 else _scale(received[name], tensor, factors[name])
        for name, tensor in change.items()
    }


def _scale(received: Tensor, change: Tensor, factor: float) -> Tensor:
    old = received.double()
    return (factor * (old + change.double()) - old).to(change.dtype)


def _select_common(shape: tuple[int, ...], maps: Sequence[TensorMap], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The elements of each client's tensor that all clients hold, as a flat tensor."""
    pairs = list(zip(maps, tensors, strict=True))
    shared = sum(embed(own, torch.ones_like(tensor), shape) for own, tensor in pairs) == len(tensors)
    # In the order of the full tensor, so that equal elements have equal norms in every order of a client's indices.
    return [embed(own, tensor, shape)[shared] for own, tensor in pairs]


def _measure(tensor: Tensor, norm: WeightNorm, central: Central) -> float:
    weights = tensor.detach().double().flatten()
    if not len(weights):
        return 0.0
    squares = _CENTRAL[central](weights).square()
    return math.sqrt(float(squares.mean() if norm == "rms" else squares.sum()))


def _select_absolute(weights: Tensor) -> Tensor:
    sizes = weights.abs()
    return sizes[sizes <= _percentile(sizes, 0.95)]


def _select_below(weights: Tensor) -> Tensor:
    return weights[weights <= _percentile(weights, 0.95)]


def _select_between(weights: Tensor) -> Tensor:
    return weights[(weights >= -_percentile(-weights, 0.975)) & (weights <= _percentile(weights, 0.975))]


def _percentile(values: Tensor, share: float) -> Tensor:
    """The smallest value that is at least this fraction of the values; torch.quantile does not take large tensors."""
    return values.kthvalue(math.ceil(share * len(values))).values


_CENTRAL: Mapping[Central, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"absolute": _select_absolute, "below": _select_below, "between": _select_between}
)
