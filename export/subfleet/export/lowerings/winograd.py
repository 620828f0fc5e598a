"""3 x 3 convolutions with stride 1 by Winograd's minimal filtering F(2 x 2, 3 x 3): 16 products instead of 36.

Lavin and Gray, Fast algorithms for convolutional neural networks (2016), section 4.1. The transforms of a whole batch
are a few elementwise operations on its even and odd rows and columns, with channels last.

In `benchmarks/results/train-step.md` it wins the column "Winograd" of "One 3x3 convolution forward in XNNPACK": 6.4 ms
instead of 10.6 for 64 channels, and faster than sums of products in every row.

Shapes: N samples, C channels in, O channels out, H and W sizes, T tiles of 2 x 2 outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subfleet.export.lowerings.taps import Taps, make_contiguous, products_over_positions

aten = torch.ops.aten

FEWEST_CHANNELS = 12
_FEWEST_TILES = 200
"""With fewer tiles or channels, transforming weights and inputs takes longer than the products that it saves."""


def fits(at: Taps, depth_in: int, depth_out: int, sizes: Sequence[int], samples: int) -> bool:
    """Return whether a convolution has this form, and is faster by it."""
    if at.kernel != (3, 3) or at.stride != (1, 1) or at.dilation != (1, 1) or at.groups != 1 or max(at.padding) > 2:
        return False
    tiles = samples * -(-sizes[0] // 2) * -(-sizes[1] // 2)
    return min(depth_in, depth_out) >= FEWEST_CHANNELS and tiles >= _FEWEST_TILES


def _weights(weight: Tensor) -> list[Tensor]:
    """Transform (O, C, 3, 3) to 16 of (C, O)."""
    depth_out, depth_in = weight.shape[:2]
    g = weight.permute(2, 3, 1, 0).reshape(-1).reshape(3, 3 * depth_in, depth_out)
    rows = [part.reshape(3, depth_in, depth_out) for part in _three_to_four(g[0], g[1], g[2])]
    return [part for row in rows for part in _three_to_four(row[0], row[1], row[2])]


def _three_to_four(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ends, middle = (a + c) * 0.5, b * 0.5
    return a, ends + middle, ends - middle, c


def _four_to_three(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of `_three_to_four`."""
    total, difference = (b + c) * 0.5, (b - c) * 0.5
    return a + total, difference, total + d


def _inputs(x_nhwc: Tensor, padding: Sequence[int], tiles: Sequence[int]) -> list[Tensor]:
    """Transform every tile's 4 x 4 inputs: 16 of (T, C)."""
    samples, height, width, channels = x_nhwc.shape
    down, across = tiles
    after = (2 * down + 2 - padding[0] - height, 2 * across + 2 - padding[1] - width)
    padded: Tensor = aten.constant_pad_nd.default(
        make_contiguous(x_nhwc), [0, 0, padding[1], after[1], padding[0], after[0]], 0.0
    )
    pairs = padded.reshape(samples, down + 1, 2, 2 * across + 2, channels)
    parts = [pairs.narrow(1, at, down).narrow(2, odd, 1) for at in (0, 1) for odd in (0, 1)]
    columns = [part.reshape(samples, down, across + 1, 2, channels) for part in _tile(*parts)]
    transformed: list[Tensor] = []
    for column in columns:
        parts = [column.narrow(2, at, across).narrow(3, odd, 1) for at in (0, 1) for odd in (0, 1)]
        transformed.extend(part.reshape(-1, channels) for part in _tile(*parts))
    return transformed


def _tile(even: Tensor, odd: Tensor, next_even: Tensor, next_odd: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return even - next_even, odd + next_even, next_even - odd, odd - next_odd


def _outputs(products: Sequence[Tensor], samples: int, tiles: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Transform 16 products of (T, O) to (N, *sizes, O)."""
    channels = products[0].shape[1]
    pairs = [_four_to_two(*products[column::4]) for column in range(4)]
    rows = []
    for row in range(2):
        left, right = _four_to_two(*(pair[row] for pair in pairs))
        lanes = torch.cat([left.reshape(-1, 1, channels), right.reshape(-1, 1, channels)], 1)
        rows.append(lanes.reshape(samples * tiles[0], 1, 2 * tiles[1] * channels))
    whole = torch.cat(rows, 1).reshape(samples, 2 * tiles[0], 2 * tiles[1], channels)
    return whole.narrow(1, 0, sizes[0]).narrow(2, 0, sizes[1])


def _four_to_two(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    return a + (b + c), (b - c) - d


def _gradients(g_nhwc: Tensor, tiles: Sequence[int]) -> list[Tensor]:
    """The adjoint of `_outputs`: 16 of (T, O)."""
    samples, height, width, channels = g_nhwc.shape
    after = (2 * tiles[0] - height, 2 * tiles[1] - width)
    g_nhwc = make_contiguous(g_nhwc)
    if any(after):
        g_nhwc = aten.constant_pad_nd.default(g_nhwc, [0, 0, 0, after[1], 0, after[0]], 0.0)
    pairs = g_nhwc.reshape(samples, tiles[0], 2, 2 * tiles[1], channels)
    rows = _two_to_four(pairs.narrow(2, 0, 1), pairs.narrow(2, 1, 1))
    transformed: list[Tensor] = []
    for row in rows:
        lanes = row.reshape(-1, 2, channels)
        parts = _two_to_four(lanes.narrow(1, 0, 1), lanes.narrow(1, 1, 1))
        transformed.extend(part.reshape(-1, channels) for part in parts)
    return transformed


def _two_to_four(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The adjoint of `_four_to_two`, except for the sign of the last, which the caller changes."""
    return a, a + b, a - b, b


def _tiles(sizes: Sequence[int]) -> tuple[int, int]:
    return -(-sizes[0] // 2), -(-sizes[1] // 2)


def _convolve(x_nhwc: Tensor, weights: Sequence[Tensor], padding: Sequence[int], sizes: Sequence[int]) -> Tensor:
    tiles = _tiles(sizes)
    products = [torch.mm(x, w) for x, w in zip(_inputs(x_nhwc, padding, tiles), weights, strict=True)]
    return _outputs(products, x_nhwc.shape[0], tiles, sizes)


def gather(x_nhwc: Tensor, weight: Tensor, at: Taps, sizes: Sequence[int]) -> Tensor:
    """Compute the ordinary convolution of an input with weights (O, C, 3, 3): (N, *sizes, O)."""
    return _convolve(x_nhwc, _weights(weight), at.padding, sizes)


def spread(g_nhwc: Tensor, weight: Tensor, at: Taps, sizes: Sequence[int]) -> Tensor:
    """Compute the transposed convolution, (N, *sizes, C): the ordinary one with the kernel rotated."""
    # Rotation swaps the first and the last of each four transformed weights.
    turned = [part.t() for part in _weights(weight)]
    swap = (3, 1, 2, 0)
    weights = [turned[4 * swap[row] + swap[column]] for row in range(4) for column in range(4)]
    padding = [2 - at.padding[i] for i in range(2)]
    return _convolve(g_nhwc, weights, padding, sizes)


def weight_gradient(x_nhwc: Tensor, g_nhwc: Tensor, at: Taps) -> Tensor:
    """Return the gradient of an ordinary convolution's weights, (O, C, 3, 3)."""
    samples, channels, depth_out = x_nhwc.shape[0], x_nhwc.shape[3], g_nhwc.shape[3]
    tiles = _tiles(g_nhwc.shape[1:3])
    inputs, gradients = _inputs(x_nhwc, at.padding, tiles), _gradients(g_nhwc, tiles)
    products = []
    for index, (x, g) in enumerate(zip(inputs, gradients, strict=True)):
        product = products_over_positions(g, x, samples)
        odd = (index // 4 == 3) != (index % 4 == 3)
        products.append(-product if odd else product)
    rows = [torch.stack(_four_to_three(*products[4 * row : 4 * row + 4])) for row in range(4)]
    taps = torch.stack(_four_to_three(*rows))
    return taps.reshape(3, 3, depth_out, channels).permute(2, 3, 0, 1)
