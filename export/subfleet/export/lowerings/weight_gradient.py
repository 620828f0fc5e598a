"""The gradient of a convolution's weights, as one convolution that contracts samples and places.

It convolves the input with the output's gradient as the kernel. A runtime makes that one product of matrices, and the
product is as fast as the forward's if its columns are many and lie side by side in memory. So samples take the place
of channels, and channels become one more dimension, the last: the product has (K * C) columns, where swapping samples
and channels alone would leave C products of K columns each (2 to 3 times slower with ONNX Runtime).

Shapes: as in `convolution_geometry`.
"""

from collections.abc import Sequence

from torch import Tensor

from subfleet.export.lowerings.convolution_geometry import Geometry, convolve, is_linear, pad_or_cut

__all__ = ["weight_gradient"]

_SLOWER_SUM = 4
"""How many times longer an element of a sum of products takes than one that is moved (measured)."""


def weight_gradient(inputs: Tensor, gradient: Tensor, kernel: Sequence[int], at: Geometry) -> Tensor:
    """Differentiate an ordinary convolution with respect to its weights.

    Args:
        inputs: (N, C, *S).
        gradient: of the output, (N, O, *P).
        kernel: the sizes K.
        at: the convolution's settings.

    Returns:
        (O, C / G, *K).
    """
    if at.groups == 1 and is_linear(kernel, inputs.shape[2:], gradient.shape[2:], at):
        return _pointwise_gradient(inputs, gradient).reshape(gradient.shape[1], inputs.shape[1], *kernel)
    (samples, channels, *sizes), (_, outputs, *places) = inputs.shape, gradient.shape
    dims, depth = len(sizes), channels // at.groups
    if at.groups == 1:
        x_nsc = inputs.permute(0, *range(2, 2 + dims), 1)
    else:
        x_nsc = inputs.reshape(samples, at.groups, depth, *sizes).permute(1, 0, *range(3, 3 + dims), 2)
    # At the far edge the forward may leave out some places, or the padding.
    ends = zip(at.seen(kernel, places), sizes, at.padding, strict=True)
    after = [seen - size - padding for seen, size, padding in ends]
    x = pad_or_cut(x_nsc.reshape(1, at.groups * samples, *sizes, depth), [*at.padding, 0], [*after, 0])
    g_onp1 = gradient.transpose(0, 1).unsqueeze(-1)
    # The forward's stride spreads the gradient, so it becomes the dilation, and the other way round.
    d_okc = convolve(x, g_onp1, stride=[*at.dilation, 1], dilation=[*at.stride, 1], groups=at.groups)
    return d_okc.squeeze(0).permute(0, dims + 1, *range(1, dims + 1)).reshape(outputs, depth, *kernel)


def _pointwise_gradient(inputs: Tensor, gradient: Tensor) -> Tensor:
    """Where the kernel is a single place: (O, C)."""
    x_ncp, g_nop = inputs.flatten(2), gradient.flatten(2)
    samples, channels, places = x_ncp.shape
    outputs = g_nop.shape[1]
    if places * (channels + outputs) < _SLOWER_SUM * channels * outputs:
        # Moving samples beside places costs less than adding up one product for each sample.
        x_cp, g_op = (part.transpose(0, 1).reshape(-1, samples * places) for part in (x_ncp, g_nop))
        return g_op @ x_cp.t()
    return (g_nop @ x_ncp.transpose(1, 2)).sum(0)
