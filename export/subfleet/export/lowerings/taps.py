"""Convolutions as sums of products, one for each kernel position (tap), with channels last.

Nothing is copied to columns: each tap multiplies a shifted part of the input by its own matrix. Strides become a split
of both dimensions, so that a part is always dense.

ExecuTorch's convolutions take this form, since XNNPACK's own need constant weights. In
`benchmarks/results/train-step.md` it wins the column "nine products, summed" of "One 3x3 convolution forward in
XNNPACK": 10.6 ms instead of 18.9 for 64 channels.

Shapes: N samples, C channels in and O channels out of a group, G groups, H and W sizes, K and L kernel sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten

MOST_COLUMNS = 48
"""Up to this many numbers under a kernel, all taps are laid side by side: products of a few channels are slow."""
_SUM_LENGTH = 2048
"""Products over more positions are split into groups of samples: more exact, and the parts stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """Where a 2-D kernel meets its input; each a pair for rows and columns."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def output_size(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the output size of an ordinary convolution."""
        first, second = (
            (sizes[i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in range(2)
        )
        return first, second

    def places(self) -> list[tuple[int, int]]:
        """Return every tap's row and column in the kernel."""
        return [(row, column) for row in range(self.kernel[0]) for column in range(self.kernel[1])]


def make_contiguous(x: Tensor) -> Tensor:
    """Make a tensor contiguous in memory, once instead of for every part of it."""
    return x.reshape(-1).reshape(x.shape)


def _pad(x_nhwc: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    if not any((*rows, *columns)):
        return x_nhwc
    padded: Tensor = aten.constant_pad_nd.default(x_nhwc, [0, 0, *columns, *rows], 0.0)
    return padded


class _ShiftedInput:
    """A padded input, split by the stride; gives the part under each tap."""

    def __init__(self, x_nhwc: Tensor, at: Taps, sizes: Sequence[int]) -> None:
        self._at = at
        self._size = (sizes[0], sizes[1])
        around = []
        self._whole = []
        for i in range(2):
            # As far as the last tap of the last position reaches, in whole strides.
            strides = -(-(self._size[i] * at.stride[i] + at.dilation[i] * (at.kernel[i] - 1)) // at.stride[i])
            around.append((at.padding[i], strides * at.stride[i] - at.padding[i] - x_nhwc.shape[1 + i]))
            self._whole.append(strides)
        self._x = _pad(x_nhwc, around[0], around[1])
        if at.stride != (1, 1):
            samples, _, _, channels = x_nhwc.shape
            self._x = self._x.reshape(samples, self._whole[0], at.stride[0], self._whole[1], at.stride[1], channels)

    def part(self, row: int, column: int) -> Tensor:
        """Return the part under a tap: (N, H out, W out, channels)."""
        at, x = self._at, self._x
        offsets = (row * at.dilation[0], column * at.dilation[1])
        for i in range(2):
            start, phase = divmod(offsets[i], at.stride[i])
            if at.stride == (1, 1):
                x = x.narrow(1 + i, start, self._size[i])
            else:
                x = x.narrow(1 + 2 * i, start, self._size[i]).narrow(2 + 2 * i, phase, 1)
        return x.reshape(x.shape[0], *self._size, x.shape[-1])


def _matrices(weight: Tensor, at: Taps) -> Tensor:
    """Convert (G * O, C, K, L) to (K * L, G, C, O), contiguous."""
    depth_out, depth_in = weight.shape[0] // at.groups, weight.shape[1]
    split = weight.reshape(at.groups, depth_out, depth_in, *at.kernel)
    # Through a flat tensor, or the taps would be read from the old order number by number.
    return split.permute(3, 4, 0, 2, 1).reshape(-1).reshape(-1, at.groups, depth_in, depth_out)


def _multiply_groups(x_nhwc: Tensor, matrices_gco: Tensor) -> Tensor:
    """Multiply each position's channels by the group's matrix: (N, H, W, G * C) to (N, H, W, G * O)."""
    groups, depth_in, depth_out = matrices_gco.shape
    shape = (*x_nhwc.shape[:3], groups * depth_out)
    positions = math.prod(x_nhwc.shape[:3])
    if groups == 1:
        return torch.mm(x_nhwc.reshape(positions, depth_in), matrices_gco.reshape(depth_in, depth_out)).reshape(shape)
    if depth_in == 1:
        spread_out = x_nhwc.reshape(positions, groups, 1) * matrices_gco.reshape(1, groups, depth_out)
        return spread_out.reshape(shape)
    if depth_out == 1:
        products = x_nhwc.reshape(positions, groups, depth_in) * matrices_gco.reshape(1, groups, depth_in)
        return products.sum(2).reshape(shape)
    by_group = x_nhwc.reshape(positions, groups, depth_in).permute(1, 0, 2)
    return torch.bmm(by_group, matrices_gco).permute(1, 0, 2).reshape(shape)


def _columns(x_nhwc: Tensor, at: Taps, sizes: Sequence[int]) -> Tensor:
    """Lay all taps' parts side by side: (K * L * C, positions), with channels as planes."""
    shifted = _ShiftedInput(x_nhwc, at, sizes)
    parts = [shifted.part(*tap).permute(3, 0, 1, 2) for tap in at.places()]
    return torch.cat(parts, 0).reshape(len(parts) * x_nhwc.shape[3], -1)


def _few_channels(at: Taps, depth_in: int) -> bool:
    return at.groups == 1 and math.prod(at.kernel) > 1 and math.prod(at.kernel) * depth_in <= MOST_COLUMNS


def gather(x_nhwc: Tensor, weight: Tensor, at: Taps, sizes: Sequence[int]) -> Tensor:
    """Compute the ordinary convolution of an input with weights (G * O, C, K, L): (N, *sizes, G * O)."""
    matrices = _matrices(weight, at)
    if _few_channels(at, weight.shape[1]):
        planes = make_contiguous(x_nhwc.permute(3, 0, 1, 2)).permute(1, 2, 3, 0)
        columns = _columns(planes, at, sizes)
        output = torch.mm(columns.t(), matrices.reshape(columns.shape[0], -1))
        return output.reshape(x_nhwc.shape[0], *sizes, -1)
    shifted = _ShiftedInput(make_contiguous(x_nhwc), at, sizes)
    first, *others = at.places()
    total = _multiply_groups(shifted.part(*first), matrices[0])
    for index, tap in enumerate(others, start=1):
        total = total + _multiply_groups(shifted.part(*tap), matrices[index])
    return total


def _phase(at: Taps, phase: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Return the taps that reach the inputs of a phase: row, column, and the offsets of their outputs."""
    reaching = []
    for row, column in at.places():
        ahead = [phase[i] + at.padding[i] - (row, column)[i] * at.dilation[i] for i in range(2)]
        if ahead[0] % at.stride[0] == 0 and ahead[1] % at.stride[1] == 0:
            reaching.append((row, column, ahead[0] // at.stride[0], ahead[1] // at.stride[1]))
    return reaching


def spread(g_nhwc: Tensor, weight: Tensor, at: Taps, sizes: Sequence[int]) -> Tensor:
    """Compute the transposed convolution, (N, *sizes, G * C): each input's share of an ordinary convolution's output.

    Inputs that are a stride apart are reached by the same taps, so each such phase is a separate dense sum.
    """
    matrices = _matrices(weight, at)
    samples, height, width, _ = g_nhwc.shape
    channels = at.groups * weight.shape[1]
    counts = [-(-sizes[i] // at.stride[i]) for i in range(2)]
    phases = [(row, column) for row in range(at.stride[0]) for column in range(at.stride[1])]
    reaching = [_phase(at, phase) for phase in phases]
    # A map smaller than a stride has phases without an input.
    offsets = [[tap[2 + i] for taps in reaching for tap in taps] or [0] for i in range(2)]
    before = [max(-min(offsets[i]), 0) for i in range(2)]
    after = [max(max(offsets[i]) + counts[i] - (height, width)[i], 0) for i in range(2)]
    g = _pad(make_contiguous(g_nhwc), (before[0], after[0]), (before[1], after[1]))
    parts = []
    for taps in reaching:
        total: Tensor | None = None
        for row, column, down, across in taps:
            part = g.narrow(1, down + before[0], counts[0]).narrow(2, across + before[1], counts[1])
            product = _multiply_groups(part, matrices[row * at.kernel[1] + column].transpose(1, 2))
            total = product if total is None else total + product
        parts.append(torch.zeros((samples, *counts, channels), dtype=g.dtype) if total is None else total)
    return _interleave(parts, at.stride, sizes)


def _interleave(parts: Sequence[Tensor], stride: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Interleave the phases' (N, H, W, C)."""
    if len(parts) == 1:
        return parts[0]
    samples, height, width, channels = parts[0].shape
    rows = []
    for row in range(stride[0]):
        lanes = [part.reshape(-1, 1, channels) for part in parts[row * stride[1] : (row + 1) * stride[1]]]
        rows.append(torch.cat(lanes, 1).reshape(samples * height, 1, width * stride[1] * channels))
    whole = torch.cat(rows, 1).reshape(samples, height * stride[0], width * stride[1], channels)
    return whole.narrow(1, 0, sizes[0]).narrow(2, 0, sizes[1])


def _sample_groups(samples: int, positions: int) -> int:
    """Return the number of groups of samples such that each has few positions."""
    fitting = (groups for groups in range(1, samples + 1) if samples % groups == 0)
    return next((groups for groups in fitting if samples // groups * positions <= _SUM_LENGTH), samples)


def products_over_positions(a_pa: Tensor, b_pb: Tensor, samples: int) -> Tensor:
    """Multiply (positions, A) and (positions, B) to (A, B), summed over the positions of all samples."""
    groups = _sample_groups(samples, a_pa.shape[0] // samples)
    if groups == 1:
        return torch.mm(a_pa.t(), b_pb)
    a, b = (part.reshape(groups, -1, part.shape[1]) for part in (a_pa, b_pb))
    return torch.bmm(a.transpose(1, 2), b).sum(0)


def weight_gradient(x_nhwc: Tensor, g_nhwc: Tensor, at: Taps) -> Tensor:
    """Return the gradient of an ordinary convolution's weights, (G * O, C, K, L)."""
    samples = x_nhwc.shape[0]
    depth_in, depth_out = x_nhwc.shape[3] // at.groups, g_nhwc.shape[3] // at.groups
    g_po = g_nhwc.reshape(-1, g_nhwc.shape[3])
    if _few_channels(at, depth_in):
        planes = make_contiguous(x_nhwc.permute(3, 0, 1, 2)).permute(1, 2, 3, 0)
        columns = torch.mm(_columns(planes, at, g_nhwc.shape[1:3]), g_po)
        return columns.reshape(*at.kernel, depth_in, depth_out).permute(3, 2, 0, 1)
    shifted = _ShiftedInput(make_contiguous(x_nhwc), at, g_nhwc.shape[1:3])
    taps = []
    for tap in at.places():
        x_pc = shifted.part(*tap).reshape(-1, x_nhwc.shape[3])
        taps.append(_tap_gradient(x_pc, g_po, at.groups, samples))
    # (K * L, G, O, C)
    return torch.stack(taps).reshape(*at.kernel, at.groups * depth_out, depth_in).permute(2, 3, 0, 1)


def _tap_gradient(x_pc: Tensor, g_po: Tensor, groups: int, samples: int) -> Tensor:
    """Return one tap's (G, O, C)."""
    depth_in, depth_out = x_pc.shape[1] // groups, g_po.shape[1] // groups
    if groups == 1:
        return products_over_positions(g_po, x_pc, samples).reshape(1, depth_out, depth_in)
    if depth_in == 1 or depth_out == 1:
        products = g_po.reshape(-1, groups, depth_out, 1) * x_pc.reshape(-1, groups, 1, depth_in)
        return products.sum(0)
    g_gop = g_po.reshape(-1, groups, depth_out).permute(1, 2, 0)
    x_gpc = x_pc.reshape(-1, groups, depth_in).permute(1, 0, 2)
    return torch.bmm(g_gop, x_gpc)
