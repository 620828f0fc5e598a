"""Losses of a network's own, computed by operators that every runtime has.

They compare class indices instead of gathering by them, as the objectives do. A loss that is reduced to one number is
left to PyTorch: padding could not be left out of it.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement

_OLD_NAMES = ("size_average", "reduce")
"""PyTorch's former arguments for `reduction`."""


def _replace(function: Callable[..., Tensor], compute: Callable[..., Tensor]) -> Replacement:
    """Return a replacement that computes the loss of each element, with the function's other arguments by name."""
    signature = inspect.signature(function)

    def loss(_context: LayerContext, *args: Any, **options: Any) -> Tensor:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        reduction, old = given.pop("reduction"), [given.pop(name, None) for name in _OLD_NAMES]
        if reduction != "none" or any(value is not None for value in old):
            return function(*args, **options)
        return compute(given.pop("input"), given.pop("target"), **given)

    return loss


def _cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    at = 1 if logits.dim() > 1 else 0
    indexed = not target.is_floating_point()
    wanted = _compare(target, logits.shape[at]).movedim(-1, at).to(logits.dtype) if indexed else target
    if label_smoothing:
        wanted = wanted * (1 - label_smoothing) + label_smoothing / logits.shape[at]
    losses = -_weigh(wanted * torch.log_softmax(logits, at), weight, at).sum(at)
    return losses * (target != ignore_index).to(losses.dtype) if indexed else losses


def _nll_loss(likelihoods: Tensor, target: Tensor, *, weight: Tensor | None, ignore_index: int) -> Tensor:
    at = 1 if likelihoods.dim() > 1 else 0
    terms = _compare(target, likelihoods.shape[at]).movedim(-1, at).to(likelihoods.dtype) * likelihoods
    return -_weigh(terms, weight, at).sum(at) * (target != ignore_index).to(likelihoods.dtype)


def _compare(indices: Tensor, count: int) -> Tensor:
    return indices.unsqueeze(-1) == torch.arange(count, device=indices.device)


def _weigh(terms: Tensor, weight: Tensor | None, at: int) -> Tensor:
    return terms if weight is None else terms * weight.reshape(-1, *[1] * (terms.dim() - 1 - at))


def _binary_cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None, pos_weight: Tensor | None
) -> Tensor:
    positive = 1.0 if pos_weight is None else pos_weight
    losses = (1 - target) * logits - (1 + (positive - 1) * target) * functional.logsigmoid(logits)
    return losses if weight is None else losses * weight


def _huber_loss(outputs: Tensor, target: Tensor, *, delta: float, weight: Tensor | None = None) -> Tensor:
    distance = (outputs - target).abs()
    losses = torch.where(distance < delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))
    return losses if weight is None else losses * weight


def _smooth_l1_loss(outputs: Tensor, target: Tensor, *, beta: float) -> Tensor:
    return _huber_loss(outputs, target, delta=beta) / beta if beta else (outputs - target).abs()


LOSSES: Mapping[Any, Replacement] = MappingProxyType(
    {
        function: _replace(function, compute)
        for function, compute in (
            (functional.cross_entropy, _cross_entropy),
            (functional.nll_loss, _nll_loss),
            (functional.binary_cross_entropy_with_logits, _binary_cross_entropy),
            (functional.huber_loss, _huber_loss),
            (functional.smooth_l1_loss, _smooth_l1_loss),
        )
    }
)
