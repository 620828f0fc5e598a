"""A module run as part of a step: with replaced layers, and a first run that finds out its shapes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from subfleet.export.failures import as_export_errors
from subfleet.export.layers import LAYERS, LayerContext, LayerReplacing
from subfleet.export.steps.module_state import FakeConstants, buffers_of, check_types, constants_of, unchanged, within
from subfleet.export.steps.values import DTYPES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo

__all__ = ["FirstRun", "exits_of", "first_run", "prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What a run of a module with its shapes alone has shown.

    Attributes:
        output_shapes: of each of its logits, one or more.
        random_shapes: of the randomness that its layers take, in order.
        reassigned: names of its constants that it has replaced.
    """

    output_shapes: tuple[tuple[int, ...], ...]
    random_shapes: tuple[tuple[int, ...], ...]
    reassigned: frozenset[str]


def exits_of(module: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a module; its logits, of one exit or several."""
    logits = module(inputs)
    outputs = tuple(logits) if isinstance(logits, (tuple, list)) else (logits,)
    if not outputs or not all(isinstance(output, Tensor) for output in outputs):
        raise ExportError(
            f"the network gives {type(logits).__name__}, but must give a tensor of logits, or a tuple of them, one for "
            "each exit"
        )
    return outputs


@contextmanager
def prepared(module: nn.Module, context: LayerContext, *, training: bool) -> Iterator[None]:
    """While it is entered, a module runs with replaced layers, and the context knows which; then it is as it was.

    In training each layer keeps its own mode, so that one set to `.eval()` is frozen; in inference all have that mode.
    """
    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        again = _RunAgain(context)
        for name, layer in module.named_modules():
            stack.callback(layer.register_forward_pre_hook(partial(again.enter, name)).remove)
            stack.callback(layer.register_forward_hook(again.leave, always_call=True).remove)
            if isinstance(layer, _BatchNorm):
                _check_momentum(layer, name)
                layer.num_batches_tracked = None  # the layer does all else as before
        if not training:
            module.eval()
        stack.enter_context(LayerReplacing(LAYERS, context))
        yield


class _RunAgain:
    """Tells the context which layer runs, and replaces layers that `torch.utils.checkpoint` runs in the backward pass.

    PyTorch switches the replacing off for that pass.
    """

    def __init__(self, context: LayerContext) -> None:
        self._context = context
        self._layers = [context.layer]
        self._running: list[LayerReplacing | None] = []

    def enter(self, name: str, _layer: nn.Module, _inputs: Any) -> None:
        """Before a layer's forward."""
        self._layers.append(name)
        self._context.layer = name
        if self._context.is_run_again:
            mode = None if self._running else LayerReplacing(LAYERS, self._context)
            self._running.append(mode)
            if mode is not None:
                mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, _layer: nn.Module, _inputs: Any, _outputs: Any) -> None:
        """After it, also where it raised an error."""
        self._layers.pop()
        self._context.layer = self._layers[-1]
        mode = self._running.pop() if self._running else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _check_momentum(layer: _BatchNorm, name: str) -> None:
    if layer.momentum is None and layer.track_running_stats:
        raise ExportError(
            f"layer {name!r} has momentum=None, an average over all batches ever seen, which no round's first step "
            "knows; give it a number such as 0.1, or track_running_stats=False"
        )


def first_run(module: nn.Module, sample: ValueInfo, *, training: bool, in_parts: bool = False) -> FirstRun:
    """Run a module with shapes alone.

    Args:
        module: as in `training_step`.
        sample: the step's input.
        training: whether it is to be trained.
        in_parts: whether its batch is to be one of several micro-batches.

    Raises:
        ExportError: its state is of an unsupported type, it refuses the input, it changes a constant, or its shapes
            depend on values.
    """
    check_types(module)
    state = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *buffers_of(module).items())}
    context = LayerContext(torch.zeros(sample.shape[:1]) if training else None, in_parts=in_parts)
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    what = f"the network cannot be traced on an input of the shape {sample.shape}"
    remedy = "use layers that take this shape, and whose shapes do not depend on values"
    with as_export_errors(what, remedy), prepared(module, context, training=training), torch.no_grad():
        constants = {name: tensor.detach() for name, tensor in constants_of(module).items()}
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            values = {name: fake.from_tensor(tensor) for name, tensor in state.items()}
            held = FakeConstants.put_into(module, constants, fake)
            inputs = torch.zeros(sample.shape, dtype=dtypes[sample.dtype])
            outputs = within(module, values, lambda: exits_of(module, inputs))
            reassigned = held.reassigned(module)
    return FirstRun(output_shapes=_shapes(outputs), random_shapes=context.random_shapes, reassigned=reassigned)


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors)
