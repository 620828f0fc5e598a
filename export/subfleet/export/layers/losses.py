"""Losses of a network's own, computed by operators that every runtime has.

They compare class indices instead of gathering by them, as the objectives do. A loss that is reduced to one number is
left to PyTorch: padding could not be left out of it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement


def _cross_entropy(  # noqa: PLR0913, PLR0917 - PyTorch's arguments
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if reduction != "none" or size_average is not None or reduce is not None:
        return functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    at = 1 if input.dim() > 1 else 0
    wanted = target if target.is_floating_point() else _compare(target, input.shape[at]).movedim(-1, at).to(input.dtype)
    if label_smoothing:
        wanted = wanted * (1 - label_smoothing) + label_smoothing / input.shape[at]
    terms = wanted * torch.log_softmax(input, at)
    losses = -_weigh(terms, weight, at).sum(at)
    return losses if target.is_floating_point() else losses * (target != ignore_index).to(losses.dtype)


def _nll_loss(  # noqa: PLR0913, PLR0917 - PyTorch's arguments
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    if reduction != "none" or size_average is not None or reduce is not None:
        return functional.nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)
    at = 1 if input.dim() > 1 else 0
    terms = _compare(target, input.shape[at]).movedim(-1, at).to(input.dtype) * input
    return -_weigh(terms, weight, at).sum(at) * (target != ignore_index).to(input.dtype)


def _compare(indices: Tensor, count: int) -> Tensor:
    return indices.unsqueeze(-1) == torch.arange(count, device=indices.device)


def _weigh(terms: Tensor, weight: Tensor | None, at: int) -> Tensor:
    return terms if weight is None else terms * weight.reshape(-1, *[1] * (terms.dim() - 1 - at))


def _binary_cross_entropy_with_logits(  # noqa: PLR0913, PLR0917 - PyTorch's arguments
    _context: LayerContext,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    if reduction != "none" or size_average is not None or reduce is not None:
        return functional.binary_cross_entropy_with_logits(
            input, target, weight, size_average, reduce, reduction, pos_weight
        )
    positive = 1.0 if pos_weight is None else pos_weight
    losses = (1 - target) * input - (1 + (positive - 1) * target) * functional.logsigmoid(input)
    return losses if weight is None else losses * weight


def _make_piecewise(function: Callable[..., Tensor], border: str) -> Replacement:
    """Return a replacement of a loss that is quadratic near 0 and linear beyond a border."""

    def loss(
        _context: LayerContext,
        input: Tensor,  # noqa: A002 - PyTorch's name of it
        target: Tensor,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        given = {name: option for name, option in options.items() if option is not None}
        at, weight = given.get(border, 1.0), given.get("weight")
        if args or given.get("reduction") != "none" or not at or given.keys() - {"reduction", border, "weight"}:
            return function(input, target, *args, **options)
        distance = (input - target).abs()
        losses = torch.where(distance < at, 0.5 * distance * distance, at * (distance - 0.5 * at))
        losses = losses / at if border == "beta" else losses
        return losses if weight is None else losses * weight

    return loss


LOSSES: Mapping[Any, Replacement] = MappingProxyType(
    {
        functional.cross_entropy: _cross_entropy,
        functional.nll_loss: _nll_loss,
        functional.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
        functional.huber_loss: _make_piecewise(functional.huber_loss, "delta"),
        functional.smooth_l1_loss: _make_piecewise(functional.smooth_l1_loss, "beta"),
    }
)
