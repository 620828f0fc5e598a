"""What a module holds: buffers that a step carries and constants that it does not; and all of it left as it was."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from subfleet.export.steps.holders import StateSnapshot
from subfleet.protocol.errors import ExportError

__all__ = [
    "buffers_of",
    "call_with_state",
    "check_types",
    "constants_of",
    "preserve_state",
    "set_constants",
    "state_of",
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
