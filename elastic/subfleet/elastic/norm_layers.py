"""The norms of a network."""

from subfleet.elastic.network import Network
from subfleet.protocol.calibration import NormLayer
from subfleet.protocol.submodel import Architecture

_MOMENTUM = 0.1
"""Momentum of running statistics in every family: PyTorch's default."""


def norm_tensors(network: Network) -> frozenset[str]:
    """Names of all tensors of norms (gain, bias, running mean, variance), which some methods keep per architecture."""
    layers = {_layer(name) for name, decl in network.tensors.items() if decl.role in ("gain", "mean", "variance")}
    return frozenset(name for name in network.tensors if _layer(name) in layers)


def norm_layers(network: Network, architecture: Architecture) -> tuple[NormLayer, ...]:
    """The norms of a submodel with running statistics, in network order.

    Raises:
        ConfigError: the architecture is not a submodel of this network.
    """
    layers = []
    for name, shape in network.shapes(architecture).items():
        decl = network.tensors[name]
        if decl.role == "mean":
            scale = shape[0] / decl.shape[0] if network.config.scaler else 1.0
            layers.append(NormLayer(name=_layer(name), positions=decl.positions, momentum=_MOMENTUM, scale=scale))
    return tuple(layers)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
