"""A second device without a second device: tensors that say that they are elsewhere, and are computed with on the CPU.

An operation with tensors of both places is refused, as an accelerator refuses it; so is whatever looks into the memory
of one that is elsewhere. Numbers without dimensions, and indices, may be on the CPU, as PyTorch has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["ELSEWHERE", "elsewhere"]

ELSEWHERE = torch.device("lazy")
"""A kind of device that PyTorch knows by name, and that is nowhere built in."""
aten = torch.ops.aten
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class _There(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_There":
        made: _There = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=ELSEWHERE,
            requires_grad=inner.requires_grad,
        )
        made.held = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "_There":
        return _There(inner["held"])

    @classmethod
    def __torch_function__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return call(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # whose declaration lacks the call
        cls, call: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(call, args, kwargs or {})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(call, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """Tensors out of Python's numbers, which PyTorch makes on their device behind the back of the mode above."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if call is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return call(*args, **kwargs).to(device)
        return call(*args, **kwargs)


def _computed(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = [one for one in given if isinstance(one, _There)]
    device = kwargs.get("device")
    moved = None if device is None else torch.device(device) == ELSEWHERE
    if call in (aten._to_copy.default, aten.copy_.default):
        pass  # these go from one place to the other
    elif there and call not in _INDEXING:
        odd = [one for one in given if not isinstance(one, _There) and one.dim()]
        if odd:
            raise RuntimeError(
                f"{call} is called with tensors of both places, such as {tuple(odd[0].shape)} on the CPU"
            )
    elif call in _INDEXING and there and not isinstance(args[0], _There):
        raise RuntimeError(f"{call} is called on the CPU with indices or values that are elsewhere")
    if moved:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    answer_there = bool(there) if moved is None else moved
    if call is aten.copy_.default:
        args[0].held.copy_(_inside(args[1])) if isinstance(args[0], _There) else args[0].copy_(_inside(args[1]))
        return args[0]
    found = call(*tree_map_only(_There, _inside, args), **tree_map_only(_There, _inside, kwargs))
    if call.__name__.split(".")[0].endswith("_") and isinstance(args[0], _There):
        return args[0]
    if "out" in kwargs and isinstance(kwargs["out"], _There):
        return kwargs["out"]
    return tree_map_only(Tensor, _There, found) if answer_there else found


def _inside(one: Tensor) -> Tensor:
    return one.held if isinstance(one, _There) else one


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Within it tensors can be made and moved there."""
    with _Mode(), _Literals():  # type: ignore[no-untyped-call]
        yield ELSEWHERE
