"""A traced program with the layer of each of its kernels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from subfleet.export.memory.blocks import BlockRequest, KernelCall
from subfleet.export.steps.step import Step
from subfleet.protocol.programs import Role

__all__ = ["TracedProgram", "layers_of"]

_NONE = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """The kernels of a program, in order.

    Attributes:
        calls: of the kernels.
        names: of the step's values among those of the calls.
        base_bytes: of the runtime, for any program.
        value_bytes: for each of the step's values.
        passing_factor: planned bytes divided by the most bytes of blocks in use.
        measure_arena: returns what the allocator takes instead.
        held_factors: by role, planned bytes divided by those of the step's values, if that is not 1.
        unrolls: whether a convolution is a product for each position of its kernel.
        narrow_bytes: the most that is held for the calls of a 3x3 convolution with fewer than `narrow_channels`.
        narrow_channels: see `narrow_bytes`.
    """

    calls: tuple[KernelCall, ...]
    names: Mapping[str, str]
    base_bytes: int
    value_bytes: int = 0
    passing_factor: float = 1.0
    measure_arena: Callable[[Iterable[BlockRequest]], int] | None = None
    held_factors: Mapping[Role, float] = field(default_factory=dict)
    unrolls: bool = False
    narrow_bytes: int = _NONE
    narrow_channels: int = 0


def layers_of(program: TracedProgram, step: Step, order: Sequence[str]) -> list[int]:
    """Return for each call the position of the tensor that identifies its layer; -1 for none.

    In the forward pass it is the last tensor that was read. In the backward pass it is the only tensor with a gradient
    that depends on the call, or else the first one that was read again.
    """
    positions, names = {name: position for position, name in enumerate(order)}, program.names
    read_values = (value for value in step.inputs if value.role in {"parameter", "frozen", "buffer"})
    held = {names[value.name]: positions[value.tensor] for value in read_values if value.tensor in positions}
    given = {names[value.name]: positions[value.tensor] for value in step.outputs if value.tensor in positions}
    follows = _outcomes(program.calls, given, names["loss"])
    layer_of, backward, layers = dict[str, int](), set[str](), list[int]()  # by computed value
    for call, (forward, first, last) in zip(program.calls, follows, strict=True):
        read = {held[name] for name in call.inputs if name in held}
        seen = [layer_of[name] for name in call.inputs if name in layer_of]
        if len(read) == 1 and all(name in held for name in call.inputs):
            layer = min(read)
            held.update(dict.fromkeys(call.outputs, layer))  # such as a transposed weight
        else:
            again = [layer_of[name] for name in call.inputs if name in backward and layer_of[name] >= 0]
            back = first if first == last else min([*read, *again], default=max(seen, default=-1))
            layer = max([-1, *read, *seen]) if forward else back
            layer_of.update(dict.fromkeys(call.outputs, layer))
            backward.update(() if forward else call.outputs)
        layers.append(layer)
    return layers


def _outcomes(calls: Sequence[KernelCall], given: Mapping[str, int], loss: str) -> list[tuple[bool, int, int]]:
    """Return whether the loss depends on each call, and the first and the last tensor with a new value that does."""
    follows = [
        (loss in call.outputs, min(own, default=_NONE), max(own, default=-1))
        for call in calls
        for own in [[given[name] for name in call.outputs if name in given]]
    ]
    makers = {name: at for at, call in enumerate(calls) for name in call.outputs}
    for at in reversed(range(len(calls))):
        forward, first, last = follows[at]
        for maker in {makers[name] for name in calls[at].inputs if name in makers}:
            also, lowest, highest = follows[maker]
            follows[maker] = also or forward, min(lowest, first), max(highest, last)
    return follows
