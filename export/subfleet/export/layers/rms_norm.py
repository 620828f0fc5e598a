"""Root mean square normalisation with its backward written out."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.export.lowerings.layer_norm import rms_norm, rms_norm_backward

__all__ = ["RMS_NORMS"]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, weight, feature_dims, epsilon = arguments
        output, rrms = rms_norm(inputs, feature_dims, weight, epsilon)
        ctx.save_for_backward(inputs, weight, rrms)
        ctx.feature_dims = feature_dims
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, rrms = ctx.saved_tensors
        return *rms_norm_backward(gradients[0], inputs, ctx.feature_dims, weight, rrms), None, None


def _rms_norm(
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    output: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape), epsilon)  # type: ignore[no-untyped-call]
    return output


RMS_NORMS: Mapping[Any, Replacement] = MappingProxyType({functional.rms_norm: _rms_norm})
