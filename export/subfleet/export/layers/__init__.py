"""Layers that a step computes in its own way, by the PyTorch function that a module calls for them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from subfleet.export.layers.batch_norm import BATCH_NORMS
from subfleet.export.layers.dropout import DROPOUTS
from subfleet.export.layers.replacing import LayerContext, LayerReplacing, Replacement

__all__ = ["LAYERS", "LayerContext", "LayerReplacing", "Replacement"]

LAYERS: Mapping[Any, Replacement] = MappingProxyType({**BATCH_NORMS, **DROPOUTS})
"""Replacements by function, such as `torch.nn.functional.batch_norm`."""
