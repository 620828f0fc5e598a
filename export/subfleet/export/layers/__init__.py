"""Layers that a step computes in its own way, by the PyTorch function that a module calls."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from subfleet.export.layers.attention import ATTENTIONS
from subfleet.export.layers.functions import FUNCTIONS
from subfleet.export.layers.losses import LOSSES
from subfleet.export.layers.norm_layers import NORM_LAYERS
from subfleet.export.layers.random_layers import DROPOUTS, RANDOMNESS
from subfleet.export.layers.recurrent import RECURRENT
from subfleet.export.layers.replacing import LayerContext, LayerReplacing, Replacement

__all__ = ["LAYERS", "LayerContext", "LayerReplacing", "Replacement"]

LAYERS: Mapping[Any, Replacement] = MappingProxyType(
    {
        **ATTENTIONS,
        **DROPOUTS,
        **RANDOMNESS,
        **RECURRENT,
        **NORM_LAYERS,
        **FUNCTIONS,
        **LOSSES,
    }
)
"""Replacements by function, such as `torch.nn.functional.batch_norm`."""
