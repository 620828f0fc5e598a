"""Finds the tensors that make a recorded block pass its input on: when they are 0, or when they are set to."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from subfleet.elastic.recording.functions import NORMS, SUMS, get_argument, list_forms
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan

_Call = Sequence[Any]


def find_silencing(record: NetworkRecord) -> frozenset[str]:
    """The tensors of all blocks that can pass their input on: 0 in each layer that adds something to it.

    Such a layer is a convolution, a linear layer or a norm, followed by nothing that makes something else of 0. After a
    sum, a ReLU changes nothing where the previous block's output had one.
    """
    tensors: set[str] = set()
    for name, (start, stop, source, out) in record.training.blocks.items():
        closing = _find_closing(record.training.calls[start:stop], source, out)
        if closing and all(tensor.startswith(f"{name}.") for tensor in closing):
            tensors |= closing
    return frozenset(tensors)


_PRODUCTS = list_forms("mul", "multiply") | {f"torch.Tensor.{name}" for name in ("__mul__", "__imul__", "__rmul__")}
_KEPT = list_forms("relu", "relu6")
"""Functions that change nothing where they were applied before."""
_RETURNED = list_forms("contiguous", "dropout", "dropout1d", "dropout2d", "dropout3d", "float", "to")
"""Functions that may return their input itself."""
_ZERO_AT_ZERO = _KEPT | _RETURNED | list_forms(
    "__getitem__", "adaptive_avg_pool2d", "avg_pool2d", "clone", "div", "expand", "flatten", "gelu", "hardswish",
    "leaky_relu", "mean", "movedim", "pad", "permute", "reshape", "reshape_as", "roll", "silu", "squeeze", "tanh",
    "transpose", "unflatten", "unsqueeze", "view",
) | {"torch.Tensor.__truediv__", "divide_by_kept"}  # fmt: skip
_LAYERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **dict.fromkeys(list_forms("linear", "conv1d", "conv2d", "conv3d"), (1, 2)),
        **NORMS,
    }
)
"""Places of weight and bias among the arguments."""


def _find_closing(calls: Sequence[_Call], source: int, out: int) -> set[str]:
    """The tensors that make each sum along a block add 0; empty if there are none."""
    current, tensors = source, set[str]()
    for position, (name, args, kwargs, result, _) in enumerate(calls):
        given = list(_list_values(args))
        if current not in given or (name in _RETURNED and result == current and not _is_in_place(args, kwargs)):
            continue
        if name in SUMS and len(given) == 2:
            other = given[1] if given[0] == current else given[0]
            closing = _close(calls[:position], other)
            if not closing:
                return set()
            current, tensors = result, tensors | closing
        elif name in _KEPT and tensors:
            current = result
        elif result == current:  # changed in place
            return set()
    return tensors if current == out else set()


def _close(calls: Sequence[_Call], value: int) -> set[str]:
    """The tensors that make a result 0; empty if none are known to."""
    for position in reversed(range(len(calls))):
        name, args, kwargs, result, _ = calls[position]
        if result == value:
            return _close_call(calls[:position], name, args, kwargs)
        if isinstance(result, list) and value in result:
            return set()
    return set()


def _close_call(before: Sequence[_Call], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
    if name in _LAYERS:
        weight, bias = _find_tensors(name, args, kwargs)
        tensors = [tensor for tensor in (weight, bias) if tensor is not None]
        named = {tensor["state"] for tensor in tensors if "state" in tensor}
        return named if weight is not None and len(named) == len(tensors) else set()
    if name in _PRODUCTS:
        factors = [factor["state"] for factor in args if isinstance(factor, dict) and "state" in factor]
        computed = next(filter(None, (_close(before, value) for value in _list_values(args))), set())
        return computed or set(factors[:1])
    if name in SUMS:
        parts = [_close_operand(before, item) for item in args]
        return set().union(*parts) if len(parts) == 2 and all(parts) else set()
    if name in _ZERO_AT_ZERO and args and "value" in (args[0] if isinstance(args[0], dict) else {}):
        return _close(before, args[0]["value"])
    return set()


def _find_tensors(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The weight and the bias among the arguments of a layer's call."""
    weight, bias = _LAYERS[name]
    return get_argument(args, kwargs, weight, "weight"), get_argument(args, kwargs, bias, "bias")


def _close_operand(before: Sequence[_Call], item: Any) -> set[str]:
    match item:
        case {"value": value}:
            return _close(before, value)
        case {"state": name}:
            return {name}
        case _:
            return set()


def _is_in_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a dropout changes its input: its last argument says so."""
    return bool(kwargs.get("inplace", args[3] if len(args) > 3 else False))


def _list_values(args: Sequence[Any]) -> Iterator[int]:
    return (item["value"] for item in args if isinstance(item, dict) and "value" in item)


_WEIGHTED = list_forms("conv2d") | {"torch.nn.functional.batch_norm"}
_RECTIFIED = list_forms("relu")
_PART_OF_CHAIN = _WEIGHTED | _RECTIFIED | {"divide_by_kept"}
_KEEPING_SIGN = list_forms("max_pool2d", "max_pool2d_with_indices", "avg_pool2d")


def find_passing(record: NetworkRecord) -> Iterator[str]:
    """Yield the weights of the blocks of a chain that pass their input on, if they are set to.

    A block is a convolution that keeps its input's shape, or several, each perhaps with a batch norm, and a ReLU; its
    input comes from a ReLU, so that it is never below 0.
    """
    for block in record.blocks:
        start, stop, source, out = record.training.blocks[block.name]
        calls = record.training.calls[start:stop]
        if not block.kept and _is_chain(calls, source, out) and _is_rectified(record.training, source):
            yield from (name for call in calls for name in _list_weights(call))


def _is_chain(calls: Sequence[_Call], source: int, out: int) -> bool:
    for name, args, _, result, _ in calls:
        if not args or args[0] != {"value": source} or name not in _PART_OF_CHAIN:
            return False
        source = result
    return bool(calls) and source == out and calls[-1][0] in _RECTIFIED


def _is_rectified(plan: RecordedPlan, value: int) -> bool:
    """Whether a result is never below 0."""
    for name, args, _, result, _ in reversed(plan.calls):
        if result == value or (isinstance(result, list) and value in result):
            if name in _KEEPING_SIGN:
                value = args[0]["value"]
                continue
            return name in _RECTIFIED
    return False


def _list_weights(call: _Call) -> Iterator[str]:
    name, args, kwargs, *_ = call
    if name in _WEIGHTED:
        weight, _ = _find_tensors(name, args, kwargs)
        if isinstance(weight, dict) and "state" in weight:
            yield weight["state"]
