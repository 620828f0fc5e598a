"""Compares two records of a module, made with batches of different sizes: numbers that scale with it become sizes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from subfleet.elastic.recording.expressions import BATCH
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan, RecordedTensor
from subfleet.protocol.errors import ConfigError

_REFERENCES = frozenset({"value", "state", "constant"})
Batches = tuple[int, int]


def merge_records(first: NetworkRecord, second: NetworkRecord, batches: Batches) -> NetworkRecord:
    """A record that holds for batches of any size.

    Args:
        first: a record.
        second: of the same module.
        batches: the number of samples of each.

    Raises:
        ConfigError: the module computes differently for different batches.
    """
    training, evaluation = (
        _merge_plans(getattr(first, mode), getattr(second, mode), batches, mode) for mode in ("training", "evaluation")
    )
    alike = len(first.products) == len(second.products)
    if not alike or (first.axes, first.sums, *map(_forget_positions, first.tensors)) != (
        (second.axes, second.sums, *map(_forget_positions, second.tensors))
    ):
        raise ConfigError(
            "the dimensions of the network's tensors depend on the inputs or the batch size; a network must compute "
            "the same for every batch"
        )
    return replace(
        first,
        tensors=tuple(
            replace(tensor, positions=_count_alone(tensor.positions, other.positions, batches))
            for tensor, other in zip(first.tensors, second.tensors, strict=True)
        ),
        products=tuple(
            replace(
                product,
                result=_list_alone(product.result, other.result, batches),
                summed=_list_alone(product.summed, other.summed, batches),
            )
            for product, other in zip(first.products, second.products, strict=True)
        ),
        training=training,
        evaluation=evaluation,
    )


def _forget_positions(tensor: RecordedTensor) -> RecordedTensor:
    return replace(tensor, positions=1)


def _count_alone(first: int, second: int, batches: Batches) -> int:
    """The value for a single sample of a number that grows linearly with the batch."""
    growth = (second - first) // (batches[1] - batches[0])
    return first - growth * (batches[0] - 1)


def _list_alone(first: Sequence[Any], second: Sequence[Any], batches: Batches) -> tuple[Any, ...]:
    """Sizes of a product for a single sample."""
    return tuple(
        mine if mine == other or not isinstance(mine, int) else _count_alone(mine, other, batches)
        for mine, other in zip(first, second, strict=True)
    )


def _merge_plans(first: RecordedPlan, second: RecordedPlan, batches: Batches, mode: str) -> RecordedPlan:
    merged = []
    for call, other in zip_longest(first.calls, second.calls):
        try:
            merged.append(_merge(call, other, batches))
        except ValueError as error:
            layer = (call or other)[-1]
            raise ConfigError(
                f"layer {layer!r} computes differently for different inputs or batch sizes in {mode}; a network must "
                "call the same functions for every batch: replace branches on data, and do not store what depends on a "
                "batch"
            ) from error
    if first.constants != second.constants:
        raise ConfigError(
            f"the network uses a tensor in {mode} that is neither a parameter nor a buffer of it, and has other values "
            "for other inputs; compute it with functions of torch, or register it with register_buffer"
        )
    return replace(first, calls=merged)


def _merge(first: Any, second: Any, batches: Batches) -> Any:
    """Merge encoded values; see `subfleet.elastic.recording.encoding`.

    Raises:
        ValueError: they differ.
    """
    if first == second and type(first) is type(second):
        return first
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        ((kind, size),) = first.items()
        if kind in ("size", "whole"):
            return {kind: _merge_sizes(size, second[kind], batches)}
        if not _REFERENCES.isdisjoint(first):
            raise ValueError
        return {key: _merge(first[key], second[key], batches) for key in first}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_merge(mine, other, batches) for mine, other in zip(first, second, strict=True)]
    return {"size": _merge_sizes(first, second, batches)}


def _merge_sizes(first: Any, second: Any, batches: Batches) -> Any:
    """Merge sizes of `subfleet.elastic.recording.sizes`; numbers that are the same multiple of the batch follow it."""
    if first == second:
        return first
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_merge_sizes(mine, other, batches) for mine, other in zip(first, second, strict=True)]
    if type(first) is int and type(second) is int:
        count, rest = divmod(first, batches[0])
        if not rest and count * batches[1] == second:
            return BATCH if count == 1 else ["*", count, BATCH]
    raise ValueError
