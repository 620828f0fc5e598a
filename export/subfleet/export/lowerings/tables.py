"""The tables of lowerings that every target starts from."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._decomp import get_decompositions

from subfleet.export.lowerings.activation import ACTIVATIONS
from subfleet.export.lowerings.arithmetic import ARITHMETIC
from subfleet.export.lowerings.batch_norm import BATCH_NORMS
from subfleet.export.lowerings.embedding import EMBEDDINGS
from subfleet.export.lowerings.indexing import INDEXING
from subfleet.export.lowerings.layer_norm import LAYER_NORMS
from subfleet.export.lowerings.normalisation import NORMALISATIONS
from subfleet.export.lowerings.pooling import AVERAGE_POOLS, MAXIMUM_POOLS
from subfleet.export.lowerings.resampling import RESAMPLINGS
from subfleet.export.lowerings.seldom import SELDOM
from subfleet.export.lowerings.shaping import SHAPING
from subfleet.export.lowerings.weight_norm import WEIGHT_NORMS

__all__ = ["COMMON", "without"]

aten = torch.ops.aten

_RARE = (
    aten.elu, aten.elu_backward, aten.celu, aten.selu, aten.softplus, aten.softplus_backward, aten.mish,
    aten.mish_backward, aten.glu, aten.glu_backward, aten.log_sigmoid_forward, aten.log_sigmoid_backward,
    aten.hardshrink, aten.softshrink, aten._prelu_kernel, aten._prelu_kernel_backward,  # noqa: SLF001
)  # fmt: skip
"""Activations that are seldom used: PyTorch's own decompositions serve."""

COMMON: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **SELDOM,
        **ACTIVATIONS,
        **ARITHMETIC,
        **AVERAGE_POOLS,
        **BATCH_NORMS,
        **EMBEDDINGS,
        **INDEXING,
        **LAYER_NORMS,
        **MAXIMUM_POOLS,
        **NORMALISATIONS,
        **RESAMPLINGS,
        **SHAPING,
        **WEIGHT_NORMS,
        **get_decompositions(_RARE),
    }
)
"""Of every target. A target adds its convolutions, and leaves out what its runtime has itself."""


def without(table: Mapping[Any, Callable[..., Any]], *operators: Any) -> Mapping[Any, Callable[..., Any]]:
    """A table without the operators that a runtime has itself."""
    return MappingProxyType({operator: lowering for operator, lowering in table.items() if operator not in operators})
