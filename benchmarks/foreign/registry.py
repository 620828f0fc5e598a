"""All networks that the exporter is tested with, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from foreign.handwritten import HANDWRITTEN
from foreign.network import ForeignNetwork
from foreign.transformers_networks import TRANSFORMERS
from foreign.vision import VISION

__all__ = ["NETWORKS"]

NETWORKS: Mapping[str, ForeignNetwork] = MappingProxyType(
    {network.name: network for network in (*VISION, *TRANSFORMERS, *HANDWRITTEN)}
)
