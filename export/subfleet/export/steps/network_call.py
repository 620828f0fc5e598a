"""A module run as part of a step: with given tensors, replaced layers, and a first run that finds out its shapes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from subfleet.export.layers import LAYERS, LayerContext, LayerReplacing
from subfleet.export.steps.values import DTYPES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo

__all__ = ["FirstRun", "buffers_of", "call", "first_run", "prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What a run of a module with its shapes alone has shown.

    Attributes:
        output_shapes: of each of its logits, one or more.
        random_shapes: of the randomness that its layers take, in order.
    """

    output_shapes: tuple[tuple[int, ...], ...]
    random_shapes: tuple[tuple[int, ...], ...]


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a step carries: all persistent ones but BatchNorm's count of batches, which nothing reads."""
    kept = module.state_dict().keys()
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in kept and name.rpartition(".")[2] != "num_batches_tracked"
    }


def call(module: nn.Module, state: Mapping[str, Tensor], inputs: Tensor, context: LayerContext) -> tuple[Tensor, ...]:
    """Run a module on given parameters and buffers; its logits, of one exit or several."""
    with LayerReplacing(LAYERS, context):
        logits = torch.func.functional_call(module, dict(state), (inputs,))
    outputs = tuple(logits) if isinstance(logits, (tuple, list)) else (logits,)
    if not outputs or not all(isinstance(output, Tensor) for output in outputs):
        raise ExportError(
            f"the network gives {type(logits).__name__}, but must give a tensor of logits, or a tuple of them, one for "
            "each exit"
        )
    return outputs


@contextmanager
def prepared(module: nn.Module, context: LayerContext, *, training: bool) -> Iterator[None]:
    """While it is entered, a module can be run without changing it, and the context knows which layer runs.

    In training each layer keeps its own mode, so that one set to `.eval()` is frozen; in inference all have that mode.
    """
    modes = {layer: layer.training for layer in module.modules()}
    with ExitStack() as stack:
        for name, layer in module.named_modules():
            stack.callback(layer.register_forward_pre_hook(_enter(context, name)).remove)
            if isinstance(layer, _BatchNorm):
                _check_momentum(layer, name)
                # The layer counts its batches in place; without a counter it does all else as before.
                stack.callback(setattr, layer, "num_batches_tracked", layer.num_batches_tracked)
                layer.num_batches_tracked = None
        stack.callback(_set_modes, modes)
        if not training:
            module.eval()
        yield


def _enter(context: LayerContext, name: str) -> Callable[[nn.Module, Any], None]:
    def hook(_layer: nn.Module, _inputs: Any) -> None:
        context.layer = name

    return hook


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for layer, mode in modes.items():
        layer.training = mode


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
        ExportError: its state is of an unsupported type, it refuses the input, or its shapes depend on values.
    """
    state = dict(module.named_parameters()) | buffers_of(module)
    for name, tensor in state.items():
        if tensor.dtype != torch.float32:
            raise ExportError(
                f"the module's tensor {name!r} is {tensor.dtype}, but a program holds torch.float32 alone; convert it, "
                "or register it as a buffer with persistent=False if it is a constant"
            )
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            values = {name: fake.from_tensor(tensor.detach()) for name, tensor in state.items()}
            context = LayerContext(torch.zeros(sample.shape[:1]) if training else None, in_parts=in_parts)
            with prepared(module, context, training=training):
                outputs = call(module, values, torch.zeros(sample.shape, dtype=dtypes[sample.dtype]), context)
    except ExportError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"the network cannot be traced on an input of the shape {sample.shape}: {type(error).__name__}: {reason}; "
            "use layers that take this shape, and whose shapes do not depend on values"
        ) from error
    return FirstRun(output_shapes=_shapes(outputs), random_shapes=context.random_shapes)


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors)
