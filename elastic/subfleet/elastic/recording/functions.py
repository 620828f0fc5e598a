"""The functions of PyTorch that a recorded network may call."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import (
    get_overridable_functions,
    handle_torch_function,
    has_torch_function_unary,
    resolve_name,
)

_FACTORIES = (
    "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "meshgrid", "ones", "ones_like", "rand",
    "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_PRIVATE = ("_weight_norm",)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "unflatten")


def divide_by_kept(x: Tensor, kept: int, whole: int) -> Tensor:
    """Divide by the fraction of its channels that a submodel keeps (Diao et al. 2021, section 3.2).

    Args:
        x: any shape.
        kept: number of its channels.
        whole: number of its channels in the whole network.
    """
    if has_torch_function_unary(x):
        divided: Tensor = handle_torch_function(divide_by_kept, (x,), x, kept, whole)
        return divided
    return x if kept == whole else x / (kept / whole)


@cache
def list_functions() -> Mapping[str, Callable[..., Any]]:
    """The functions that a record may call: those of torch, torch.nn.functional and Tensor, and `divide_by_kept`.

    None of them reads or writes files, loads code, or leaves the process.
    """
    functions = {
        name_function(function): function
        for own in get_overridable_functions().values()
        for function in own
        if resolve_name(function) is not None
    }
    functions |= {
        f"torch.nn.functional.{name}": function
        for name, function in vars(functional).items()
        if isinstance(function, FunctionType) and function.__module__ == functional.__name__ and name[0] != "_"
    }
    factories = {f"torch.{name}": getattr(torch, name) for name in (*_FACTORIES, *_PRIVATE)}
    methods = {f"torch.Tensor.{name}": getattr(Tensor, name) for name in _METHODS}
    in_place = {
        f"{name}_": getattr(torch, f"{name.removeprefix('torch.')}_")
        for name in functions
        if hasattr(torch, f"{name.removeprefix('torch.')}_")
    }
    own = {"divide_by_kept": divide_by_kept}
    return MappingProxyType({**functions, **factories, **methods, **in_place, **own})


def name_function(function: Any) -> str:
    """The name of a function in `list_functions`, or one for messages if it has none there."""
    own = getattr(function, "__name__", repr(function))
    if getattr(torch, own, None) is function:
        return f"torch.{own}"
    return resolve_name(function) or own


def list_forms(*names: str) -> frozenset[str]:
    """The names of functions with those of their methods and of their forms that change their input."""
    prefixes = ("torch", "torch.Tensor", "torch.nn.functional")
    return frozenset(f"{prefix}.{name}{suffix}" for prefix in prefixes for name in names for suffix in ("", "_"))


SUMS = list_forms("add") | {f"torch.Tensor.{name}" for name in ("__add__", "__iadd__", "__radd__")}
"""Functions that add two tensors."""

NORMS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "torch.nn.functional.batch_norm": (3, 4),
        "torch.nn.functional.layer_norm": (2, 3),
        "torch.nn.functional.group_norm": (2, 3),
    }
)
"""Places of weight and bias among the arguments of norms."""


def get_argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    """An argument of a call by its position or its name."""
    return args[position] if position < len(args) else kwargs.get(name, default)
