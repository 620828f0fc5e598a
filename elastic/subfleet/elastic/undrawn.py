"""Builds modules without drawing their weights."""

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWING = frozenset({nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_})


class Undrawn(TorchFunctionMode):
    """Skips the functions that fill a layer's tensors with random numbers.

    On PyTorch's meta device they would load its compiler, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func in _DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
