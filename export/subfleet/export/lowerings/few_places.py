"""Convolutions over few positions, as one matrix product for the whole batch.

A runtime that computes a product for every sample reads all weights each time, for only a few columns. Here every row
is one position of one sample with everything that its kernel sees. The weights stay as they are in the forward and in
both gradients; rows are small, and are built and split by products with constant bands.

In `benchmarks/results/train-step.md` it wins the row "512 channels on 2x2, forward": 1.95 ms instead of 10.8.

Shapes: as in `convolution_geometry`; Q positions of the input and P of the output; R = N * P rows.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry, bands, is_linear

# Measured with ONNX Runtime: above, a product of each sample has columns enough.
FEW_PLACES = 8
FEW_PLACES_BACK = 16
"""For the input's gradient; its other forms must transpose the weights."""
FEW_INPUTS = 64


def has_few_places(sizes: Sequence[int], places: Sequence[int], at: Geometry, *, back: bool = False) -> bool:
    """Return whether a convolution, or its input's gradient, has so few positions that this form is faster."""
    few = FEW_PLACES_BACK if back else FEW_PLACES
    return at.groups == 1 and math.prod(places) <= few and math.prod(sizes) <= FEW_INPUTS


def _rows(inputs: Tensor, kernel: Sequence[int], places: Sequence[int], at: Geometry) -> Tensor:
    """Convert (N, C, *S) to (R, C * K)."""
    (samples, channels, *sizes), count = inputs.shape, math.prod(places)
    if is_linear(kernel, sizes, places, at):
        return inputs.reshape(samples, channels, count).transpose(1, 2).reshape(-1, channels)
    bands_qkp = bands(kernel, sizes, places, at, inputs.dtype).transpose(0, 1).reshape(math.prod(sizes), -1)
    seen_nckp = inputs.reshape(samples * channels, -1) @ bands_qkp
    return seen_nckp.reshape(samples, -1, count).transpose(1, 2).reshape(samples * count, -1)


def _output_rows(gradient: Tensor) -> Tensor:
    """Convert (N, O, *P) to (R, O)."""
    return gradient.flatten(2).transpose(1, 2).reshape(-1, gradient.shape[1])


def few_places_forward(inputs: Tensor, weight: Tensor, places: Sequence[int], at: Geometry) -> Tensor:
    """Convolve (N, C, *S) and (O, C, *K) to (N, O, *P)."""
    outputs, _, *kernel = weight.shape
    product_ro = _rows(inputs, kernel, places, at) @ weight.reshape(outputs, -1).t()
    return product_ro.reshape(len(inputs), -1, outputs).transpose(1, 2).reshape(-1, outputs, *places)


def few_places_input_gradient(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: Geometry) -> Tensor:
    """Map (N, O, *P) and (O, C, *K) to (N, C, *S)."""
    (outputs, channels, *kernel), places = weight.shape, gradient.shape[2:]
    samples, count = len(gradient), math.prod(places)
    seen_rck = _output_rows(gradient) @ weight.reshape(outputs, -1)
    seen_nckp = seen_rck.reshape(samples, count, -1).transpose(1, 2)
    if is_linear(kernel, sizes, places, at):
        return seen_nckp.reshape(samples, channels, *sizes)
    bands_kpq = bands(kernel, sizes, places, at, weight.dtype).transpose(1, 2).reshape(-1, math.prod(sizes))
    return (seen_nckp.reshape(samples * channels, -1) @ bands_kpq).reshape(samples, channels, *sizes)


def few_places_weight_gradient(inputs: Tensor, gradient: Tensor, kernel: Sequence[int], at: Geometry) -> Tensor:
    """Map (N, C, *S) and (N, O, *P) to (O, C, *K)."""
    rows = _rows(inputs, kernel, gradient.shape[2:], at)
    return (_output_rows(gradient).t() @ rows).reshape(gradient.shape[1], inputs.shape[1], *kernel)
