"""Memory for many tensors at once."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["zeros_like"]

_ALIGNMENT_BYTES = 64


def zeros_like(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Contiguous tensors of zeros with the names, shapes and devices of others, and their types where none is given.

    Those on the CPU lie in one block. What memory costs there is its first touch, page by page; NumPy asks the system
    for large pages, PyTorch does not, and small tensors could not have any. A block is freed with its last tensor.
    """
    zeros = {}
    starts, end = {}, 0
    for name, tensor in tensors.items():
        wanted = dtype or tensor.dtype
        if tensor.device.type == "cpu":
            starts[name] = end
            end += -(-tensor.numel() * wanted.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        else:
            zeros[name] = torch.zeros(tensor.shape, dtype=wanted, device=tensor.device)
    block = torch.from_numpy(np.zeros(end, dtype=np.uint8))
    for name, start in starts.items():
        wanted, shape = dtype or tensors[name].dtype, tensors[name].shape
        zeros[name] = block[start : start + shape.numel() * wanted.itemsize].view(wanted).reshape(shape)
    return {name: zeros[name] for name in tensors}
