"""Dropout whose randomness is an input of the step, so that a step can be repeated bit by bit."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError

__all__ = ["DROPOUTS", "drop_elements"]


def drop_elements(context: LayerContext, inputs: Tensor, p: float, random_shape: tuple[int, ...]) -> Tensor:
    """Set elements to zero where the next random input is below `p`, and divide the others by 1 - p.

    Args:
        context: gives the random input.
        inputs: any shape.
        p: share that is dropped, 0 to 1.
        random_shape: as `inputs`, with 1 where a whole line is dropped at once.

    Raises:
        ExportError: `p` is out of range.
    """
    if not 0 <= p <= 1:
        raise ExportError(f"layer {context.layer!r} drops a fraction of {p}, but it must be from 0 to 1")
    if p == 0:
        return inputs
    if p == 1:
        return inputs * 0.0
    # In the random input's own precision, so that a comparison in double precision decides every element alike.
    threshold = float(torch.tensor(p, dtype=torch.float32, device="cpu"))
    mask = (context.next_random(random_shape) >= threshold).to(inputs.dtype)
    return inputs * (mask * (1 / (1 - p)))


def _dropout(dimensions: int) -> Replacement:
    """Of single elements, or of channels with so many dimensions."""

    def drop(
        context: LayerContext,
        input: Tensor,  # noqa: A002 - PyTorch's name of it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,  # PyTorch's signature; nothing is done in place
    ) -> Tensor:
        if dimensions and input.dim() != dimensions + 2:
            raise ExportError(
                f"layer {context.layer!r} drops channels of an input of the shape {tuple(input.shape)}, but it must "
                f"have {dimensions + 2} dimensions; keep the batch"
            )
        shape = (*input.shape[:2], *[1] * dimensions) if dimensions else tuple(input.shape)
        return drop_elements(context, input, p, shape) if training else input

    return drop


def _refuse_in_training(function: Callable[..., Tensor], remedy: str = "use nn.Dropout") -> Replacement:
    signature = inspect.signature(function)

    def refuse(context: LayerContext, *args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments.get("training", True):
            raise ExportError(
                f"layer {context.layer!r} draws its own randomness, which no program can replay; {remedy} instead"
            )
        return function(*args, **kwargs)

    return refuse


DROPOUTS: Mapping[Any, Replacement] = MappingProxyType(
    {
        functional.dropout: _dropout(0),
        functional.dropout1d: _dropout(1),
        functional.dropout2d: _dropout(2),
        functional.dropout3d: _dropout(3),
        functional.alpha_dropout: _refuse_in_training(functional.alpha_dropout),
        functional.feature_alpha_dropout: _refuse_in_training(functional.feature_alpha_dropout),
        functional.rrelu: _refuse_in_training(functional.rrelu, "use nn.LeakyReLU"),
        functional.gumbel_softmax: _refuse_in_training(
            functional.gumbel_softmax, "add -log(-log(u)) of torch.rand to the logits, and take a softmax"
        ),
    }
)
