"""A simulated second device: its tensors report another device, but are computed on the CPU.

An operation on tensors of both devices raises an error, as with an accelerator; so does access to the memory of a
tensor on the simulated device. Scalars and indices may be on the CPU, as in PyTorch.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ELSEWHERE", "elsewhere"]

ELSEWHERE = torch.device("lazy")
"""A device type that PyTorch knows by name, but that no build supports."""
aten = torch.ops.aten
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class _RemoteTensor(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_RemoteTensor":
        tensor: _RemoteTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=ELSEWHERE,
            requires_grad=inner.requires_grad,
        )
        tensor.held = inner
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "_RemoteTensor":
        return _RemoteTensor(inner["held"])

    @classmethod
    def __torch_function__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return call(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its declaration lacks the call
        cls, call: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(call, args, kwargs or {})


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(call, args, kwargs or {})


class _LiteralsMode(TorchFunctionMode):
    """Tensors made from Python numbers, which PyTorch creates on their device without the dispatch mode above."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if call is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return call(*args, **kwargs).to(device)
        return call(*args, **kwargs)


def _compute(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = _list_tensors([*args, *kwargs.values()])
    remote = [tensor for tensor in tensors if isinstance(tensor, _RemoteTensor)]
    device = kwargs.get("device")
    to_remote = None if device is None else torch.device(device) == ELSEWHERE
    if call in (aten._to_copy.default, aten.copy_.default):
        pass  # these copy between the devices
    elif remote and call not in _INDEXING:
        odd = [tensor for tensor in tensors if not isinstance(tensor, _RemoteTensor) and tensor.dim()]
        if odd:
            raise RuntimeError(
                f"{call} is called with tensors of both places, such as {tuple(odd[0].shape)} on the CPU"
            )
    elif call in _INDEXING and remote and not isinstance(args[0], _RemoteTensor):
        raise RuntimeError(f"{call} is called on the CPU with indices or values that are elsewhere")
    if to_remote:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    is_remote = bool(remote) if to_remote is None else to_remote
    if call is aten.copy_.default:
        args[0].held.copy_(_unwrap(args[1])) if isinstance(args[0], _RemoteTensor) else args[0].copy_(_unwrap(args[1]))
        return args[0]
    if remote:
        result = call(*_unwrap(args), **{key: _unwrap(value) for key, value in kwargs.items()})
    else:
        result = call(*args, **kwargs)
    if call.__name__.split(".")[0].endswith("_") and isinstance(args[0], _RemoteTensor):
        return args[0]
    if "out" in kwargs and isinstance(kwargs["out"], _RemoteTensor):
        return kwargs["out"]
    return _wrap(result) if is_remote else result


def _list_tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operation's arguments and in its lists; PyTorch's own trees are much slower."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _list_tensors(value)
    return tensors


def _unwrap(value: Any) -> Any:
    if isinstance(value, _RemoteTensor):
        return value.held
    return type(value)(map(_unwrap, value)) if isinstance(value, list | tuple) else value


def _wrap(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _RemoteTensor(value)
    return type(value)(map(_wrap, value)) if isinstance(value, list | tuple) else value


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Within the context, tensors can be created on the simulated device and moved to it."""
    with _DispatchMode(), _LiteralsMode():  # type: ignore[no-untyped-call]
        yield ELSEWHERE
