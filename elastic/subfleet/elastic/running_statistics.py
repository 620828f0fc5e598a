"""Running statistics of norms, measured on data with fixed weights.

In training the statistics of a batch norm lag behind its weights, and a submodel's differ from the full network's.
HeteroFL's static batch norm (Diao et al. 2021, section 3.3) keeps none in training and measures them before each
evaluation. Here the server or the devices (`subfleet.trainers.calibration_job`) measure sums, which add up over batches
and devices to the statistics of all their data. For one batch they equal PyTorch's cumulative average.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subfleet.elastic.batch_norms import NormalisingByBatch
from subfleet.elastic.building import build_module
from subfleet.elastic.maps import embed, extract, overwrite, tensor_maps
from subfleet.elastic.network import Network
from subfleet.protocol.errors import DataError
from subfleet.protocol.submodel import Architecture

_LEAST_COUNT = 2
"""Least number of values for a variance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormMoments:
    """Sums of a norm's inputs.

    Attributes:
        total: sum of each channel, float64 (channels,).
        squares: sum of squares of each channel, float64 (channels,).
        count: number of values of each channel: samples times positions, times any weight.
    """

    total: Tensor
    squares: Tensor
    count: float

    def __add__(self, other: "NormMoments") -> "NormMoments":
        return NormMoments(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )

    def rescale(self, factor: float) -> "NormMoments":
        """The moments of the values times a factor above 0; bit-identical for 1."""
        return NormMoments(total=self.total * factor, squares=self.squares * factor**2, count=self.count)

    def reweight(self, factor: float) -> "NormMoments":
        """The moments with the data weighted by a factor above 0; bit-identical for 1."""
        return NormMoments(total=self.total * factor, squares=self.squares * factor, count=self.count * factor)


def measure_moments(
    network: Network, architecture: Architecture, state: Mapping[str, Tensor], batches: Iterable[Tensor]
) -> dict[str, NormMoments]:
    """Measure the inputs of a submodel's norms on some data; each norm normalises by its own batch as in training.

    Args:
        network: the network.
        architecture: the submodel.
        state: the full model's tensors by name.
        batches: inputs (samples, *input_shape).

    Returns:
        Moments of each norm with running statistics, by the name of its layer.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the state lacks one of its tensors.
    """
    device = next(iter(state.values())).device
    module = build_module(network, architecture).to(device)
    module.load_state_dict(extract(network, architecture, state))
    module.eval()
    moments: dict[str, NormMoments] = {}

    def see(layer: str, inputs: Tensor) -> None:
        values = inputs.double().transpose(0, 1).flatten(1)
        own = NormMoments(total=values.sum(1), squares=values.square().sum(1), count=values.shape[1])
        moments[layer] = moments[layer] + own if layer in moments else own

    with torch.no_grad(), NormalisingByBatch(dict(module.named_buffers()), see):
        for inputs in batches:
            module(inputs.to(device))
    return moments


def merge_statistics(moments: Sequence[Mapping[str, NormMoments]]) -> dict[str, Tensor]:
    """Compute the running statistics, float32, of all data together.

    Args:
        moments: moments of one submodel from each client.

    Returns:
        Mean and unbiased variance of each norm by name of the tensor.

    Raises:
        DataError: the clients measured different norms, or fewer than two values of one.
    """
    if len({frozenset(own) for own in moments}) > 1:
        raise DataError("clients measured the norms of different networks; only merge moments of one submodel")
    merged: dict[str, Tensor] = {}
    for layer in moments[0] if moments else ():
        whole = _sum([own[layer] for own in moments])
        if whole.count < _LEAST_COUNT:
            raise DataError(f"norm {layer!r} has {whole.count} value of each channel, but a variance needs two")
        count = torch.tensor(whole.count, dtype=torch.float64, device=whole.total.device)
        merged |= _statistics(layer, whole.total, whole.squares, count)
    return merged


def pool_statistics(
    network: Network, state: Mapping[str, Tensor], measured: Sequence[tuple[Architecture, Mapping[str, NormMoments]]]
) -> dict[str, Tensor]:
    """Compute the running statistics of the full model; each channel's are those of all submodels that hold it.

    Sums are exact, so every order of clients gives the same bits. A channel with fewer than two values stays
    bit-identical.

    Args:
        network: the network.
        state: the full model's tensors by name; only running statistics are read.
        measured: each client's submodel, and its moments by name of the layer.

    Returns:
        Mean and variance of each measured norm by name of the tensor.

    Raises:
        ConfigError: an architecture is not a submodel of this network.
    """
    maps = [tensor_maps(network, architecture) for architecture, _ in measured]
    new: dict[str, Tensor] = {}
    for layer in sorted({name for _, moments in measured for name in moments}):
        mean, variance = f"{layer}.running_mean", f"{layer}.running_var"
        spread = []
        for own_maps, (_, moments) in zip(maps, measured, strict=True):
            if layer in moments:
                own = moments[layer]
                counts = torch.full_like(own.total, own.count)
                shape = tuple(state[mean].shape)
                rows = [embed(own_maps[mean], part, shape) for part in (own.total, own.squares, counts)]
                spread.append(torch.stack(rows))
        total, squares, count = _exact_sum(spread).to(state[mean].device)
        enough = count >= _LEAST_COUNT
        merged = _statistics(layer, total, squares, torch.where(enough, count, _LEAST_COUNT))
        new |= {name: torch.where(enough, merged[name], state[name]) for name in (mean, variance)}
    return new


def _statistics(layer: str, total: Tensor, squares: Tensor, count: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased variance, float32, by name of the tensor."""
    mean = total / count
    # Rounding may make the variance of a constant channel slightly negative.
    spread = (squares - total * mean).clamp(min=0)
    return {f"{layer}.running_mean": mean.float(), f"{layer}.running_var": (spread / (count - 1)).float()}


def _exact_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum with a single rounding, independent of the order."""
    if len(parts) == 1:
        return parts[0]
    columns = torch.stack(tuple(parts)).flatten(1).T.tolist()
    whole = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64, device=parts[0].device)
    return whole.reshape(parts[0].shape)


def recalibrate(
    network: Network, state: Mapping[str, Tensor], architecture: Architecture, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Return the full model with a submodel's running statistics on some data; all else stays bit-identical.

    Args:
        network: the network.
        state: the full model's tensors by name.
        architecture: the submodel to evaluate; statistics of channels and blocks that it lacks stay unchanged.
        batches: inputs (samples, *input_shape).

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the state lacks one of its tensors.
        DataError: a norm has fewer than two values of each channel.
    """
    maps = tensor_maps(network, architecture)
    new = dict(state)
    for name, local in merge_statistics([measure_moments(network, architecture, state, batches)]).items():
        new[name] = overwrite(maps[name], local, state[name])
    return new


def _sum(moments: Sequence[NormMoments]) -> NormMoments:
    return NormMoments(
        total=_exact_sum([own.total for own in moments]),
        squares=_exact_sum([own.squares for own in moments]),
        count=sum(own.count for own in moments),
    )
