"""The gradient of a convolution's input.

Shapes: as in `convolution_geometry`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry, convolve, pad_or_cut

__all__ = ["input_gradient"]

aten = torch.ops.aten
_FEW_CHANNELS = 32
"""Up to here a runtime's transposed convolution is the faster one, as it copies no patches (measured)."""


def input_gradient(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: Geometry) -> Tensor:
    """Differentiate an ordinary convolution with respect to its input.

    Args:
        gradient: of the output, (N, O, *P).
        weight: (O, C / G, *K).
        sizes: of the input, S.
        at: the convolution's settings.

    Returns:
        (N, C, *S).
    """
    channels = weight.shape[1] * at.groups
    dense = set(at.stride) == {1}
    if dense and (channels > _FEW_CHANNELS or at.groups == channels):
        return _by_flipped_weights(gradient, weight, at)
    return _by_transposed_convolution(gradient, weight, sizes, at)


def _by_flipped_weights(gradient: Tensor, weight: Tensor, at: Geometry) -> Tensor:
    """Where the stride is 1, the backward is itself a convolution."""
    outputs, depth, *kernel = weight.shape
    before = [reach - padding for reach, padding in zip(at.reach(kernel), at.padding, strict=True)]
    padding = [max(amount, 0) for amount in before]
    cut = [min(amount, 0) for amount in before]
    flipped_cok = _flip(weight.reshape(at.groups, outputs // at.groups, depth, *kernel))
    x = pad_or_cut(gradient, cut, cut)
    return convolve(x, flipped_cok, padding=padding, dilation=at.dilation, groups=at.groups)


def _flip(w_gock: Tensor) -> Tensor:
    """(G, O / G, C / G, *K) to (C, O / G, *K), with the places of the kernel in reverse order.

    In two transpositions around a copy of whole rows, which is faster than reversing K in place.
    """
    groups, outputs, depth, *kernel = w_gock.shape
    flat = w_gock.reshape(groups, outputs, -1)
    places = flat.shape[2] // depth
    if places == 1:
        return w_gock.transpose(1, 2).reshape(groups * depth, outputs, *kernel)
    turned = flat.transpose(1, 2).reshape(groups * depth, places, outputs)
    flipped = turned.index_select(1, torch.arange(places - 1, -1, -1))
    return flipped.transpose(1, 2).reshape(groups * depth, outputs, *kernel)


def _by_transposed_convolution(gradient: Tensor, weight: Tensor, sizes: Sequence[int], at: Geometry) -> Tensor:
    # What the forward left over at the far edge comes back as output padding.
    seen = at.seen(weight.shape[2:], gradient.shape[2:])
    rest = [size + 2 * padding - part for size, padding, part in zip(sizes, at.padding, seen, strict=True)]
    settings = (list(at.stride), list(at.padding), list(at.dilation), True, rest, at.groups)
    d_input: Tensor = aten.convolution.default(gradient, weight, None, *settings)
    return d_input
