"""Adapters of low rank beside the linear layers of a module, which are trained in their place.

An adapted layer computes `W x + up(down(x))` (Hu et al. 2022, "LoRA", section 4.1). `up` begins at 0, so that the
module computes the same at first. The adapter's scale is 1, so that it can be added to `W` without knowing more.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.recording.freezing import list_parameters
from subfleet.elastic.recording.tuning import LoraSettings
from subfleet.protocol.errors import ConfigError

DOWN, UP = "lora_down", "lora_up"
"""Last parts of the names of an adapter's tensors, (rank, inputs) and (outputs, rank)."""


def add_adapters(module: nn.Module, settings: LoraSettings) -> None:
    """Add adapters to linear layers of a module, and freeze everything else.

    Args:
        module: the module, which is changed.
        settings: the adapters.

    Raises:
        ConfigError: a pattern fits no linear layer, or no layer.
    """
    linear = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    for pattern in settings.targets:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise ConfigError(
                f"lora.targets names {pattern!r:.80}, but the network has the linear layers {sorted(linear)}; name "
                "some of these"
            )
    kept = {name for pattern in settings.train for name in list_parameters(module, pattern, "lora.train")}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in kept)
    for name, layer in linear.items():
        if any(fnmatchcase(name, pattern) for pattern in settings.targets) and f"{name}.weight" not in kept:
            _add_adapter(layer, settings.rank)


def _add_adapter(layer: nn.Linear, rank: int) -> None:
    drawn = torch.randn(rank, layer.in_features, generator=torch.Generator().manual_seed(0))
    down, up = drawn / math.sqrt(layer.in_features), torch.zeros(layer.out_features, rank)
    for name, tensor in ((DOWN, down), (UP, up)):
        layer.register_parameter(name, nn.Parameter(tensor.to(layer.weight)))
    layer.register_forward_hook(_adapt)


def _adapt(layer: Any, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
    reduced = nn.functional.linear(inputs[0], getattr(layer, DOWN))
    return outputs + nn.functional.linear(reduced, getattr(layer, UP))


def merge_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a module with its adapters added to the layers, under the names of the module without adapters."""
    merged = {name: tensor for name, tensor in weights.items() if name.rpartition(".")[2] not in (DOWN, UP)}
    for name in weights:
        layer, _, own = name.rpartition(".")
        if own == UP:
            added = weights[name].double() @ weights[f"{layer}.{DOWN}"].double()
            weight = weights[f"{layer}.weight"]
            merged[f"{layer}.weight"] = (weight.double() + added).to(weight.dtype)
    return merged
