"""Layers that a step computes in its own way, by the PyTorch function that a module calls for them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from subfleet.export.layers.attention import ATTENTIONS
from subfleet.export.layers.batch_norm import BATCH_NORMS
from subfleet.export.layers.dropout import DROPOUTS
from subfleet.export.layers.padding import PADDINGS
from subfleet.export.layers.pooling import POOLS
from subfleet.export.layers.randomness import RANDOMNESS
from subfleet.export.layers.recurrent import RECURRENT
from subfleet.export.layers.replacing import LayerContext, LayerReplacing, Replacement
from subfleet.export.layers.rms_norm import RMS_NORMS
from subfleet.export.layers.wholes import WHOLES

__all__ = ["LAYERS", "LayerContext", "LayerReplacing", "Replacement"]

LAYERS: Mapping[Any, Replacement] = MappingProxyType(
    {
        **ATTENTIONS,
        **BATCH_NORMS,
        **DROPOUTS,
        **PADDINGS,
        **POOLS,
        **RANDOMNESS,
        **RECURRENT,
        **RMS_NORMS,
        **WHOLES,
    }
)
"""Replacements by function, such as `torch.nn.functional.batch_norm`."""
