"""Copies of a module as its author wrote it, with given tensors and in a given precision."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from subfleet.export.steps.parameter_hooks import copy_hooks
from subfleet.protocol.errors import ExportError

__all__ = ["as_exits", "compute_in", "copy_module", "tensor_of"]


def copy_module(module: nn.Module, tensors: Mapping[str, Tensor], precision: torch.dtype) -> nn.Module:
    """Copy a module with the given tensors; each layer keeps its mode.

    Args:
        module: it is not changed.
        tensors: values of its parameters and buffers, by name; tied ones need one name.
        precision: of everything else in single precision: buffers, attributes, tensors in lists.

    Raises:
        ExportError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in tensors.items():
        old, new = tensor_of(module, name), tensor.detach().clone()
        memo[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    try:
        with _TensorCopying(precision):
            copied = copy.deepcopy(module, memo)
            for old in module.parameters():  # PyTorch copies no hook of a parameter
                if old.requires_grad:
                    copy_hooks(memo[id(old)], old, memo)
            return copied
    except Exception as error:
        raise ExportError(
            "the network cannot be copied, so its program cannot be verified: "
            f"{type(error).__name__}: {error!s:.200}; remove attributes that Python cannot copy, such as locks"
        ) from error


def tensor_of(module: nn.Module, name: str) -> Any:
    """Return a module's parameter, buffer or attribute by name."""
    tensor: Any = reduce(getattr, name.split("."), module)
    return tensor


def as_exits(outputs: Any) -> tuple[Tensor, ...]:
    """Return the logits of each exit, one or several."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


@contextmanager
def compute_in(precision: torch.dtype) -> Iterator[None]:
    """Let a module compute in this precision, also where its code asks for single precision.

    Raises:
        ExportError: it cannot, for example because TorchScript compiled its code for single precision.
    """
    with ExitStack() as stack:
        if precision == torch.float64:
            stack.enter_context(_DoublePrecision())
        try:
            yield
        except (RuntimeError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"the network cannot be run in {precision} as it is, so no program of it can be verified: "
                f"{type(error).__name__}: {reason}; keep its numbers in PyTorch's tensors and functions, and "
                "take their type from its inputs"
            ) from error


class _TensorCopying(TorchFunctionMode):
    """Copies any tensor of a module, also results of operations, which PyTorch refuses to copy."""

    def __init__(self, precision: torch.dtype) -> None:
        super().__init__()
        self._precision = precision

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy a tensor; everything else is left to PyTorch."""
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        new = tensor.detach().clone()
        memo[id(tensor)] = new.to(self._precision) if new.dtype == torch.float32 else new
        return memo[id(tensor)]


class _DoublePrecision(TorchFunctionMode):
    """Turns every single precision that a module's code names, keeps or gets from PyTorch into double precision."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        if func is Tensor.float:
            func = Tensor.double
        if func is functional.rms_norm:
            func = _rms_norm
        args, kwargs = pytree.tree_map(_to_double, (args, dict(kwargs or {})))
        return pytree.tree_map(_to_double, func(*args, **kwargs))


def _rms_norm(
    inputs: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Without an epsilon, PyTorch chooses another one in each precision; the network's is that of single precision."""
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    return functional.rms_norm(inputs, list(normalized_shape), weight, epsilon)


def _to_double(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
