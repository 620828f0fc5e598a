"""The way of weights along a lineage: what a network's tensors are in one that grew from it, and the other way round.

A grown network computes what its parent does through the map that it grew by. Through the same map the parent's later
weights can be told in the child's shapes. Where there is no such map, or it is not to be taken, the parent lies in the
front of every axis of the child, as in HeteroFL, and what is beyond is not the parent's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from subfleet.elastic.lineage import Inheritance, Replicated
from subfleet.elastic.maps import TensorMap, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.replication import Replication, size_in

__all__ = ["Descent", "MappedTensor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappedTensor:
    """One tensor of a network, as another one has it.

    Attributes:
        values: float64, in the shape in which the other one has it.
        held: 1 where there is something of the network, else 0; None where there is everywhere.
    """

    values: Tensor
    held: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Descent:
    """One step of a lineage.

    Attributes:
        child: the network that grew.
        maps: by name of the parent's tensors, where they lie in the child's.
        everywhere: whether each index of the child copies one of the parent's.
    """

    child: Network
    maps: Mapping[str, TensorMap]
    everywhere: bool

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
        if share == "transform" and isinstance(how, Replicated):
            return cls(child=child, maps=Replication.of(child, parent, how).maps(), everywhere=True)
        return cls(child=child, maps=tensor_maps(child, size_in(child, parent)), everywhere=False)

    def down(self, name: str, parent: MappedTensor) -> MappedTensor:
        """What a tensor of the parent is in the child."""
        if parent.values.shape == self.child.tensors[name].shape:  # axes only grow, so that none of its has
            return parent
        values, held = self._embed(name, parent.values), parent.held
        if held is None and not self.everywhere:
            held = torch.ones_like(parent.values)
        return MappedTensor(values=values, held=None if held is None else self._embed(name, held).gt(0).double())

    def up(self, name: str, child: MappedTensor) -> MappedTensor:
        """What a tensor of the child is in the parent, where that has it."""
        one = self.maps[name]
        held = None if child.held is None else one.extract(child.held).gt(0).double()
        return MappedTensor(values=one.extract(child.values), held=held)

    def _embed(self, name: str, local: Tensor) -> Tensor:
        into = local.new_zeros(self.child.tensors[name].shape)
        self.maps[name].scatter(local, into)
        return into
