"""The importance of indices by what a network computes for given samples."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from subfleet.elastic.building import build_module
from subfleet.elastic.maps import reduce_to_axes
from subfleet.elastic.network import Network
from subfleet.elastic.permuting import order_indices

_CHANNELS: Mapping[Callable[..., Any], int] = MappingProxyType(
    {functional.linear: -1, functional.conv1d: 1, functional.conv2d: 1}
)
"""The dimension of the inputs that the second dimension of the weight of a layer runs over, by its function."""


def rank_by_activations(network: Network, state: Mapping[str, Tensor], inputs: Tensor) -> dict[str, tuple[int, ...]]:
    """Rank the indices of each axis that can be permuted, by what they contribute to the layers that read them.

    The contribution of an index to a layer is the mean size of its inputs times the sizes of the weights that read them
    (Sun et al. 2024, "A simple and effective pruning approach for large language models", section 3). Linear layers and
    convolutions without groups count; an axis that none of these reads keeps its order. So do equal indices.

    Args:
        network: the network.
        state: the full model's tensors by name.
        inputs: (samples, *shape of a sample).

    Returns:
        By axis, its indices, most important first; those of a group stay together.
    """
    module = build_module(network, network.full_architecture()).eval()
    module.load_state_dict({name: state[name].cpu() for name in network.tensors})
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with _InputSizes(names) as measured, torch.no_grad():
        module(inputs)
    sums = {
        name: torch.zeros(axis.size, dtype=torch.float64)
        for name, axis in network.axes.items()
        if axis.kind not in ("class", "kernel")
    }
    for name, size in measured.sizes.items():
        decl = network.tensors[name]
        contribution = state[name].cpu().double().abs().reshape(*decl.shape[:2], -1).sum((0, 2)) * size
        read = replace(decl, shape=decl.shape[1:2], axes=decl.axes[1:2])
        for axis, own in reduce_to_axes(network, read, contribution, partial(torch.sum, dim=1)):
            if axis in sums:
                sums[axis] += own
    return {name: order_indices(network.axes[name], own) for name, own in sums.items()}


class _InputSizes(TorchFunctionMode):
    """Measures the mean sizes of what layers read.

    Args:
        names: of weights, by the identity of their parameter.

    Attributes:
        sizes: by weight, the mean size of each of its inputs, summed over its calls.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.sizes: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        name = self._names.get(id(args[1]), "") if func in _CHANNELS and len(args) > 1 else ""
        if name and args[0].shape[_CHANNELS[func]] == args[1].shape[1]:  # not in groups
            size = args[0].double().abs().movedim(_CHANNELS[func], 0).flatten(1).mean(1)
            self.sizes[name] = self.sizes.get(name, 0) + size
        return func(*args, **(kwargs or {}))
