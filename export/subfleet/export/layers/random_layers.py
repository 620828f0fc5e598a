"""Dropout and random draws from the random inputs of a step, so that a step can be repeated exactly."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError


def drop_elements(context: LayerContext, inputs: Tensor, p: float, random_shape: tuple[int, ...]) -> Tensor:
    """Set elements to zero where the next random input is below `p`, and divide the others by 1 - p.

    Args:
        context: gives the random input.
        inputs: any shape.
        p: fraction that is dropped, 0 to 1.
        random_shape: as `inputs`, with 1 for dimensions that are dropped as a whole.

    Raises:
        ExportError: `p` is out of range.
    """
    if not 0 <= p <= 1:
        raise ExportError(f"layer {context.layer!r} drops a fraction of {p}, but it must be from 0 to 1")
    if p == 0:
        return inputs
    if p == 1:
        return inputs * 0.0
    # In the random input's precision, so that a comparison in double precision gives the same results.
    threshold = float(torch.tensor(p, dtype=torch.float32, device="cpu"))
    mask = (context.next_random(random_shape) >= threshold).to(inputs.dtype)
    return inputs * (mask * (1 / (1 - p)))


def _dropout(dimensions: int) -> Replacement:
    """Drop single elements, or channels with this many dimensions."""

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


Uniform = Callable[[Sequence[int]], Tensor]
"""A shape to uniform numbers in [0, 1), new ones in every call."""


def _sizes(given: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes given to a factory such as `torch.rand`: one by one, or as one sequence."""
    sizes = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    return tuple(int(size) for size in sizes)


def _cast(drawn: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert to a type; single precision, PyTorch's default, stays the step's precision, which may be double."""
    return drawn if dtype in {None, torch.float32} else drawn.to(dtype)


def _rand(uniform: Uniform, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:
    return _cast(uniform(_sizes(sizes or (size,))), dtype)


def _rand_like(uniform: Uniform, input: Tensor, *, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:  # noqa: A002
    return _cast(uniform(input.shape), dtype or input.dtype)


def _normal(uniform: Uniform, shape: Sequence[int]) -> Tensor:
    """Draw normal numbers from two uniform ones each (Box and Muller 1958)."""
    radius = torch.sqrt(-2.0 * torch.log(1.0 - uniform(shape)))
    return radius * torch.cos(uniform(shape) * (2.0 * math.pi))


def _randn(
    uniform: Uniform, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None, **_options: Any
) -> Tensor:
    return _cast(_normal(uniform, _sizes(sizes or (size,))), dtype)


def _randn_like(uniform: Uniform, input: Tensor, *, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:  # noqa: A002
    return _cast(_normal(uniform, input.shape), dtype or input.dtype)


def _draw_below(uniform: Uniform, shape: Sequence[int], p: Any) -> Tensor:
    """True with probability `p`, which is rounded to the single precision of the drawn numbers."""
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
"""By function: a function of uniform numbers and the function's own arguments."""


def _numbers(context: LayerContext, shape: Sequence[int]) -> Tensor:
    """Return the step's next random input, if the layer may take one."""
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
