"""Finds the tensors of a chain's layers that can pass their input on."""

from collections.abc import Iterator, Sequence
from typing import Any

from subfleet.elastic.recording.functions import list_forms
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan

_CONVOLUTIONS, _NORMS = list_forms("conv2d"), {"torch.nn.functional.batch_norm": 3}
_RECTIFIED = list_forms("relu")
_PART_OF_CHAIN = _CONVOLUTIONS | _NORMS.keys() | _RECTIFIED | {"divide_by_kept"}
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


def _is_chain(calls: Sequence[Any], source: int, out: int) -> bool:
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


def _list_weights(call: Sequence[Any]) -> Iterator[str]:
    name, args, kwargs, _, _ = call
    if name in _CONVOLUTIONS or name in _NORMS:
        place = _NORMS.get(name, 1)
        weight = args[place] if place < len(args) else kwargs.get("weight")
        if isinstance(weight, dict) and "state" in weight:
            yield weight["state"]
