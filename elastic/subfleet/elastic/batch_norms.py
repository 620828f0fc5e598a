"""Batch norms that normalise by their batch in a module that is otherwise in evaluation."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SIGNATURE = inspect.signature(functional.batch_norm)


def _ignore(_layer: str, _inputs: Tensor) -> None:
    pass


class NormalisingByBatch(TorchFunctionMode):
    """Lets batch norms with running statistics normalise by their batch, as in training.

    Args:
        buffers: the module's buffers by name; norms without buffers among them stay as they are.
        see: called with the name of each norm's layer and its inputs (samples, channels, ...).
    """

    def __init__(self, buffers: Mapping[str, Tensor], see: Callable[[str, Tensor], None] = _ignore) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in buffers.items()}
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func is not functional.batch_norm:
            return func(*args, **kwargs)
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        name = self._names.get(id(given["running_mean"]))
        if name is None:
            return func(*args, **kwargs)
        self._see(name.rpartition(".")[0], given["input"])
        return func(**{**given, "training": True})
