"""Permutations of the indices of axes, which do not change what a network computes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from subfleet.elastic.axes import Axis
from subfleet.elastic.maps import reduce_to_axes, tensor_maps
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Explicit


def permute(
    network: Network, state: Mapping[str, Tensor], permutations: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Permute the indices of some axes in all tensors that are tied to them.

    A network computes the same after all of its tensors are permuted alike.

    Args:
        network: the network.
        state: all or some of the full model's tensors by name.
        permutations: by axis, the old index at each new position.

    Returns:
        Contiguous tensors that share no memory with the given ones.

    Raises:
        ConfigError: the network has no such axis or tensor, an order lacks an index or splits a group, or an axis must
            keep its order.
    """
    unknown = sorted(state.keys() - network.tensors.keys())
    if unknown:
        raise ConfigError(f"tensor {unknown[0]!r} is to be permuted, but its network declares no such tensor")
    for name, order in permutations.items():
        if name in network.axes and len(order) != network.axes[name].size:
            raise ConfigError(
                f"the new order of axis {name!r} has {len(order)} indices, but must have all {network.axes[name].size}"
            )
    axes = tuple((name, Explicit(indices=tuple(order))) for name, order in sorted(permutations.items()))
    maps = tensor_maps(network, replace(network.full_architecture(), axes=axes))
    return {
        name: maps[name].extract(tensor).clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
    }


def rank_indices(
    network: Network, state: Mapping[str, Tensor], *, power: Literal[1, 2] = 2
) -> dict[str, tuple[int, ...]]:
    """Rank the indices of each axis that can be permuted, most important first.

    The importance of an index is the norm of all weights that are tied to it; that of a group is the norm over all its
    indices. Equal ones stay in order (Li et al. 2023, "AnycostFL", with the L2 norm). Running statistics do not count.

    Args:
        network: the network.
        state: the full model's tensors by name.
        power: 1 for the L1 norm, 2 for the L2 norm.
    """
    sums = {
        name: torch.zeros(axis.size, dtype=torch.float64)
        for name, axis in network.axes.items()
        if axis.kind not in ("class", "kernel")
    }
    for decl in network.tensors.values():
        if decl.role in BUFFER_ROLES:
            continue
        energy = state[decl.name].double().abs().pow(power)
        for axis, own in reduce_to_axes(network, decl, energy, partial(torch.sum, dim=1)):
            if axis in sums:
                sums[axis] += own.cpu()
    return {name: order_indices(network.axes[name], own) for name, own in sums.items()}


def order_indices(axis: Axis, sums: Tensor) -> tuple[int, ...]:
    """The indices of an axis by their importance, largest first; those of a group stay together."""
    groups = sums.reshape(-1, axis.granularity).sum(1)
    order = torch.sort(groups, descending=True, stable=True).indices.tolist()
    step = axis.granularity
    return tuple(group * step + offset for group in order for offset in range(step))
