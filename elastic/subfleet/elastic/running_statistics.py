"""Running statistics of norms, measured on data with the weights held still.

Training lets the statistics of a batch norm lag behind its weights, and a subnet's differ from the full network's.
HeteroFL's static batch norm (Diao et al. 2021, section 3.3) keeps none while it trains and measures them before each
evaluation. Here a device returns sums, which add up over batches and over devices to the statistics of all their data;
with one batch they are those of PyTorch's cumulative average.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subfleet.elastic.families import build_module
from subfleet.elastic.maps import extract, tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import DataError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["NormMoments", "measured_moments", "merged_statistics", "norm_tensors", "recalibrated"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormMoments:
    """What a norm was given, summed up.

    Attributes:
        total: sum of each channel, float64 (channels,).
        squares: sum of squares of each channel, float64 (channels,).
        count: values of a channel: samples times places.
    """

    total: Tensor
    squares: Tensor
    count: int

    def __add__(self, other: "NormMoments") -> "NormMoments":
        return NormMoments(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )


def norm_tensors(network: Network) -> frozenset[str]:
    """Names of all tensors of norms: gain, bias, running mean and variance. Some methods keep them apart by spec."""
    layers = {_layer(name) for name, decl in network.tensors.items() if decl.role in ("gain", "mean", "variance")}
    return frozenset(name for name in network.tensors if _layer(name) in layers)


def measured_moments(
    network: Network, spec: SubnetSpec, state: Mapping[str, Tensor], batches: Iterable[Tensor]
) -> dict[str, NormMoments]:
    """What the norms of a subnet are given by some data, each normalising by its own batch as in training.

    Args:
        network: the declaration.
        spec: the subnet.
        state: the full model's tensors by name.
        batches: inputs (samples, *input_shape).

    Returns:
        Moments of each norm that has running statistics, by the name of its layer.

    Raises:
        ConfigError: the spec is no subnet of this network, or the state lacks one of its tensors.
    """
    device = next(iter(state.values())).device
    module = build_module(network, spec).to(device)
    module.load_state_dict(extract(network, spec, state))
    module.eval()
    found: dict[str, NormMoments] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
            layer.register_forward_pre_hook(_recorder(name, found))
    with torch.no_grad():
        for inputs in batches:
            module(inputs.to(device))
    return found


def merged_statistics(moments: Sequence[Mapping[str, NormMoments]]) -> dict[str, Tensor]:
    """The running statistics, float32, that all the data together would give.

    Args:
        moments: of one subnet, of each client.

    Returns:
        Mean and unbiased variance of each norm by name of the tensor.

    Raises:
        DataError: the clients measured different norms, or fewer than two values of one.
    """
    if len({frozenset(one) for one in moments}) > 1:
        raise DataError("clients measured the norms of different networks; merge those of one subnet only")
    merged: dict[str, Tensor] = {}
    for layer in moments[0] if moments else ():
        whole = _sum([one[layer] for one in moments])
        if whole.count < 2:
            raise DataError(f"norm {layer!r} was given {whole.count} value of each channel, but a variance needs two")
        mean = whole.total / whole.count
        merged[f"{layer}.running_mean"] = mean.float()
        # Rounding may leave a constant channel a hair below 0.
        squares = (whole.squares - whole.total * mean).clamp(min=0)
        merged[f"{layer}.running_var"] = (squares / (whole.count - 1)).float()
    return merged


def recalibrated(
    network: Network, state: Mapping[str, Tensor], spec: SubnetSpec, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """The full model with the running statistics that a subnet of it has on some data; all else keeps its bits.

    Args:
        network: the declaration.
        state: the full model's tensors by name.
        spec: the subnet that will be evaluated; statistics of channels and blocks that it lacks stay as they are.
        batches: inputs (samples, *input_shape).

    Raises:
        ConfigError: the spec is no subnet of this network, or the state lacks one of its tensors.
        DataError: a norm was given fewer than two values of each channel.
    """
    maps = tensor_maps(network, spec)
    new = dict(state)
    for name, local in merged_statistics([measured_moments(network, spec, state, batches)]).items():
        held, placed = torch.zeros_like(state[name]), torch.zeros_like(state[name])
        maps[name].scatter(torch.ones_like(local), held)
        maps[name].scatter(local, placed)
        new[name] = torch.where(held > 0, placed, state[name])
    return new


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _recorder(name: str, found: dict[str, NormMoments]) -> Callable[[nn.Module, Any], None]:
    def record(_module: nn.Module, given: tuple[Tensor]) -> None:
        values = given[0].double().transpose(0, 1).flatten(1)
        moments = NormMoments(total=values.sum(1), squares=values.square().sum(1), count=values.shape[1])
        found[name] = found[name] + moments if name in found else moments

    return record


def _sum(moments: Sequence[NormMoments]) -> NormMoments:
    whole = moments[0]
    for one in moments[1:]:
        whole += one
    return whole
