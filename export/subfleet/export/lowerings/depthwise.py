"""Depthwise convolutions in forms that a runtime without kernels for them computes fast.

A runtime that computes a matrix product for every group spends its time copying patches: for each sample and channel
the product has a single row. Here samples are combined:

- With few positions, a channel's convolution is one dense matrix from all input to all output positions, and a batch of
products, one for each channel, maps all samples. Constant bands of ones turn the kernel into that matrix.
- With some more positions, samples lie side by side along the last dimension, with the kernel's dilation multiplied by
their number: patches are then copied for each channel only, in long rows.
- The weight gradient uses every row of the output as a filter over the columns, convolves it with every row of the
input, and adds up the rows that are as far apart as two kernel positions.

In `benchmarks/results/train-step.md` each form wins rows "depthwise 3x3" of ONNX Runtime. MobileNetV2 has layers of all
three kinds, and DS-CNN has layers for samples side by side.

Shapes: as in `convolution_geometry`; M channels out for each channel in, Q positions of the input, P of the output.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry, axis_bands, bands, convolve, pad_or_cut

# Measured with ONNX Runtime.
PLACES_PER_TAP = 4
"""Up to this many positions for each kernel position, dense matrices are fastest (3 x 3: up to 6 x 6 positions)."""
FEW_PLACES = 128
"""Up to this number, samples side by side are faster than separate patches, and so are dense matrices for weights. With
more, bands and dense matrices take much memory (7 x 7 over 14 x 14: 7.5 MB, and 0.15 MB for each channel)."""
LEAST_SAMPLES = 8


def is_depthwise(weight: Tensor, groups: int) -> bool:
    """Return whether each channel is convolved separately."""
    return groups > 1 and weight.shape[1] == 1


def _largest(sizes: Sequence[int], places: Sequence[int]) -> int:
    return max(math.prod(sizes), math.prod(places))


def is_small(kernel: Sequence[int], sizes: Sequence[int], places: Sequence[int]) -> bool:
    """Return whether input and output are small enough for dense matrices to pay off."""
    return _largest(sizes, places) <= min(PLACES_PER_TAP * math.prod(kernel), FEW_PLACES)


def _channels_first(x_ncs: Tensor, channels: int) -> Tensor:
    """Convert (N, C * M, *S) to (C, N, M * S)."""
    samples = x_ncs.shape[0]
    return x_ncs.reshape(samples, channels, -1).transpose(0, 1)


def _samples_first(x_cns: Tensor, shape: Sequence[int]) -> Tensor:
    """Convert (C, N, M * S) to (N, C * M, *S)."""
    return x_cns.transpose(0, 1).reshape(shape)


def depthwise_forward(inputs: Tensor, weight: Tensor, places: Sequence[int], at: Geometry) -> Tensor | None:
    """Convolve over few positions: (N, C, *S) and (C * M, 1, *K) to (N, C * M, *P); None if there are too many."""
    if is_small(weight.shape[2:], inputs.shape[2:], places):
        return _dense(inputs, weight, places, at)
    return convolve_side_by_side(inputs, weight, places, at)


def convolve_side_by_side(inputs: Tensor, weight: Tensor, places: Sequence[int], at: Geometry) -> Tensor | None:
    """As `depthwise_forward`; None if samples are few, positions many, or the stride is above 1."""
    (samples, channels, *sizes), (outputs, _, *kernel) = inputs.shape, weight.shape
    most = max(FEW_PLACES, PLACES_PER_TAP * math.prod(kernel))
    if _largest(sizes, places) > most or samples < LEAST_SAMPLES or set(at.stride) != {1}:
        return None
    x = inputs.reshape(samples, -1).t().reshape(1, channels, *sizes[:-1], sizes[-1] * samples)
    padding, dilation = ((*values[:-1], values[-1] * samples) for values in (at.padding, at.dilation))
    output = convolve(x, weight, padding=padding, dilation=dilation, groups=channels)
    return output.reshape(-1, samples).t().reshape(samples, outputs, *places)


def _dense(inputs: Tensor, weight: Tensor, places: Sequence[int], at: Geometry) -> Tensor:
    (samples, channels, *sizes), (outputs, _, *kernel) = inputs.shape, weight.shape
    bands_kqp = bands(kernel, sizes, places, at, weight.dtype)
    count, q, p = bands_kqp.shape
    dense_cmqp = (weight.reshape(outputs, count) @ bands_kqp.reshape(count, -1)).reshape(channels, -1, q, p)
    # One output for each channel needs no transposition, but runtimes would still copy.
    dense_cqp = (dense_cmqp if outputs == channels else dense_cmqp.transpose(1, 2)).reshape(channels, q, -1)
    return _samples_first(_channels_first(inputs, channels) @ dense_cqp, (samples, outputs, *places))


def depthwise_input_gradient(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: Geometry) -> Tensor:
    """Return the gradient of a small input: (N, C * M, *P) and (C * M, 1, *K) to (N, C, *S)."""
    (samples, outputs, *places), kernel = gradient.shape, weight.shape[2:]
    channels = at.groups
    # Computed again, since the forward's matrices can be larger than the activations.
    bands_kpq = bands(kernel, sizes, places, at, weight.dtype).transpose(1, 2)
    count, _, q = bands_kpq.shape
    dense_cpq = (weight.reshape(outputs, count) @ bands_kpq.reshape(count, -1)).reshape(channels, -1, q)
    return _samples_first(_channels_first(gradient, channels) @ dense_cpq, (samples, channels, *sizes))


def depthwise_weight_gradient(inputs: Tensor, gradient: Tensor, kernel: Sequence[int], at: Geometry) -> Tensor:
    """Differentiate a depthwise convolution with respect to its weights: (C * M, 1, *K)."""
    sizes, (_, outputs, *places) = inputs.shape[2:], gradient.shape
    channels = at.groups
    if _largest(sizes, places) <= FEW_PLACES:
        x_cnq, g_cnp = _channels_first(inputs, channels), _channels_first(gradient, channels)
        bands_kqp = bands(kernel, sizes, places, at, inputs.dtype)
        count, q, p = bands_kqp.shape
        met_cpq = g_cnp.transpose(1, 2) @ x_cnq
        met = met_cpq.reshape(outputs, p * q) @ bands_kqp.transpose(1, 2).reshape(count, -1).t()
        return met.reshape(outputs, 1, *kernel)
    return _convolve_rows(inputs, gradient, kernel, at)


def _convolve_rows(inputs: Tensor, gradient: Tensor, kernel: Sequence[int], at: Geometry) -> Tensor:
    """Convolve every row of the input with every row of the gradient; 1-D has a single row."""
    (samples, channels, *sizes), (_, outputs, *places) = inputs.shape, gradient.shape
    multiple, rows, width = outputs // channels, sizes[0] if len(sizes) == 2 else 1, sizes[-1]
    out_rows, out_width = places[0] if len(sizes) == 2 else 1, places[-1]
    after = at.measure_extent(kernel, places)[-1] - width - at.padding[-1]
    x = inputs.reshape(samples, channels, rows, width).transpose(0, 1).reshape(1, -1, rows, width)
    x = pad_or_cut(x, [at.padding[-1]], [after])
    g = gradient.reshape(samples, channels, multiple, out_rows, out_width).permute(1, 2, 3, 0, 4)
    g = g.reshape(-1, samples, 1, out_width)
    met = convolve(x, g, stride=[1, at.dilation[-1]], dilation=[1, at.stride[-1]], groups=channels)
    met_opql = met.reshape(outputs, out_rows * rows, kernel[-1])
    if len(sizes) == 1:
        return met_opql.reshape(outputs, 1, *kernel)
    bands_kpq = axis_bands(0, kernel[0], rows, out_rows, at, inputs.dtype).transpose(1, 2).reshape(kernel[0], -1)
    d_okl = torch.bmm(bands_kpq.unsqueeze(0).expand(outputs, -1, -1), met_opql)
    return d_okl.reshape(outputs, 1, *kernel)
