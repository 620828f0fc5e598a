"""Calls a module with a step's state and replaced layers, and leaves it unchanged."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subfleet.export.layers import LAYERS, LayerContext, LayerReplacing
from subfleet.export.steps.state_snapshot import StateSnapshot
from subfleet.protocol.errors import ExportError

__all__ = [
    "buffers_of",
    "call_with_state",
    "check_types",
    "constants_of",
    "prepare_module",
    "preserve_state",
    "run_exits",
    "set_constants",
    "state_of",
    "updated_buffers",
]

_Result = TypeVar("_Result")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a step carries: all persistent floating ones."""
    return {name: buffer for name, buffer in _persistent_buffers(module).items() if buffer.is_floating_point()}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """What a step carries: parameters, and buffers."""
    return {**dict(module.named_parameters()), **buffers_of(module)}


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """What a step holds inside, by name: all other buffers, and tensors that are plain attributes of a layer."""
    carried = {id(buffer) for buffer in buffers_of(module).values()}
    constants = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in carried}
    for path, layer in module.named_modules():
        attributes = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        constants.update({f"{path}.{name}" if path else name: value for name, value in attributes.items()})
    return constants


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Tied ones once, by the first name that is kept."""
    saved = module.state_dict().keys()
    buffers = list(module.named_buffers(remove_duplicate=False))
    named = {id(buffer): name for name, buffer in reversed(buffers) if name in saved}
    return {name: buffer for name, buffer in buffers if named.get(id(buffer)) == name}


def check_types(module: nn.Module) -> None:
    """Make sure that a step can carry the module's state.

    Raises:
        ExportError: a parameter or a persistent floating buffer is not float32.
    """
    for name, tensor in state_of(module).items():
        if tensor.dtype != torch.float32:
            raise ExportError(
                f"the module's tensor {name!r} is {tensor.dtype}, but a program holds torch.float32 alone; convert it, "
                "or register it as a buffer with persistent=False if it is a constant"
            )


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Afterwards every layer holds what it held before, also in its dicts, lists and objects."""
    before = StateSnapshot(module)
    try:
        yield
    finally:
        before.restore()


class _StateCall(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, body: Callable[[], _Result]) -> _Result:
        return body()


def call_with_state(module: nn.Module, state: Mapping[str, Tensor], body: Callable[[], _Result]) -> _Result:
    """Do something while a module has these parameters and buffers in the place of its own.

    A backward pass that runs layers once more, as `torch.utils.checkpoint` does, must be part of it.
    """
    given = {f"module.{name}": tensor for name, tensor in state.items()}
    result: _Result = torch.func.functional_call(_StateCall(module), given, (body,))
    return result


def set_constants(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module tensors in the place of its constants; `preserve_state` takes them back."""
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        layer = module.get_submodule(path)
        (layer._buffers if attribute in layer._buffers else vars(layer))[attribute] = tensor  # noqa: SLF001


def run_exits(module: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a module; its logits, of one exit or several."""
    logits = module(inputs)
    outputs = tuple(logits) if isinstance(logits, (tuple, list)) else (logits,)
    if not outputs or not all(isinstance(output, Tensor) for output in outputs):
        raise ExportError(
            f"the network gives {type(logits).__name__}, but must give a tensor of logits, or a tuple of them, one for "
            "each exit"
        )
    return outputs


def updated_buffers(module: nn.Module, context: LayerContext, before: Mapping[str, Tensor]) -> list[Tensor]:
    """What a module that has run leaves in its buffers, in the order of those before.

    Raises:
        ExportError: one is of another type or shape than it was.
    """
    now = dict(module.named_buffers())
    return [_check_buffer(name, old, context.buffer(now.get(name, old))) for name, old in before.items()]


def _check_buffer(name: str, old: Tensor, new: Tensor) -> Tensor:
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ExportError(
            f"the network makes its buffer {name!r} of {old.dtype} and the shape {tuple(old.shape)} one of {new.dtype} "
            f"and {tuple(new.shape)}, but what is carried from step to step stays alike; keep its type and shape"
        )
    return new.detach()


@contextmanager
def prepare_module(module: nn.Module, context: LayerContext, *, training: bool) -> Iterator[None]:
    """While it is entered, a module runs with replaced layers, and the context knows which; then it is as it was.

    In training each layer keeps its own mode, so that one set to `.eval()` is frozen; in inference all have that mode.
    """
    with ExitStack() as stack:
        stack.enter_context(preserve_state(module))
        again = _LayerTracker(context)
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


class _LayerTracker:
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
