"""LSTM, GRU and plain recurrent layers, unrolled, with their own backwards.

All tensors have features first, (F, N) for one time step and (F, T*N) for all, so that gates are contiguous in memory.
All time steps' inputs are multiplied by the weights in a single product, and so are the weights' gradients; each time
step only needs one product and a few elementwise operators.

Shapes: B samples or N columns, T time steps, I inputs, H hidden features, G gates.
"""

# ruff: noqa: PLR0913, PLR0917 - PyTorch's signatures

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.layers.random_layers import drop_elements
from subfleet.export.layers.recurrent_cells import CELLS, RecurrentCell
from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError

__all__ = ["RECURRENT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Layers of one kind, as PyTorch's functions take them."""

    cell: RecurrentCell
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def _refuse_unusual(context: LayerContext, inputs: Any, parameters: Any, stack: _Stack) -> None:
    if not isinstance(inputs, Tensor) or inputs.dim() != 3 or not isinstance(parameters, Sequence):
        raise ExportError(
            f"layer {context.layer!r} is a recurrent layer over packed sequences or without a batch, which cannot be "
            "exported; give it padded sequences of one length"
        )
    directions = 2 if stack.bidirectional else 1
    if len(parameters) != stack.layers * directions * (4 if stack.has_biases else 2):
        raise ExportError(
            f"layer {context.layer!r} has projections of its hidden state (proj_size), which cannot be exported; "
            "leave proj_size at 0"
        )


def _run(
    context: LayerContext, inputs: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], stack: _Stack
) -> tuple[Tensor, list[list[Tensor]]]:
    """Run all layers; return the last layer's output, and each state's last value in every layer and direction."""
    samples, steps = inputs.shape[:2] if stack.batch_first else inputs.shape[1::-1]
    # Two plain transpositions: runtimes are slow at reversing three dimensions at once, and the second often merges
    # into a product.
    in_time = inputs.transpose(0, 1) if stack.batch_first else inputs
    flow = in_time.reshape(steps * samples, inputs.shape[2]).t()
    step = 4 if stack.has_biases else 2
    directions = 2 if stack.bidirectional else 1
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(stack.layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = list(parameters[index * step : (index + 1) * step]) + [None] * (4 - step)
            first = [state[index].t() for state in states]
            results = _Unrolled.apply(stack.cell, bool(direction), steps, flow, *own, *first)  # type: ignore[no-untyped-call]
            outputs.append(results[0])
            for values, result in zip(last, results[1:], strict=True):
                values.append(result.t())
        flow = outputs[0] if directions == 1 else torch.cat(outputs)
        if stack.train and stack.dropout and layer < stack.layers - 1:
            flow = drop_elements(context, flow, stack.dropout, tuple(flow.shape))
    outputs_tnh = flow.t().reshape(steps, samples, -1)
    return outputs_tnh.transpose(0, 1) if stack.batch_first else outputs_tnh, last


class _Unrolled(torch.autograd.Function):
    """One layer in one direction: (cell, reverse, T, inputs_i_tn, W_ih, W_hh, b_ih, b_hh, *states_hn)."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        cell, reverse, steps, inputs, w_input, w_hidden, b_input, b_hidden, *states = arguments
        samples = inputs.shape[1] // steps
        projected = torch.mm(w_input, inputs)
        bias_input, bias_hidden = (None if bias is None else bias.reshape(-1, 1) for bias in (b_input, b_hidden))
        chunks = [torch.split(part, samples, 1) for part in cell.prepare(projected, bias_input, bias_hidden)]
        saved_steps: list[Any] = [None] * steps
        state = tuple(states)
        for time in _order(steps, reverse):
            state, saved_steps[time] = cell.forward(tuple(part[time] for part in chunks), w_hidden, state)
        # Time steps come first: a runtime joins and splits them there as blocks of memory.
        saved = [torch.cat(list(parts)).reshape(steps, -1, samples) for parts in zip(*saved_steps, strict=True)]
        hidden = _features_first(saved[0])
        ctx.save_for_backward(inputs, w_input, w_hidden, *states, *saved)
        ctx.plan = (cell, reverse, steps, samples, b_input is not None)
        ctx.set_materialize_grads(False)
        return hidden, *state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cell, reverse, steps, samples, has_bias = ctx.plan
        inputs, w_input, w_hidden, *rest = ctx.saved_tensors
        states, saved = rest[: cell.states], rest[cell.states :]
        before = [_previous_states(part, first, reverse=reverse) for part, first in zip(saved, states, strict=False)]
        factors = [_steps_of(part) for part in cell.factors(saved, before)]
        outer = None if gradients[0] is None else torch.split(gradients[0], samples, 1)
        d_states = tuple(gradients[1:])
        transposed = w_hidden.t().contiguous()
        collected: list[Any] = [None] * steps
        for time in reversed(_order(steps, reverse)):
            d_hidden = _sum(None if outer is None else outer[time], d_states[0])
            if d_hidden is None:
                d_hidden = torch.zeros_like(states[0])
            d_states, collected[time] = cell.backward(
                d_hidden, d_states[1:], tuple(part[time] for part in factors), transposed
            )
        together = [torch.cat(list(parts)).reshape(steps, -1, samples) for parts in zip(*collected, strict=True)]
        d_gates = _features_first(together[0])
        d_projected = cell.projected_gradient(d_gates, together, saved)
        d_inputs = torch.mm(w_input.t(), d_projected) if ctx.needs_input_grad[3] else None
        d_w_input = torch.mm(d_projected, inputs.t())
        d_w_hidden = torch.mm(d_gates, _features_first(before[0]).t())
        d_biases = (d_projected.sum(1), d_gates.sum(1)) if has_bias else (None, None)
        return None, None, None, d_inputs, d_w_input, d_w_hidden, *d_biases, *d_states


def _order(steps: int, reverse: bool) -> list[int]:
    return list(range(steps))[::-1] if reverse else list(range(steps))


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _features_first(values_tfn: Tensor) -> Tensor:
    """Convert (T, F, N) to (F, T*N)."""
    return values_tfn.transpose(0, 1).reshape(values_tfn.shape[1], -1)


def _steps_of(values_tfn: Tensor) -> tuple[Tensor, ...]:
    """Convert (T, F, N) to T times (F, N)."""
    steps, features, samples = values_tfn.shape
    return torch.split(values_tfn.reshape(steps * features, samples), features)


def _previous_states(values_tfn: Tensor, first: Tensor, *, reverse: bool) -> Tensor:
    """Return the state before each time step."""
    others = values_tfn[1:] if reverse else values_tfn[:-1]
    start = first.unsqueeze(0)
    return torch.cat([others, start] if reverse else [start, others])


def _layers(cell: RecurrentCell) -> Replacement:
    """Return the replacement of PyTorch's function for a kind of layers; several states come as a list."""

    def run(
        context: LayerContext,
        inputs: Tensor,
        states: Any,
        parameters: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[Tensor, ...]:
        stack = _Stack(
            cell=cell,
            has_biases=has_biases,
            layers=num_layers,
            dropout=dropout,
            train=train,
            bidirectional=bidirectional,
            batch_first=batch_first,
        )
        _refuse_unusual(context, inputs, parameters, stack)
        outputs, last = _run(context, inputs, [states] if cell.states == 1 else states, parameters, stack)
        return outputs, *map(torch.stack, last)

    return run


RECURRENT: Mapping[Any, Replacement] = MappingProxyType(
    {
        torch.lstm: _layers(CELLS["lstm"]),
        torch.gru: _layers(CELLS["gru"]),
        torch.rnn_tanh: _layers(CELLS["tanh"]),
        torch.rnn_relu: _layers(CELLS["relu"]),
    }
)
