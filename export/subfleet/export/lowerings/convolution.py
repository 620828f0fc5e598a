"""Convolutions' backwards as other convolutions.

Shapes: N samples, C channels in, O channels out, H and W sizes, K and L kernel sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.protocol.errors import ExportError

__all__ = ["CONVOLUTIONS_AS_CONVOLUTIONS"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """Where a 2-D kernel meets its input; each a pair for rows and columns."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]

    def output_size(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Of a kernel over an already padded input."""
        return [(sizes[i] - self.dilation[i] * (kernel[i] - 1) - 1) // self.stride[i] + 1 for i in range(2)]

    def reach(self, kernel: Sequence[int]) -> list[int]:
        """How far a kernel's last place lies from its first."""
        return [self.dilation[i] * (kernel[i] - 1) for i in range(2)]


def _geometry(inputs: Tensor, arguments: Sequence[Any]) -> _Geometry:
    """Read the operator's arguments after its tensors; refuse what is not lowered."""
    stride, padding, dilation, transposed, _output_padding, groups = arguments
    if transposed or groups != 1 or inputs.dim() != 4:
        raise ExportError(
            f"a convolution with transposed={transposed}, groups={groups} and {inputs.dim() - 2} dimensions cannot be "
            "lowered; use an ordinary 2-D convolution with one group"
        )
    return _Geometry(stride=list(stride), padding=list(padding), dilation=list(dilation))


def _backward_as_convolutions(
    gradient: Tensor, inputs: Tensor, weight: Tensor, _bias_sizes: list[int] | None, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    *settings, wanted = arguments
    at = _geometry(inputs, settings)
    d_input = d_weight = d_bias = None
    if wanted[0]:
        # What the forward left over at the far edge comes back as output padding.
        reach = at.reach(weight.shape[2:])
        rest = [
            inputs.shape[2 + i] - ((gradient.shape[2 + i] - 1) * at.stride[i] - 2 * at.padding[i] + reach[i] + 1)
            for i in range(2)
        ]
        d_input = aten.convolution(gradient, weight, None, at.stride, at.padding, at.dilation, True, rest, 1)
    if wanted[1]:
        # Samples and channels change places; the forward's stride spreads the gradient, so it becomes the dilation.
        x, g = inputs.transpose(0, 1), gradient.transpose(0, 1)
        swapped = aten.convolution(x, g, None, at.dilation, at.padding, at.stride, False, [0, 0], 1)
        d_weight = swapped[:, :, : weight.shape[2], : weight.shape[3]].transpose(0, 1)
    if wanted[2]:
        d_bias = gradient.sum((0, 2, 3))
    return d_input, d_weight, d_bias


CONVOLUTIONS_AS_CONVOLUTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.convolution_backward.default: _backward_as_convolutions}
)
