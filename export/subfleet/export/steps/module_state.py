"""What a module holds: buffers that a step carries and constants that it does not; and all of it left as it was."""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from subfleet.protocol.errors import ExportError

__all__ = ["FakeConstants", "buffers_of", "check_types", "constants_of", "unchanged", "within"]

_Result = TypeVar("_Result")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a step carries: all persistent floating ones."""
    return {name: buffer for name, buffer in _persistent(module).items() if buffer.is_floating_point()}


def constants_of(module: nn.Module, names: Container[str] | None = None) -> dict[str, Tensor]:
    """What a step holds inside, by name: all other buffers, and tensors that are plain attributes of a layer.

    Args:
        module: the network.
        names: of those that are wanted; None is all.
    """
    carried = buffers_of(module)
    constants = {name: buffer for name, buffer in module.named_buffers() if name not in carried}
    for path, layer in module.named_modules():
        found = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        constants.update({f"{path}.{name}" if path else name: value for name, value in found.items()})
    return {name: tensor for name, tensor in constants.items() if names is None or name in names}


def _persistent(module: nn.Module) -> dict[str, Tensor]:
    kept = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def check_types(module: nn.Module) -> None:
    """Make sure that a step can carry the module's state.

    Raises:
        ExportError: a parameter or a persistent floating buffer is not float32.
    """
    for name, tensor in (dict(module.named_parameters()) | buffers_of(module)).items():
        if tensor.dtype != torch.float32:
            raise ExportError(
                f"the module's tensor {name!r} is {tensor.dtype}, but a program holds torch.float32 alone; convert it, "
                "or register it as a buffer with persistent=False if it is a constant"
            )


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards every layer has the attributes, parameters and buffers that it had before."""
    before = [
        (layer, dict(vars(layer)), dict(layer._parameters), dict(layer._buffers))  # noqa: SLF001 - no other way to them
        for layer in module.modules()
    ]
    try:
        yield
    finally:
        for layer, attributes, parameters, buffers in before:
            vars(layer).clear()
            vars(layer).update(attributes)
            _refill(layer._parameters, parameters)  # noqa: SLF001
            _refill(layer._buffers, buffers)  # noqa: SLF001


def _refill(held: dict[str, _Result], before: Mapping[str, _Result]) -> None:
    held.clear()
    held.update(before)


class _Held(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, body: Callable[[], _Result]) -> _Result:
        return body()


def within(module: nn.Module, state: Mapping[str, Tensor], body: Callable[[], _Result]) -> _Result:
    """Do something while a module has these parameters and buffers in the place of its own.

    A backward pass that runs layers once more, as `torch.utils.checkpoint` does, must be part of it.
    """
    given = {f"module.{name}": tensor for name, tensor in state.items()}
    result: _Result = torch.func.functional_call(_Held(module), given, (body,))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConstants:
    """A module's constants as shapes alone, to see what a run does to them.

    Attributes:
        given: each as the module has it while it runs.
        versions: how often each was changed in place before.
    """

    given: Mapping[str, Tensor]
    versions: Mapping[str, int]

    @classmethod
    def put_into(cls, module: nn.Module, constants: Mapping[str, Tensor], mode: FakeTensorMode) -> "FakeConstants":
        """Give a module shapes in the place of its constants; `unchanged` takes them back."""
        given = {name: mode.from_tensor(tensor) for name, tensor in constants.items()}
        for name, tensor in given.items():
            layer, attribute = _place(module, name)
            (layer._buffers if attribute in layer._buffers else vars(layer))[attribute] = tensor  # noqa: SLF001
        return cls(given=given, versions={name: tensor._version for name, tensor in given.items()})  # noqa: SLF001

    def reassigned(self, module: nn.Module) -> frozenset[str]:
        """The constants that a run has replaced: harmless where nothing reads the old ones.

        Raises:
            ExportError: it has changed one in place.
        """
        for name, tensor in self.given.items():
            if tensor._version != self.versions[name]:  # noqa: SLF001
                raise ExportError(changed_constant(name))
        now = {name: getattr(*_place(module, name), None) for name in self.given}
        return frozenset(name for name, tensor in self.given.items() if now[name] is not tensor)


def changed_constant(name: str) -> str:
    """What to say of a tensor that changes from step to step and is not carried."""
    return (
        f"the network changes its tensor {name!r} while it runs, but a program carries from step to step what is a "
        f"persistent buffer of torch.float32 alone; register {name!r} as one, or leave it as it is in forward"
    )


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
