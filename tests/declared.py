"""What networks are, whatever settings describe them."""

from subfleet.elastic.building import network_of
from subfleet.elastic.network import Family


def list_shapes(config: Family) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a network by its name."""
    return {name: decl.shape for name, decl in network_of(config).tensors.items()}
