"""Norms: the dimensions of their gains, biases and statistics."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from subfleet.elastic.recording.dimensions import GROUP, Leaf, make_dim, tie
from subfleet.elastic.recording.following import Operation, Rule
from subfleet.protocol.errors import ConfigError


def _tie_all(operation: Operation, tensors: Sequence[Any], dims: Sequence[Sequence[Leaf]]) -> None:
    """Tie the dimensions of a norm's tensors to those of its input that they run over."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            for own, dim in zip(operation.follower.dims_of(tensor), dims, strict=True):
                tie(own, dim)


def _normalise_batch(operation: Operation) -> None:
    dims, source = operation.dims(0), operation.args[0]
    _tie_all(operation, operation.args[1:5], [dims[1]])
    operation.follower.mixed += (dims[0], *dims[2:])  # weights may be normalised, too
    operation.assign(dims)
    for tensor in operation.outputs[1:]:
        sizes = [dims[1] if size == source.shape[1] else make_dim(size) for size in tensor.shape]
        operation.assign(sizes, tensor)


def _normalise_layer(operation: Operation) -> None:
    dims, count = operation.dims(0), len(operation.args[1])
    _tie_all(operation, operation.args[2:4], dims[-count:])
    operation.follower.averaged += dims[-count:]
    operation.assign(dims)
    for tensor in operation.outputs[1:]:
        operation.assign(
            [dim if place < len(dims) - count else () for place, dim in enumerate(dims[: tensor.dim()])], tensor
        )


def _normalise_groups(operation: Operation) -> None:
    dims, groups, channels = operation.dims(0), operation.args[6], operation.args[0].shape[1]
    if channels == groups and math.prod(operation.args[0].shape[2:]) == 1:
        raise ConfigError(
            f"layer {operation.follower.layer!r} normalises {groups} groups of a single number each, which makes all "
            "of them 0; give the network a larger input, or its norms larger groups"
        )
    group, inside = Leaf(groups), Leaf(channels // groups, reason="a norm's group is kept together")
    inside.kind = GROUP
    tie(dims[1], (group, inside))
    _tie_all(operation, operation.args[1:3], [dims[1]])
    operation.follower.mixed += dims[2:]
    if groups == 1:
        operation.follower.mixed.append(dims[1])
    operation.assign(dims)
    for tensor in operation.outputs[1:]:
        operation.assign([dims[0], make_dim(groups)], tensor)


def _normalise_weight(operation: Operation) -> None:
    direction, length = operation.dims(0), operation.dims(1)
    for own, other, size in zip(direction, length, operation.args[1].shape, strict=True):
        if size == 1:
            operation.follower.mixed.append(own)
        else:
            tie(own, other)
    operation.assign(direction)
    if weight := operation.follower.find_weight(operation.args[0]):
        operation.follower.name_weight(operation.result, weight)
    for tensor in operation.outputs[1:]:
        operation.assign(length, tensor)


_BATCH = (
    "_batch_norm_no_update", "_batch_norm_with_update", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm",
    "native_batch_norm",
)  # fmt: skip

NORMS: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_BATCH, _normalise_batch),
        **dict.fromkeys(("native_layer_norm", "rms_norm", "_fused_rms_norm"), _normalise_layer),
        **dict.fromkeys(("native_group_norm", "group_norm"), _normalise_groups),
        "_weight_norm_interface": _normalise_weight,
    }
)
