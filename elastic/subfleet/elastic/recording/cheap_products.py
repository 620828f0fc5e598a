"""Large products in a recorded run: of all outputs one is computed, which stands for the others.

What is recorded of a run are shapes, and which tensors it changes; the numbers themselves do not matter. So batch
norms of tensors without memory are not run either: PyTorch would compose each of some twenty operators in Python.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_LARGE = 2**22
"""Multiplications."""


def compute_cheaply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an ATen operator; the columns of a large product or channels of a large convolution are alike."""
    if function is torch.ops.aten.convolution.default:
        return _convolve(function, args, kwargs)
    if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
        return _multiply(function, args, kwargs)
    if function is torch.ops.aten.native_batch_norm.default and args[0].is_meta:
        return _shape_norm(args[0])
    return function(*args, **kwargs)


def _convolve(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, weight, bias, *others = args
    transposed, groups = others[3], others[5]
    macs = weight.numel() * math.prod(source.shape[2:]) * len(source)
    if transposed or groups > 1 or macs < _LARGE:
        return function(*args, **kwargs)
    one: Tensor = function(source, weight[:1], None if bias is None else bias[:1], *others, **kwargs)
    return one.expand(-1, len(weight), *one.shape[2:]).contiguous()


def _multiply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    *added, left, right = args
    if left.numel() * right.shape[-1] < _LARGE:
        return function(*args, **kwargs)
    one: Tensor = function(*(tensor[..., :1] for tensor in added), left, right[..., :1], **kwargs)
    return one.expand(*one.shape[:-1], right.shape[-1]).contiguous()


def _shape_norm(source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised tensor, and the mean and the deviation of each channel."""
    mean, deviation = (source.new_empty(source.shape[1]) for _ in range(2))
    return torch.empty_like(source), mean, deviation
