"""PyTorch's own draws, such as those of stochastic depth, from the random inputs of the step.

Each is made of uniform numbers, so that a training can be repeated bit by bit, on any runtime.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError

__all__ = ["DRAWS", "RANDOMNESS", "Uniform"]

Uniform = Callable[[Sequence[int]], Tensor]
"""A shape to uniform numbers in [0, 1), new ones in every call."""


def _sizes(given: Sequence[Any]) -> tuple[int, ...]:
    """The sizes that a factory such as `torch.rand` was given: one by one, or as one sequence."""
    sizes = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    return tuple(int(size) for size in sizes)


def _cast(drawn: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Single precision, which is PyTorch's default, stays that of the step, which may be double."""
    return drawn if dtype in {None, torch.float32} else drawn.to(dtype)


def _rand(uniform: Uniform, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:
    return _cast(uniform(_sizes(sizes or (size,))), dtype)


def _rand_like(uniform: Uniform, input: Tensor, *, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:  # noqa: A002
    return _cast(uniform(input.shape), dtype or input.dtype)


def _normal(uniform: Uniform, shape: Sequence[int]) -> Tensor:
    """Normal numbers of two uniform ones each (Box and Muller 1958)."""
    radius = torch.sqrt(-2.0 * torch.log(1.0 - uniform(shape)))
    return radius * torch.cos(uniform(shape) * (2.0 * math.pi))


def _randn(
    uniform: Uniform, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None, **_options: Any
) -> Tensor:
    return _cast(_normal(uniform, _sizes(sizes or (size,))), dtype)


def _randn_like(uniform: Uniform, input: Tensor, *, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:  # noqa: A002
    return _cast(_normal(uniform, input.shape), dtype or input.dtype)


def _draw_below(uniform: Uniform, shape: Sequence[int], p: Any) -> Tensor:
    """True with probability `p`, which is rounded to the single precision in which the numbers were drawn."""
    return uniform(shape) < (p if isinstance(p, Tensor) else float(torch.tensor(p, dtype=torch.float32, device="cpu")))


def _bernoulli(uniform: Uniform, input: Tensor, p: float | None = None, **_options: Any) -> Tensor:  # noqa: A002
    return _draw_below(uniform, input.shape, input if p is None else p).to(input.dtype)


def _set_bernoulli(uniform: Uniform, tensor: Tensor, p: Any = 0.5, **_options: Any) -> Tensor:
    return tensor.copy_(_draw_below(uniform, tensor.shape, p))


def _set_uniform(uniform: Uniform, tensor: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return tensor.copy_(uniform(tensor.shape) * (high - low) + low)


def _set_normal(uniform: Uniform, tensor: Tensor, mean: float = 0.0, std: float = 1.0, **_options: Any) -> Tensor:
    return tensor.copy_(_normal(uniform, tensor.shape) * std + mean)


def _set_exponential(uniform: Uniform, tensor: Tensor, lambd: float = 1.0, **_options: Any) -> Tensor:
    return tensor.copy_(-torch.log(1.0 - uniform(tensor.shape)) / lambd)


DRAWS: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        torch.rand: _rand,
        torch.rand_like: _rand_like,
        torch.randn: _randn,
        torch.randn_like: _randn_like,
        torch.bernoulli: _bernoulli,
        Tensor.bernoulli: _bernoulli,
        Tensor.bernoulli_: _set_bernoulli,
        Tensor.uniform_: _set_uniform,
        Tensor.normal_: _set_normal,
        Tensor.exponential_: _set_exponential,
    }
)
"""By function: what takes uniform numbers, and the function's own arguments."""


def _numbers(context: LayerContext, shape: Sequence[int]) -> Tensor:
    """The step's next random input, where it may take one."""
    if context.sample_mask_B is None:
        raise ExportError(
            f"layer {context.layer!r} draws at random in evaluation mode, but an inference model takes no randomness; "
            "draw where self.training is true, and give the mean elsewhere"
        )
    if context.in_parts and tuple(shape[:1]) != tuple(context.sample_mask_B.shape):
        raise ExportError(
            f"layer {context.layer!r} draws numbers of the shape {tuple(shape)} for a whole batch, so micro-batches "
            "would not draw what the batch draws; draw for each sample, as stochastic depth does with mode='row', or "
            "take the whole batch at once"
        )
    return context.next_random(shape)


def _from_step(draw: Callable[..., Tensor]) -> Replacement:
    return lambda context, *args, **kwargs: draw(partial(_numbers, context), *args, **kwargs)


def _refuse(context: LayerContext, *_args: Any, **_kwargs: Any) -> Tensor:
    raise ExportError(
        f"layer {context.layer!r} draws its own randomness, which no program can replay; draw with torch.rand, "
        "torch.randn or torch.bernoulli, or use nn.Dropout instead"
    )


_REFUSED = (
    torch.normal, torch.randint, torch.randint_like, torch.randperm, torch.multinomial, torch.poisson,
    Tensor.multinomial, Tensor.random_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_,
)  # fmt: skip

RANDOMNESS: Mapping[Any, Replacement] = MappingProxyType(
    {function: _from_step(draw) for function, draw in DRAWS.items()} | dict.fromkeys(_REFUSED, _refuse)
)
