"""The declaration of a supernet from its module, and the modules of its submodels.

Nothing else of a supernet is cut, so it is no recorded network: a submodel is the same module with fewer operators.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.choice_block import ChoiceBlock
from subfleet.elastic.network import Family, Network, Role, TensorDecl
from subfleet.elastic.parts import Cell, OperatorChoice
from subfleet.elastic.supernets import keep_operators
from subfleet.elastic.undrawn import Undrawn
from subfleet.protocol.errors import ConfigError

_ROLES: Mapping[str, Role] = MappingProxyType(
    {"bias": "bias", "bias_ih_l0": "bias", "bias_hh_l0": "bias", "running_mean": "mean", "running_var": "variance"}
)
_CHANNELS_LAST = (nn.Linear, nn.LSTM, nn.GRU)
_PLACED = (nn.Conv2d, nn.GroupNorm, nn.BatchNorm2d, *_CHANNELS_LAST)
"""Layers that are applied at many positions of a sample; of an embedding, each symbol only reads one row."""


def declare_supernet(config: Any) -> Network:
    """The declaration of a supernet from its module, whose output layer is called "head".

    Raises:
        ConfigError: its input is too small.
    """
    choices = {name: OperatorChoice(name=name, operators=own) for name, own in config.of_blocks if len(own) > 1}
    parts = [part for choice in choices.values() for part in choice.parts]
    with torch.random.fork_rng(devices=[]), Undrawn():  # weights do not matter; keeps the random state
        module: nn.Module = config.module()
        positions = _count_positions(config, module)
    sections = list(dict.fromkeys(name.partition(".")[0] for name, _ in config.of_blocks))
    tensors = {}
    for name, tensor in module.state_dict().items():
        layer, _, own = name.rpartition(".")
        embeds = isinstance(module.get_submodule(layer), nn.Embedding)
        tensors[name] = TensorDecl(
            name=name,
            shape=tuple(tensor.shape),
            axes=("class" if layer == "head" else None, *(None for _ in tensor.shape[1:])),
            part=next((part for part in parts if f"{layer}.".startswith(f"{part}.")), None),
            role="symbol" if embeds else _ROLES.get(own, "gain" if tensor.ndim == 1 else "weight"),
            positions=positions.get(layer, 1),
        )
    classes = config.class_count
    return Network(
        config=config,
        axes=MappingProxyType({"class": Axis(name="class", size=classes, kind="class", granularity=classes)}),
        blocks=(),
        cells=tuple(Cell(name=name, section=sections.index(name.partition(".")[0])) for name, _ in config.of_blocks),
        choices=MappingProxyType(choices),
        tensors=MappingProxyType(tensors),
        group_size=getattr(config, "group_size", 4),
        symbols=getattr(config, "vocabulary", 0),
    )


def build_subspace(config: Any, parts: frozenset[str]) -> nn.Module:
    """The module of a supernet with only these operators."""
    kept = {
        name: tuple(operator for operator in own if f"{name}.{operator}" in parts)
        for name, own in config.of_blocks
        if len(own) > 1
    }
    module: nn.Module = keep_operators(config, kept).module()
    return module


def _count_positions(config: Family, module: nn.Module) -> dict[str, int]:
    """Count the positions of one sample where each layer is applied, by running each operator once."""
    positions: dict[str, int] = {}

    def record(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
            channels_last = isinstance(layer, _CHANNELS_LAST)
            positions[path] = math.prod(inputs[0].shape[1:-1] if channels_last else outputs.shape[2:])

        return hook

    for path, layer in module.named_modules():
        if isinstance(layer, _PLACED):
            layer.register_forward_hook(record(path))
    dtype = torch.int64 if hasattr(config, "vocabulary") else torch.float32
    try:
        with torch.no_grad():
            for _ in _draw_each(module.eval()):
                module(torch.zeros(1, *config.input_shape, dtype=dtype))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"input_shape is {config.input_shape}, but family {config.TYPE!r} needs a larger input, or fewer sections "
            f"that halve it: {error}"
        ) from error
    return positions


def _draw_each(module: nn.Module) -> Iterator[None]:
    """Draw paths until every operator of every choice was drawn."""
    choices = [layer for layer in module.modules() if isinstance(layer, ChoiceBlock)]
    for run in range(max(len(choice.operators) for choice in choices)):
        for choice in choices:
            choice.drawn = choice.operators[run % len(choice.operators)]
        yield
