"""LSTM, GRU and plain recurrent layers, unrolled, with their own backwards.

All tensors have features first, (F, N) for one time step and (F, T*N) for all, so that gates are contiguous in memory.
All time steps' inputs are multiplied by the weights in a single product, and so are the weights' gradients; each time
step only needs one product and a few elementwise operators. A backward step is linear in the incoming gradients; their
factors only depend on the forward, so they are computed for all time steps at once.

Shapes: B samples or N columns, T time steps, I inputs, H hidden features, G gates.
"""

# ruff: noqa: PLR0913, PLR0917 - PyTorch's signatures

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subfleet.export.layers.random_layers import drop_elements
from subfleet.export.layers.replacing import LayerContext, Replacement
from subfleet.protocol.errors import ExportError

States = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecurrentCell:
    """A kind of recurrent layer.

    Attributes:
        states: number of tensors that a time step passes to the next; the first is the output.
        prepare: (projected inputs, input bias or None, hidden bias or None) to what a time step takes; all (.., T*N).
        forward: (its part of the prepared tensors, recurrent weights, states) to the states, and to the tensors saved
            for the backward, which start with the states.
        factors: (saved tensors, states before each time step), (T, .., N), to the factors of the backward.
        backward: (gradient of the output, of the other states, its part of the factors, transposed recurrent weights)
            to the gradients of the previous states, and to what `projected_gradient` needs: first the gradient of the
            recurrent product.
        projected_gradient: (gradient of the recurrent product (.., T*N), what the backward collected, saved tensors (T,
            .., N)) to the gradient of the projected inputs, (.., T*N).
    """

    states: int
    prepare: Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]]
    forward: Callable[[tuple[Tensor, ...], Tensor, States], tuple[States, tuple[Tensor, ...]]]
    factors: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
    backward: Callable[[Tensor, Gradients, tuple[Tensor, ...], Tensor], tuple[Gradients, tuple[Tensor, ...]]]
    projected_gradient: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]


def _add_biases(projected: Tensor, bias_input: Tensor | None, bias_hidden: Tensor | None) -> tuple[Tensor, ...]:
    if bias_input is None or bias_hidden is None:
        return (projected,)
    return (projected + (bias_input + bias_hidden),)


def _same_gradient(d_gates: Tensor, _collected: Sequence[Tensor], _saved: Sequence[Tensor]) -> Tensor:
    return d_gates


def _lstm_forward(prepared: tuple[Tensor, ...], weight: Tensor, states: States) -> tuple[States, tuple[Tensor, ...]]:
    """Gates in PyTorch's order: input, forget, cell, output."""
    hidden, cell = states
    size = hidden.shape[0]
    gates = torch.addmm(prepared[0], weight, hidden)
    both, new, out = torch.split(gates, [2 * size, size, size])
    both, new, out = torch.sigmoid(both), torch.tanh(new), torch.sigmoid(out)
    into, forget = torch.split(both, size)
    cell = forget * cell + into * new
    bounded = torch.tanh(cell)
    hidden = out * bounded
    return (hidden, cell), (hidden, cell, both, new, out, bounded)


def _lstm_factors(saved: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, _, both, new, out, bounded = saved
    into, forget = torch.split(both, new.shape[1], 1)
    of_cell = [new * into * (1.0 - into), before[1] * forget * (1.0 - forget), into * (1.0 - new * new)]
    of_output = bounded * out * (1.0 - out)
    return torch.cat([*of_cell, of_output], 1), out * (1.0 - bounded * bounded), forget


def _lstm_backward(
    d_hidden: Tensor, d_others: Gradients, factors: tuple[Tensor, ...], transposed: Tensor
) -> tuple[Gradients, tuple[Tensor, ...]]:
    of_gates, of_hidden, forget = factors
    d_cell = d_hidden * of_hidden
    if d_others[0] is not None:
        d_cell = d_cell + d_others[0]
    d_gates = torch.cat([d_cell, d_cell, d_cell, d_hidden]) * of_gates
    return (torch.mm(transposed, d_gates), d_cell * forget), (d_gates,)


def _gru_prepare(projected: Tensor, bias_input: Tensor | None, bias_hidden: Tensor | None) -> tuple[Tensor, ...]:
    """Return the start of the recurrent product, and the input's part of the new gate, added after the reset."""
    size = projected.shape[0] // 3
    if bias_input is not None:
        projected = projected + bias_input
    gated, new = torch.split(projected, [2 * size, size])
    if bias_hidden is None:
        return torch.cat([gated, new * 0.0]), new
    of_gates, of_new = torch.split(bias_hidden, [2 * size, size])
    return torch.cat([gated + of_gates, of_new.expand(size, projected.shape[1])]), new


def _gru_forward(prepared: tuple[Tensor, ...], weight: Tensor, states: States) -> tuple[States, tuple[Tensor, ...]]:
    """Gates in PyTorch's order: reset, update, new."""
    (hidden,) = states
    size = hidden.shape[0]
    both, recurrent = torch.split(torch.addmm(prepared[0], weight, hidden), [2 * size, size])
    both = torch.sigmoid(both)
    reset, update = torch.split(both, size)
    new = torch.tanh(prepared[1] + reset * recurrent)
    hidden = new + update * (hidden - new)
    return (hidden,), (hidden, both, new, recurrent)


def _gru_factors(saved: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, both, new, recurrent = saved
    reset, update = torch.split(both, new.shape[1], 1)
    of_new = (1.0 - update) * (1.0 - new * new)
    of_reset = of_new * recurrent * (reset * (1.0 - reset))
    of_update = (before[0] - new) * (update * (1.0 - update))
    return torch.cat([of_reset, of_update, of_new * reset], 1), update


def _gru_backward(
    d_hidden: Tensor, _others: Gradients, factors: tuple[Tensor, ...], transposed: Tensor
) -> tuple[Gradients, tuple[Tensor, ...]]:
    of_gates, update = factors
    d_gates = torch.cat([d_hidden] * 3) * of_gates
    return (torch.addmm(d_hidden * update, transposed, d_gates),), (d_gates, d_hidden)


def _gru_projected_gradient(d_gates: Tensor, collected: Sequence[Tensor], saved: Sequence[Tensor]) -> Tensor:
    """The new gate's input did not pass the reset."""
    _, both, new, _ = saved
    size = new.shape[1]
    update = torch.split(both, size, 1)[1]
    d_new = collected[1] * ((1.0 - update) * (1.0 - new * new))
    return torch.cat([d_gates[: 2 * size], d_new.transpose(0, 1).reshape(size, -1)])


def _plain_forward(activation: Callable[[Tensor], Tensor]) -> Any:
    def forward(prepared: tuple[Tensor, ...], weight: Tensor, states: States) -> tuple[States, tuple[Tensor, ...]]:
        hidden = activation(torch.addmm(prepared[0], weight, states[0]))
        return (hidden,), (hidden,)

    return forward


def _plain_backward(
    d_hidden: Tensor, _others: Gradients, factors: tuple[Tensor, ...], transposed: Tensor
) -> tuple[Gradients, tuple[Tensor, ...]]:
    d_gates = d_hidden * factors[0]
    return (torch.mm(transposed, d_gates),), (d_gates,)


_TANH = _RecurrentCell(
    states=1,
    prepare=_add_biases,
    forward=_plain_forward(torch.tanh),
    factors=lambda saved, _before: (1.0 - saved[0] * saved[0],),
    backward=_plain_backward,
    projected_gradient=_same_gradient,
)
_CELLS: Mapping[str, _RecurrentCell] = MappingProxyType(
    {
        "lstm": _RecurrentCell(
            states=2,
            prepare=_add_biases,
            forward=_lstm_forward,
            factors=_lstm_factors,
            backward=_lstm_backward,
            projected_gradient=_same_gradient,
        ),
        "gru": _RecurrentCell(
            states=1,
            prepare=_gru_prepare,
            forward=_gru_forward,
            factors=_gru_factors,
            backward=_gru_backward,
            projected_gradient=_gru_projected_gradient,
        ),
        "tanh": _TANH,
        "relu": replace(
            _TANH,
            forward=_plain_forward(torch.relu),
            factors=lambda saved, _before: (torch.sign(saved[0]),),
        ),
    }
)


def _check_call(context: LayerContext, inputs: Any, parameters: Any, parameter_count: int) -> None:
    if not isinstance(inputs, Tensor) or inputs.dim() != 3 or not isinstance(parameters, Sequence):
        raise ExportError(
            f"layer {context.layer!r} is a recurrent layer over packed sequences or without a batch, which cannot be "
            "exported; give it padded sequences of one length"
        )
    if len(parameters) != parameter_count:
        raise ExportError(
            f"layer {context.layer!r} has projections of its hidden state (proj_size), which cannot be exported; "
            "leave proj_size at 0"
        )


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


def _layers(cell: _RecurrentCell) -> Replacement:
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
        directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
        _check_call(context, inputs, parameters, num_layers * directions * each)
        samples, steps = inputs.shape[:2] if batch_first else inputs.shape[1::-1]
        # Two plain transpositions: runtimes are slow at reversing three dimensions at once, and the second often merges
        # into a product.
        in_time = inputs.transpose(0, 1) if batch_first else inputs
        flow = in_time.reshape(steps * samples, inputs.shape[2]).t()
        before: Sequence[Tensor] = [states] if cell.states == 1 else states
        last: list[list[Tensor]] = [[] for _ in before]
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                own = list(parameters[index * each : (index + 1) * each]) + [None] * (4 - each)
                first = [state[index].t() for state in before]
                results = _Unrolled.apply(cell, bool(direction), steps, flow, *own, *first)  # type: ignore[no-untyped-call]
                outputs.append(results[0])
                for values, result in zip(last, results[1:], strict=True):
                    values.append(result.t())
            flow = outputs[0] if directions == 1 else torch.cat(outputs)
            if train and dropout and layer < num_layers - 1:
                flow = drop_elements(context, flow, dropout, tuple(flow.shape))
        outputs_tnh = flow.t().reshape(steps, samples, -1)
        return outputs_tnh.transpose(0, 1) if batch_first else outputs_tnh, *map(torch.stack, last)

    return run


RECURRENT: Mapping[Any, Replacement] = MappingProxyType(
    {
        torch.lstm: _layers(_CELLS["lstm"]),
        torch.gru: _layers(_CELLS["gru"]),
        torch.rnn_tanh: _layers(_CELLS["tanh"]),
        torch.rnn_relu: _layers(_CELLS["relu"]),
    }
)
