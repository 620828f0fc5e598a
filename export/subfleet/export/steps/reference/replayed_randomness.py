"""PyTorch's own layers with the random inputs of a step in place of PyTorch's generator; nothing else differs.

A random number belongs to an element of the padded batch; an element is kept if its number is at least `p`.

Shapes: B samples of the padded batch, R real ones, H heads, L queries, S keys, T time steps, F features.
"""

# ruff: noqa: PLR0913, PLR0917 - PyTorch's signatures

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from subfleet.export.layers.random_layers import DRAWS
from subfleet.protocol.errors import ExportError


class ReplayedRandomness(TorchFunctionMode):
    """Lets layers drop what the given random numbers determine.

    Args:
        randoms: uniform numbers in [0, 1) for the padded batch, in the order of the calls that take them.
        real_B: which samples are real; only these are run.
    """

    def __init__(self, randoms: Sequence[Tensor], real_B: Tensor) -> None:  # noqa: N803 - shapes in names
        super().__init__()
        self._left = list(randoms)
        self._real_B = real_B
        self._drawn: dict[str, list[Tensor]] = {}
        self._layers = [""]

    @contextmanager
    def watch_layers(self, module: nn.Module) -> Iterator[None]:
        """Track which layer of a module draws."""

        def enter(name: str, _layer: nn.Module, _inputs: Any) -> None:
            self._layers.append(name)

        def leave(_layer: nn.Module, _inputs: Any, _outputs: Any) -> None:
            self._layers.pop()

        with _hook_layers(module, enter, leave):
            yield

    @contextmanager
    def repeat_layers(self, module: nn.Module) -> Iterator[None]:
        """Let layers that `torch.utils.checkpoint` runs again in the backward pass draw the same numbers.

        PyTorch turns this mode off for that pass.
        """
        running: list[ReplayedRandomness] = []

        def enter(name: str, _layer: nn.Module, _inputs: Any) -> None:
            running.append(ReplayedRandomness(self._drawn.get(name, []), self._real_B))
            running[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(_layer: nn.Module, _inputs: Any, _outputs: Any) -> None:
            running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        with _hook_layers(module, enter, leave):
            yield

    def check_all_taken(self) -> None:
        """Check that all random inputs of a step were used.

        Raises:
            ExportError: some were not.
        """
        if self._left:
            raise ExportError(
                f"the network used {len(self._left)} fewer random inputs than its step; its forward must always do the "
                "same, and a layer that draws needs an entry in subfleet.export.steps.reference.replayed_randomness"
            )

    def next(self) -> Tensor:
        """Return the next random tensor of the padded batch.

        Raises:
            ExportError: there is none.
        """
        if not self._left:
            raise ExportError("the network uses more random inputs than its step; its forward must always do the same")
        random = self._left.pop(0)
        self._drawn.setdefault(self._layers[-1], []).append(random)
        return random

    def select_real(self, values: Tensor, dim: int) -> Tensor:
        """Select the real samples' part of a dimension: (B * n) to (R * n)."""
        each = values.shape[dim] // len(self._real_B)
        return values.index_select(dim, self._real_B.repeat_interleave(each).nonzero().flatten())

    def dropout_factor(self, shape: Sequence[int], p: float) -> Tensor:
        """Return the factor of a tensor of real samples: 0 where an element is dropped.

        Raises:
            ExportError: the random input has another shape.
        """
        return keep_factor(self.numbers(shape), p)

    def numbers(self, shape: Sequence[int]) -> Tensor:
        """Return the next random numbers of the real samples.

        Raises:
            ExportError: the step's random input has another shape.
        """
        random, padded, count = self.next(), len(self._real_B), int(self._real_B.sum())
        for dim, (own_size, size) in enumerate(zip(random.shape, shape, strict=False)):
            if own_size != size and own_size * count == size * padded:
                random = self.select_real(random, dim)
        if random.shape != tuple(shape):
            raise ExportError(
                f"the network draws numbers of the shape {tuple(shape)}, but its step draws {tuple(random.shape)}; its "
                "forward must do the same in every run"
            )
        return random

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        layer, draw = RANDOM_LAYERS.get(func), DRAWS.get(func)
        if layer is not None:
            return layer(self, func, *args, **(kwargs or {}))
        return (func if draw is None else partial(draw, self.numbers))(*args, **(kwargs or {}))


@contextmanager
def _hook_layers(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call `enter` with each layer's name before it runs, and `leave` after it, also if it raised an error."""
    with ExitStack() as stack:
        for name, layer in module.named_modules():
            stack.callback(layer.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


def keep_factor(random: Tensor, p: float) -> Tensor:
    """Return 0 where a number is below `p` in single precision, in which it was drawn, and 1 / (1 - p) elsewhere."""
    return (random >= float(torch.tensor(p, dtype=torch.float32))).to(random.dtype) / (1 - p)


_Layer = Callable[..., Any]
"""(randomness, the PyTorch function that was called, its arguments) to its result."""


def _dropout(spread: int) -> _Layer:
    """Drop single elements, or elements with all of their last `spread` dimensions."""

    def drop(
        randomness: ReplayedRandomness,
        func: Any,
        input: Tensor,  # noqa: A002 - PyTorch's name of it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p in (0, 1):
            result: Tensor = func(input, p, training, inplace)
            return result
        alone = input.dim() - spread
        factor = randomness.dropout_factor((*input.shape[:alone], *[1] * spread), p)
        return input.mul_(factor) if inplace else input * factor

    return drop


def _attention(
    randomness: ReplayedRandomness,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention from the weights that PyTorch's own attention gives to each key."""
    attend = partial(func, attn_mask=attn_mask, dropout_p=0.0, is_causal=is_causal, **options)
    if not dropout_p:
        result: Tensor = attend(query, key, value)
        return result
    identity = torch.eye(key.shape[-2], dtype=value.dtype).expand(*key.shape[:-1], -1)
    weights = attend(query, key, identity)
    if options.get("enable_gqa"):
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    output: Tensor = (weights * randomness.dropout_factor(weights.shape, dropout_p)) @ value
    return output


def _multi_head(randomness: ReplayedRandomness, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the functions of PyTorch's own module that it calls to drop."""
    heads = inspect.signature(func).bind(*args, **kwargs).arguments["num_heads"]

    def dropout(weights: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        if not training or not p:
            return weights
        return weights * randomness.dropout_factor((weights.shape[0] // heads, heads, *weights.shape[1:]), p).reshape(
            weights.shape
        )

    attention = partial(_attention, randomness, functional.scaled_dot_product_attention)
    with (
        patch.object(functional, "dropout", dropout),
        patch.object(functional, "scaled_dot_product_attention", attention),
    ):
        return func(*args, **kwargs)


def _recurrent(
    randomness: ReplayedRandomness,
    func: Any,
    inputs: Tensor,
    states: Any,
    parameters: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """Run layer by layer if anything is dropped between layers. Their random inputs are (F, T * B)."""
    if not (train and dropout and layers > 1):
        return func(inputs, states, parameters, has_biases, layers, dropout, train, bidirectional, batch_first)
    each, directions = len(parameters) // layers, 2 if bidirectional else 1
    last = []
    for layer in range(layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        own = states[rows] if isinstance(states, Tensor) else [state[rows] for state in states]
        weights = parameters[layer * each : (layer + 1) * each]
        inputs, *ends = func(inputs, own, weights, has_biases, 1, 0.0, train, bidirectional, batch_first)
        last.append(ends)
        if layer < layers - 1:
            random = randomness.next()
            random_ftr = randomness.select_real(
                random.reshape(len(random), inputs.shape[1 if batch_first else 0], -1), 2
            )
            inputs = inputs * keep_factor(
                random_ftr.permute(2, 1, 0) if batch_first else random_ftr.permute(1, 2, 0), dropout
            )
    return inputs, *(torch.cat(kind) for kind in zip(*last, strict=True))


def _batch_norm(
    _given: ReplayedRandomness,
    func: Any,
    input: Tensor,  # noqa: A002 - PyTorch's name of it
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """PyTorch refuses to train on one value per channel. Its kernel accepts it, but with a variance of 0 / 0."""
    if not training or input.numel() > input.shape[1]:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    updated = [None if running is None else running.clone() for running in (running_mean, running_var)]
    outputs = torch.batch_norm(input, weight, bias, *updated, True, momentum, eps, False)  # type: ignore[call-arg,arg-type] # PyTorch's stub is of another function
    if running_mean is not None and updated[0] is not None:
        running_mean.copy_(updated[0])
    return outputs


RANDOM_LAYERS: Mapping[Any, _Layer] = MappingProxyType(
    {
        functional.dropout: _dropout(0),
        functional.dropout1d: _dropout(1),
        functional.dropout2d: _dropout(2),
        functional.dropout3d: _dropout(3),
        functional.scaled_dot_product_attention: _attention,
        functional.multi_head_attention_forward: _multi_head,
        torch.lstm: _recurrent,
        torch.gru: _recurrent,
        torch.rnn_tanh: _recurrent,
        torch.rnn_relu: _recurrent,
        functional.batch_norm: _batch_norm,
    }
)
"""By function: the layers that draw, and batch norm, for which PyTorch may refuse a small batch."""
