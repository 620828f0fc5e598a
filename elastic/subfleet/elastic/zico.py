"""The tensors by whose gradients a submodel is scored."""

from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Architecture

__all__ = ["list_scored_tensors"]


def list_scored_tensors(network: Network, architecture: Architecture) -> tuple[str, ...]:
    """Names of a submodel's tensors whose gradients are scored: the weights of its convolutions and linear layers.

    Raises:
        ConfigError: the architecture is no submodel of this network.
    """
    return tuple(name for name in network.shapes(architecture) if network.tensors[name].role in ("weight", "residual"))
