"""Convolutions of few outputs over many positions: every fourth row of an output becomes a separate output.

A runtime copies what the kernel sees at each position into a column, and multiplies it by the weights. Where
outputs are few, the copies take longer than the product. Here four outputs of a kernel that is three rows longer
stand for four rows of one output: each has the weights one row further down, with zeros around them. There are a
quarter as many columns.

In `benchmarks/results/train-step.md` it wins both tables of "Few outputs".

Shapes: as in `convolution_geometry`; R parts of P / R rows of the output.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry, pad

aten = torch.ops.aten

# Measured with ONNX Runtime.
FEW_OUTPUTS = 8
LEAST_PLACES = 256
"""With fewer positions, all else that there is to do takes as long as the copies that are saved."""
_LEAST_ROWS, _LEAST_ROWS_FORWARD = 3, 5
"""Of a kernel; smaller ones grow by too much. The forward copies less for each column than the gradient of weights."""
_MOST_PARTS = 4
"""With more, the longer kernel takes more than what is left of the copies."""


def count_parts(
    outputs: int, kernel: Sequence[int], places: Sequence[int], at: Geometry, *, forward: bool = False
) -> int:
    """Return into how many outputs the rows of each output are split by the gradient of weights, or the forward."""
    plain = at.groups == 1 and len(places) == 2 and set(at.stride) == set(at.dilation) == {1}
    few = plain and outputs <= FEW_OUTPUTS and math.prod(places) >= LEAST_PLACES
    large = kernel[0] >= (_LEAST_ROWS_FORWARD if forward else _LEAST_ROWS)
    return math.gcd(places[0], _MOST_PARTS) if few and large else 1


def few_outputs_forward(inputs: Tensor, weight: Tensor, bias: Tensor | None, parts: int, at: Geometry) -> Tensor:
    """Convolve (N, C, *S) and (O, C, *K) to (N, O, *P)."""
    outputs, channels, rows, columns = weight.shape
    height = rows + parts - 1
    # Kernels of one row more, taken apart again after as many rows as they have, each begin one row further.
    copies = pad(weight, [0, 0], [parts, 0]).unsqueeze(2).expand(-1, -1, parts, -1, -1)
    in_a_row = copies.reshape(outputs, channels, -1, columns).narrow(2, 0, parts * height)
    w_orc = in_a_row.reshape(outputs, channels, parts, height, columns).transpose(1, 2)
    b_or = None if bias is None else bias.unsqueeze(1).expand(-1, parts).reshape(-1)
    settings = ([parts, 1], list(at.padding), [1, 1], False, [0, 0], 1)
    apart: Tensor = aten.convolution.default(inputs, w_orc.reshape(-1, channels, height, columns), b_or, *settings)
    (samples, _, count, width) = apart.shape
    in_order = apart.reshape(samples, outputs, parts, count, width).transpose(2, 3)
    return in_order.reshape(samples, outputs, parts * count, width)


def split_rows(gradient: Tensor, parts: int) -> Tensor:
    """Convert (N, O, *P) to (O * R, N, P / R, P)."""
    samples, outputs, rows, columns = gradient.shape
    apart = gradient.reshape(samples, outputs, rows // parts, parts, columns).permute(1, 3, 0, 2, 4)
    return apart.reshape(outputs * parts, samples, rows // parts, columns)


def add_kernels(d_each: Tensor, rows: int) -> Tensor:
    """Add the gradients of longer kernels where these hold the same weights.

    Args:
        d_each: (O, R, rows of the longer kernel, others).
        rows: of the kernel.

    Returns:
        (O, rows, others).
    """
    outputs, parts, height, others = d_each.shape
    # A row more for each puts the same weights of all kernels below one another.
    aligned = pad(d_each.reshape(outputs, parts * height, others), [0, 0], [parts, 0])
    return aligned.reshape(outputs, parts, height + 1, others).narrow(2, 0, rows).sum(1)
