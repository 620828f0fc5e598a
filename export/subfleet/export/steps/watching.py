"""Sees what a run of a network does to what it holds, so that a step does not lose it without a word."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from subfleet.export.known_values import LOOKS, KnownValues
from subfleet.protocol.errors import ExportError

__all__ = ["TensorTies", "WriteWatcher", "describe_change"]


class WriteWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
    """While it is entered, sees which constants are changed in place, under whatever name and through whatever view.

    Args:
        constants: by name.
        carried: what may be changed, also where a constant lies in its memory: that one may not be read.
        mode: in which they are run.
    """

    def __init__(self, constants: Mapping[str, Tensor], carried: Iterable[Tensor], mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}
        self._kept: list[_Memory] = []
        for name, tensor in constants.items():
            self._kept.append(_Memory(name, tensor))
            if tensor.is_leaf and not isinstance(tensor, FakeTensor):
                self._kept.append(_Memory(name, mode.from_tensor(tensor)))  # the one that stands for it in every run
        for memory in reversed(self._kept):
            self._names[memory.address] = memory.name
        for tensor in carried:
            self._names.pop(_address(tensor), None)
        self._written: list[str] = []
        self._known = KnownValues()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and each call would be wrapped

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operator."""
        given = dict(kwargs or {})
        if func in LOOKS and (number := self._known.read(args[0])) is not None:
            return number
        if func._schema.is_mutable and not _is_about_memory(func):  # noqa: SLF001 - no other way to it
            for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
                value = args[index] if index < len(args) else given.get(argument.name)
                if argument.is_write:
                    self._record(value if isinstance(value, (list, tuple)) else (value,))
        result = func(*args, **given)
        self._known.record(func, args, given, result)
        return result

    def _record(self, values: Any) -> None:
        names = [self._names.get(_address(value)) for value in values if isinstance(value, Tensor)]
        self._written.extend(name for name in names if name is not None)

    def check(self) -> None:
        """Make sure that no constant was changed.

        Raises:
            ExportError: one was.
        """
        replaced = [memory.name for memory in self._kept if memory.is_replaced]
        for name in (*self._written, *replaced):
            raise ExportError(describe_change(name, torch.zeros(())))


def _is_about_memory(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags or func is torch.ops.aten.detach_.default


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the only name that a storage without memory has
    return address


class _Memory:
    """The memory that a tensor has before a run."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor, self._storage = tensor, tensor.untyped_storage()
        self.address = _address(tensor)

    @property
    def is_replaced(self) -> bool:
        """Whether the tensor has another one now."""
        return _address(self._tensor) != self.address


class TensorTies:
    """The names under which a network holds what is carried.

    Args:
        module: before the run.
        state: what it holds, by one name of each.
        given: by these names, what it will run on.
    """

    def __init__(self, module: nn.Module, state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        first = {id(tensor): name for name, tensor in state.items()}
        self._first = {name: first[id(tensor)] for name, tensor in _named_tensors(module) if id(tensor) in first}
        self._parameters = {name: given[name] for name, tensor in state.items() if isinstance(tensor, nn.Parameter)}
        self._memory = [_Memory(name, tensor) for name, tensor in given.items()]

    def check(self, module: nn.Module) -> None:
        """Make sure that a run has left in place what a step looks for there.

        Args:
            module: after the run, within `within`.

        Raises:
            ExportError: `forward` has replaced a parameter or the data of a tensor, deleted a buffer, or untied two.
        """
        now = dict(_named_tensors(module))
        for name, first in self._first.items():
            if name not in now:
                raise ExportError(
                    f"the network takes its {name!r} away while it runs, but a program carries it from step to step; "
                    f"put the new value in its place, as in {name.rpartition('.')[2]} = ..., without del"
                )
            if now[name] is not self._parameters.get(first, now[name]):
                raise ExportError(
                    f"the network replaces its parameter {name!r} while it runs, but a program changes parameters as "
                    f"the optimiser does; register {name!r} as a buffer of torch.float32, which forward may replace"
                )
            if now[name] is not now[first]:
                raise ExportError(
                    f"the network replaces its buffer {name!r} while it runs, which was {first!r} too, but a program "
                    "carries such a tensor as one; change it in place, as .copy_() does, or register two tensors"
                )
        for memory in self._memory:
            if memory.is_replaced:
                raise ExportError(
                    f"the network sets .data of its {memory.name!r} while it runs, which no program sees; change it in "
                    "place under torch.no_grad(), as .copy_() does"
                )


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def describe_change(name: str, old: Any) -> str:
    """What to say of something that changes from step to step and is not carried.

    Args:
        name: of it.
        old: what it was before.
    """
    what, compute = "state", ", and compute with it as a tensor"
    if isinstance(old, Tensor):
        what, compute = "tensor", ", and keep layers in nn.ModuleList or nn.ModuleDict" if "[" in name else ""
    elif isinstance(old, (int, float)):
        what = "number"
        compute = ", such as torch.zeros(()), compute with it as a tensor, and use torch.where in the place of if"
    elif old is None:
        compute = " from the start, with a tensor of its shape in the place of None"
    return (
        f"the network changes its {what} {name!r} in forward, but from step to step a program keeps only parameters "
        f"and persistent buffers of torch.float32; make it a buffer with self.register_buffer{compute}, or do not "
        "change it in forward"
    )
