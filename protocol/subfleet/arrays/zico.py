"""ZiCo: predicts how well a network will learn from the gradients of a few batches before training.

Li et al., "ZiCo: Zero-shot NAS via Inverse Coefficient of Variation on Gradients", ICLR 2023, equation 6. Plain
arithmetic on arrays, so that a device can score a candidate on its own data.
"""

import math
from collections.abc import Sequence

import numpy as np

from subfleet.arrays import Arrays
from subfleet.protocol.errors import DataError


def zico(gradients: Sequence[Arrays]) -> float:
    """Compute the sum over layers of log(sum over weights of mean|g| / std g), with mean and deviation over batches.

    The larger the score, the better a network is expected to learn. Weights with the same gradient in all batches are
    skipped; a layer with only such weights adds 0. The scale of the loss does not matter.

    Args:
        gradients: of each batch, two or more: the gradient of the loss with respect to the weights of each
            convolution and linear layer, by name, without any training in between.

    Raises:
        DataError: there are fewer than two batches, they differ in names or shapes, or a value is not finite.
    """
    if len(gradients) < 2:
        raise DataError(f"there are gradients of {len(gradients)} batches, but a score needs at least two")
    shapes = [{name: array.shape for name, array in batch.items()} for batch in gradients]
    if any(batch_shapes != shapes[0] for batch_shapes in shapes):
        raise DataError("the gradients of the batches differ in names or shapes, but must be those of one network")
    return math.fsum(_layer_score(name, gradients) for name in shapes[0])


def _layer_score(name: str, gradients: Sequence[Arrays]) -> float:
    values = np.stack([batch[name].reshape(-1) for batch in gradients]).astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"the gradient of {name!r} is not finite, so that the network cannot be scored")
    # Stated without the deviation, which rounding may leave above 0 where all are equal.
    varied = values[:, values.max(axis=0) > values.min(axis=0)]
    total = float(np.sum(np.abs(varied).mean(axis=0) / varied.std(axis=0)))
    return math.log(total) if total > 0 else 0.0
