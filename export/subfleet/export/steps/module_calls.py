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

_Result = TypeVar("_Result")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a step carries: all persistent floating-point buffers."""
    return {name: buffer for name, buffer in _persistent_buffers(module).items() if buffer.is_floating_point()}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a step carries: parameters and buffers."""
    return {**dict(module.named_parameters()), **buffers_of(module)}


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a step contains, by name: other buffers, and tensors that are attributes of a layer."""
    carried = {id(buffer) for buffer in buffers_of(module).values()}
    constants = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in carried}
    for path, layer in module.named_modules():
        attributes = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        constants.update({f"{path}.{name}" if path else name: value for name, value in attributes.items()})
    return constants


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers; tied ones once, by their first saved name."""
    saved = module.state_dict().keys()
    buffers = list(module.named_buffers(remove_duplicate=False))
    named = {id(buffer): name for name, buffer in reversed(buffers) if name in saved}
    return {name: buffer for name, buffer in buffers if named.get(id(buffer)) == name}


def check_types(module: nn.Module) -> None:
    """Check that a step can carry the module's state.

    Raises:
        ExportError: a parameter or a persistent floating-point buffer is not float32.
    """
    for name, tensor in state_of(module).items():
        if tensor.dtype != torch.float32:
            raise ExportError(
                f"the module's tensor {name!r} is {tensor.dtype}, but a program only holds torch.float32; convert it, "
                "or register it as a buffer with persistent=False if it is a constant"
            )


@contextmanager
def _preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore at the end everything that the layers hold, also in their dicts, lists and objects."""
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
    """Call a function while a module has the given parameters and buffers.

    A backward pass that runs layers again, as `torch.utils.checkpoint` does, must happen inside.
    """
    prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
    result: _Result = torch.func.functional_call(_StateCall(module), prefixed, (body,))
    return result


def set_constants(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace a module's constants; `_preserve_state` restores them."""
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        layer = module.get_submodule(path)
        (layer._buffers if attribute in layer._buffers else vars(layer))[attribute] = tensor  # noqa: SLF001


def run_exits(module: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a module; return the logits of its exits, one or several."""
    logits = module(inputs)
    outputs = tuple(logits) if isinstance(logits, (tuple, list)) else (logits,)
    if not outputs or not all(isinstance(output, Tensor) for output in outputs):
        raise ExportError(
            f"the network returns {type(logits).__name__}, but must return a tensor of logits, or a tuple with one for "
            "each exit"
        )
    return outputs


def updated_buffers(module: nn.Module, context: LayerContext, before: Mapping[str, Tensor]) -> list[Tensor]:
    """Return a module's buffers after a run, in the order of those before.

    Raises:
        ExportError: one has another type or shape than before.
    """
    now = dict(module.named_buffers())
    return [_check_buffer(name, old, context.buffer(now.get(name, old))) for name, old in before.items()]


def _check_buffer(name: str, old: Tensor, new: Tensor) -> Tensor:
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ExportError(
            f"the network changes its buffer {name!r} from {old.dtype} {tuple(old.shape)} to {new.dtype} "
            f"{tuple(new.shape)}, but what a program carries from step to step keeps its type and shape; keep both"
        )
    return new.detach()


@contextmanager
def prepare_module(module: nn.Module, context: LayerContext, *, training: bool) -> Iterator[None]:
    """Let a module run with replaced layers, which the context knows; the module is restored afterwards.

    In training each layer keeps its own mode, so a layer set to `.eval()` is frozen; in inference all are in evaluation
    mode.
    """
    with ExitStack() as stack:
        stack.enter_context(_preserve_state(module))
        again = _LayerTracker(context)
        for name, layer in module.named_modules():
            stack.callback(layer.register_forward_pre_hook(partial(again.enter, name)).remove)
            stack.callback(layer.register_forward_hook(again.leave, always_call=True).remove)
            if isinstance(layer, _BatchNorm):
                _check_momentum(layer, name)
                layer.num_batches_tracked = None  # otherwise the layer works as before
        if not training:
            module.eval()
        stack.enter_context(LayerReplacing(LAYERS, context))
        yield


class _LayerTracker:
    """Tells the context which layer is running, and replaces layers that run again in the backward pass.

    PyTorch turns the replacements off for that pass of `torch.utils.checkpoint`.
    """

    def __init__(self, context: LayerContext) -> None:
        self._context = context
        self._layers = [context.layer]
        self._running: list[LayerReplacing | None] = []

    def enter(self, name: str, _layer: nn.Module, _inputs: Any) -> None:
        """Run before a layer's forward."""
        self._layers.append(name)
        self._context.layer = name
        if self._context.is_run_again:
            mode = None if self._running else LayerReplacing(LAYERS, self._context)
            self._running.append(mode)
            if mode is not None:
                mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, _layer: nn.Module, _inputs: Any, _outputs: Any) -> None:
        """Run after a layer's forward, also if it raised an error."""
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
