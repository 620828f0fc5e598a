"""One time step of each recurrent cell, and of its backward.

A backward step is linear in the incoming gradients. Their factors only depend on the forward, so they are computed for
all time steps at once.

Shapes: N columns (samples), H hidden features, G*H gates; of all time steps (T, .., N), or T*N columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["CELLS", "RecurrentCell"]

States = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentCell:
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


_TANH = RecurrentCell(
    states=1,
    prepare=_add_biases,
    forward=_plain_forward(torch.tanh),
    factors=lambda kept, _before: (1.0 - kept[0] * kept[0],),
    backward=_plain_backward,
    projected_gradient=_same_gradient,
)
CELLS: Mapping[str, RecurrentCell] = MappingProxyType(
    {
        "lstm": RecurrentCell(
            states=2,
            prepare=_add_biases,
            forward=_lstm_forward,
            factors=_lstm_factors,
            backward=_lstm_backward,
            projected_gradient=_same_gradient,
        ),
        "gru": RecurrentCell(
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
            factors=lambda kept, _before: (torch.sign(kept[0]),),
        ),
    }
)
