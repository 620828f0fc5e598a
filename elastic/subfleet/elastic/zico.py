"""The tensors by whose gradients a subnet is scored."""

from subfleet.elastic.network import Network
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["scored_tensors"]


def scored_tensors(network: Network, spec: SubnetSpec) -> tuple[str, ...]:
    """Names of a subnet's tensors whose gradients are scored: the weights of its convolutions and linear layers.

    Raises:
        ConfigError: the spec is no subnet of this network.
    """
    return tuple(name for name in network.shapes(spec) if network.tensors[name].role in ("weight", "residual"))
