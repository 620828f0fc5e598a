"""What a subnet costs, told from shapes alone before any program is written."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from subfleet.elastic.families import build_skeleton
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["SubnetCost", "estimate_cost"]

_FLOAT_BYTES = 4
_WEIGHT_COPIES = 5
"""A step is a pure function: weights and momentum, each before and after it, and the gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetCost:
    """The cost of one subnet.

    Attributes:
        parameters: numbers that it holds; exact.
        weight_bytes: of these as float32, without any container; exact.
        forward_macs: multiplications of one sample's forward pass in convolutions and linear layers; exact.
        training_memory_bytes: an estimate of the memory of one training step with momentum: weights, momentum and
            gradients, the batch, what the forward pass keeps for the backward pass, and the workspace of the largest
            layer. The planned peak of the exported program is the better number where there is one.
    """

    parameters: int
    weight_bytes: int
    forward_macs: int
    training_memory_bytes: int


def estimate_cost(network: Network, spec: SubnetSpec, *, batch_size: int) -> SubnetCost:
    """Run a subnet's forward pass on shapes without data, and count.

    Args:
        network: the declaration.
        spec: the subnet.
        batch_size: samples of one training step, 1 or more.

    Raises:
        ConfigError: the spec is no subnet of this network, or batch_size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}, but must be 1 or more")
    module = build_skeleton(network, spec)
    counts = _run(module, torch.empty((batch_size, *network.config.input_shape), device="meta"))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    weight_bytes = parameters * _FLOAT_BYTES
    return SubnetCost(
        parameters=parameters,
        weight_bytes=weight_bytes,
        forward_macs=counts["macs"] // batch_size,
        training_memory_bytes=_WEIGHT_COPIES * weight_bytes + counts["saved_bytes"] + counts["workspace_bytes"],
    )


def _run(module: nn.Module, inputs: Tensor) -> Counter[str]:
    counts = Counter[str]()

    def count_layer(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            size_out = layer.weight.shape[0]
            positions = output.numel() // size_out
            counts["macs"] += layer.weight.numel() * positions
            # A gradient with respect to weights is a matrix product with the unfolded inputs of the layer.
            unfolded = math.prod(layer.weight.shape[1:]) * positions
            counts["workspace_bytes"] = max(counts["workspace_bytes"], (unfolded + output.numel()) * _FLOAT_BYTES)

    # Storages are kept while counting, so that no id is used twice.
    weights = {id(parameter.untyped_storage()) for parameter in module.parameters()}
    saved: dict[int, torch.UntypedStorage] = {id(inputs.untyped_storage()): inputs.untyped_storage()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weights:
            saved[id(storage)] = storage
        return tensor

    for layer in module.modules():
        layer.register_forward_hook(count_layer)
    with torch.enable_grad(), saved_tensors_hooks(save, lambda tensor: tensor):
        module(inputs)
    counts["saved_bytes"] = sum(storage.nbytes() for storage in saved.values())
    return counts
