"""The way of weights along a lineage: what a network's tensors are in one that grew from it, and the other way round.

A grown network computes what its parent does through the map that it grew by. Through the same map the parent's later
weights can be told in the child's shapes. Where there is no such map, or it is not to be taken, the parent lies in the
front of every axis of the child, as in HeteroFL, and what is beyond is not the parent's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from subfleet.elastic.lineage import Inheritance, Replicated
from subfleet.elastic.maps import TensorMap, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.replication import Replication, size_in

__all__ = ["Descent", "Image"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Image:
    """Some of a network's tensors, as another one has them.

    Attributes:
        values: by name, float64 in the network's own shapes.
        held: by the same names, where the other one has something: 1 or 0 in the same shape.
    """

    values: Mapping[str, Tensor]
    held: Mapping[str, Tensor]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "Image":
        """A network's own tensors, all of which it has."""
        values = {name: tensor.double() for name, tensor in weights.items()}
        return cls(values=values, held={name: torch.ones_like(one) for name, one in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Descent:
    """One step of a lineage.

    Attributes:
        child: the network that grew.
        maps: by name of the parent's tensors, where they lie in the child's.
    """

    child: Network
    maps: Mapping[str, TensorMap]

    @classmethod
    def of(cls, child: Network, parent: Network, how: Inheritance, share: Literal["transform", "crop"]) -> "Descent":
        """The step from a parent to what grew from it.

        Args:
            child: that.
            parent: its parent.
            how: the map that it grew by.
            share: "transform" goes by that map where it has copies; "crop" by the front of every axis.

        Raises:
            ConfigError: the parent is no size of the child.
        """
        size = size_in(child, parent)
        if share == "transform" and isinstance(how, Replicated):
            replication = Replication(network=child, size=size, sources=MappingProxyType(dict(how.sources)))
            return cls(child=child, maps=replication.maps())
        return cls(child=child, maps=tensor_maps(child, size))

    def down(self, parent: Image) -> Image:
        """Of a network's tensors in the parent's shapes, what they are in the child's."""
        values = {name: self._scattered(name, one) for name, one in parent.values.items() if name in self.maps}
        held = {name: self._scattered(name, parent.held[name]).gt(0).double() for name in values}
        return Image(values=values, held=held)

    def up(self, child: Image) -> Image:
        """Of a network's tensors in the child's shapes, what they are in the parent's."""
        maps = {name: one for name, one in self.maps.items() if name in child.values}
        values = {name: one.extract(child.values[name]) for name, one in maps.items()}
        held = {name: one.extract(child.held[name]).gt(0).double() for name, one in maps.items()}
        return Image(values=values, held=held)

    def _scattered(self, name: str, local: Tensor) -> Tensor:
        into = local.new_zeros(self.child.tensors[name].shape)
        self.maps[name].scatter(local, into)
        return into
