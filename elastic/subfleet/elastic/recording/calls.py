"""Writes down the calls of PyTorch's public functions that a module makes, with the layers that make them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from subfleet.elastic.recording.attention import attend
from subfleet.elastic.recording.dimensions import keep_whole
from subfleet.elastic.recording.following import DimensionFollower, Product, list_tensors
from subfleet.elastic.recording.functions import divide_by_kept, name_function


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A call of a function of PyTorch.

    Attributes:
        name: the function's public name, such as "torch.nn.functional.linear".
        args: positional arguments.
        kwargs: named arguments.
        out: its result.
        layer: path of the layer that calls it.
        products: the matrix products and convolutions that it computes.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    layer: str
    products: tuple[Product, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSpan:
    """The calls of a layer's forward pass.

    Attributes:
        layer: path of the layer.
        start: number of calls before it.
        stop: number of calls at its end.
        inputs: tensors among its positional arguments.
        out: its result.
    """

    layer: str
    start: int
    stop: int
    inputs: tuple[Tensor, ...]
    out: Any


@dataclass(eq=False)
class CallLog:
    """The calls of a run so far.

    Attributes:
        follower: is told which layer is running.
        calls: in order.
        spans: of layers, in the order of their ends.
    """

    follower: DimensionFollower
    calls: list[Call] = field(default_factory=list)
    spans: list[LayerSpan] = field(default_factory=list)
    _running: list[tuple[str, int, tuple[Tensor, ...]]] = field(default_factory=list)

    def add(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, products: Sequence[Product]
    ) -> None:
        """Add a call that has tensors among its results, or changes one."""
        name = name_function(function)
        if list_tensors(out) or name.endswith("__setitem__"):
            # Lists and dictionaries of the user's code may change later.
            args, kwargs = pytree.tree_map(lambda item: item, (tuple(args), dict(kwargs)))
            self.calls.append(
                Call(name=name, args=args, kwargs=kwargs, out=out, layer=self.follower.layer, products=tuple(products))
            )

    def watch(self, module: nn.Module) -> Callable[[], None]:
        """Note when layers run; call the result to stop."""
        handles = []
        for path, layer in module.named_modules():
            handles.append(layer.register_forward_pre_hook(self._enter(path)))
            handles.append(layer.register_forward_hook(self._leave))

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop

    def _enter(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_layer: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append((path, len(self.calls), tuple(list_tensors(args))))
            self.follower.layer = path

        return hook

    def _leave(self, _layer: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        path, start, inputs = self._running.pop()
        self.follower.layer = self._running[-1][0] if self._running else ""
        self.spans.append(LayerSpan(layer=path, start=start, stop=len(self.calls), inputs=inputs, out=out))


class LoggingMode(TorchFunctionMode):
    """Adds the outermost calls of PyTorch's functions to a log."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        follower = self._log.follower
        if func is functional.multi_head_attention_forward:
            with self:  # its own parts can be cut, while PyTorch's function requires that heads make up the width
                return attend(*args, **kwargs)
        if func is functional.one_hot and (*args[1:], *kwargs.values(), -1)[0] >= 0:
            with self:  # PyTorch's function reads the largest index
                compared = _compare(*args, **kwargs)
            keep_whole(follower.dims_of(compared)[-1], "indices are compared with its own")
            return compared
        before = len(follower.products)
        if func is functional.batch_norm and not follower.is_computed(args[0]):
            func, args, kwargs = _normalise_weight(args, kwargs)
        out = func(*args, **kwargs)
        if func is divide_by_kept and out is args[0]:
            out = out.clone()  # in a submodel, it is another tensor
        if func is functional.scaled_dot_product_attention:
            follower.mark_attention(args[0], args[2] if len(args) > 2 else kwargs["value"])
        self._log.add(func, args, kwargs, out, follower.products[before:])
        return out


def _compare(indices: Tensor, num_classes: int) -> Tensor:
    """What `torch.nn.functional.one_hot` returns."""
    return torch.eq(indices.unsqueeze(-1), torch.arange(num_classes, device=indices.device)).long()


def _normalise_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that replaces a `torch.nn.functional.batch_norm` of a weight: a norm of each channel.

    The exporter leaves padding out of a batch norm over samples, but a weight has no samples.
    """
    given = inspect.signature(functional.batch_norm).bind(*args, **kwargs).arguments
    weight = given["input"]
    if given.get("running_mean") is not None or not given.get("training") or len(weight) != 1:
        return functional.batch_norm, args, kwargs
    kept: dict[str, Any] = {key: given[key] for key in ("weight", "bias", "eps") if key in given}
    return functional.instance_norm, (weight,), kept
