"""Running statistics of norms, measured on data with the weights held still.

Training lets the statistics of a batch norm lag behind its weights, and a submodel's differ from the full network's.
HeteroFL's static batch norm (Diao et al. 2021, section 3.3) keeps none while it trains and measures them before each
evaluation. Here sums are measured, by the server or by devices (`subfleet.trainers.calibration_job`), which add up
over batches and over devices to the statistics of all their data; with one batch they are those of PyTorch's cumulative
average.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subfleet.elastic.building import build_module
from subfleet.elastic.maps import TensorMap, extract, tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import DataError
from subfleet.protocol.submodel import Architecture

_LEAST_COUNT = 2
"""Values that a variance needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormMoments:
    """What a norm was given, summed up.

    Attributes:
        total: sum of each channel, float64 (channels,).
        squares: sum of squares of each channel, float64 (channels,).
        count: values of a channel: samples times places, and whatever they were scaled with.
    """

    total: Tensor
    squares: Tensor
    count: float

    def __add__(self, other: "NormMoments") -> "NormMoments":
        return NormMoments(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )

    def rescale(self, factor: float) -> "NormMoments":
        """The same of values that are so many times as large, above 0; with 1 to the bit."""
        return NormMoments(total=self.total * factor, squares=self.squares * factor**2, count=self.count)

    def reweight(self, factor: float) -> "NormMoments":
        """The same of data that count so many times, above 0; with 1 to the bit."""
        return NormMoments(total=self.total * factor, squares=self.squares * factor, count=self.count * factor)


def measure_moments(
    network: Network, architecture: Architecture, state: Mapping[str, Tensor], batches: Iterable[Tensor]
) -> dict[str, NormMoments]:
    """What the norms of a submodel are given by some data, each normalising by its own batch as in training.

    Args:
        network: the declaration.
        architecture: the submodel.
        state: the full model's tensors by name.
        batches: inputs (samples, *input_shape).

    Returns:
        Moments of each norm that has running statistics, by the name of its layer.

    Raises:
        ConfigError: the architecture is no submodel of this network, or the state lacks one of its tensors.
    """
    device = next(iter(state.values())).device
    module = build_module(network, architecture).to(device)
    module.load_state_dict(extract(network, architecture, state))
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


def merge_statistics(moments: Sequence[Mapping[str, NormMoments]]) -> dict[str, Tensor]:
    """The running statistics, float32, that all the data together would give.

    Args:
        moments: of one submodel, of each client.

    Returns:
        Mean and unbiased variance of each norm by name of the tensor.

    Raises:
        DataError: the clients measured different norms, or fewer than two values of one.
    """
    if len({frozenset(one) for one in moments}) > 1:
        raise DataError("clients measured the norms of different networks; merge those of one submodel only")
    merged: dict[str, Tensor] = {}
    for layer in moments[0] if moments else ():
        whole = _sum([one[layer] for one in moments])
        if whole.count < _LEAST_COUNT:
            raise DataError(f"norm {layer!r} was given {whole.count} value of each channel, but a variance needs two")
        count = torch.tensor(whole.count, dtype=torch.float64, device=whole.total.device)
        merged |= _statistics(layer, whole.total, whole.squares, count)
    return merged


def pool_statistics(
    network: Network, state: Mapping[str, Tensor], measured: Sequence[tuple[Architecture, Mapping[str, NormMoments]]]
) -> dict[str, Tensor]:
    """The running statistics of the full model, channel by channel those of all data of whichever submodels hold it.

    Sums are added up exactly, so that the result has the same bits for every order of clients. A channel that was
    given fewer than two values keeps its bits.

    Args:
        network: the declaration.
        state: the full model's tensors by name; only running statistics are looked at.
        measured: each client's submodel, and what it has measured by name of the layer.

    Returns:
        Mean and variance of each norm that anybody has measured, by name of the tensor.

    Raises:
        ConfigError: an architecture is no submodel of this network.
    """
    maps = [tensor_maps(network, architecture) for architecture, _ in measured]
    new: dict[str, Tensor] = {}
    for layer in sorted({name for _, found in measured for name in found}):
        mean, variance = f"{layer}.running_mean", f"{layer}.running_var"
        spread = []
        for places, (_, found) in zip(maps, measured, strict=True):
            if layer in found:
                one = found[layer]
                counts = torch.full_like(one.total, one.count)
                rows = [_embed(places[mean], part, state[mean]) for part in (one.total, one.squares, counts)]
                spread.append(torch.stack(rows))
        total, squares, count = _exact_sum(spread).to(state[mean].device)
        enough = count >= _LEAST_COUNT
        merged = _statistics(layer, total, squares, torch.where(enough, count, _LEAST_COUNT))
        new |= {name: torch.where(enough, merged[name], state[name]) for name in (mean, variance)}
    return new


def _statistics(layer: str, total: Tensor, squares: Tensor, count: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased variance, float32, by name of the tensor."""
    mean = total / count
    # Rounding may leave a constant channel a hair below 0.
    spread = (squares - total * mean).clamp(min=0)
    return {f"{layer}.running_mean": mean.float(), f"{layer}.running_var": (spread / (count - 1)).float()}


def _embed(places: TensorMap, local: Tensor, full: Tensor) -> Tensor:
    """A submodel's channels where they lie among all; the others are 0."""
    whole = torch.zeros(full.shape, dtype=local.dtype, device=local.device)
    places.scatter(local, whole)
    return whole


def _exact_sum(parts: Sequence[Tensor]) -> Tensor:
    """Rounded once, whatever the order."""
    if len(parts) == 1:
        return parts[0]
    columns = torch.stack(tuple(parts)).flatten(1).T.tolist()
    whole = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64, device=parts[0].device)
    return whole.reshape(parts[0].shape)


def recalibrate(
    network: Network, state: Mapping[str, Tensor], architecture: Architecture, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """The full model with the running statistics that a submodel of it has on some data; all else keeps its bits.

    Args:
        network: the declaration.
        state: the full model's tensors by name.
        architecture: the submodel that will be evaluated; statistics of channels and blocks that it lacks stay as they
            are.
        batches: inputs (samples, *input_shape).

    Raises:
        ConfigError: the architecture is no submodel of this network, or the state lacks one of its tensors.
        DataError: a norm was given fewer than two values of each channel.
    """
    maps = tensor_maps(network, architecture)
    new = dict(state)
    for name, local in merge_statistics([measure_moments(network, architecture, state, batches)]).items():
        held = _embed(maps[name], torch.ones_like(local), state[name])
        new[name] = torch.where(held > 0, _embed(maps[name], local, state[name]), state[name])
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
    return NormMoments(
        total=_exact_sum([one.total for one in moments]),
        squares=_exact_sum([one.squares for one in moments]),
        count=sum(one.count for one in moments),
    )
