"""Operators that read some indices of a dimension."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from subfleet.elastic.recording.dimensions import keep_whole, make_whole_dim
from subfleet.elastic.recording.following import Operation, Rule

_INDEXED = "single indices of it are read"


def _select(operation: Operation) -> None:
    place, dims = operation.args[1] % operation.args[0].dim(), list(operation.dims(0))
    keep_whole(dims.pop(place), _INDEXED)
    operation.assign(dims)


def _unbind(operation: Operation) -> None:
    place, dims = operation.get(1, "dim", 0) % operation.args[0].dim(), list(operation.dims(0))
    keep_whole(dims.pop(place), "its indices are read one by one")
    for tensor in operation.outputs:
        operation.assign(dims, tensor)


def _embed(operation: Operation) -> None:
    symbols, width = operation.dims(0)
    keep_whole(symbols, "its rows belong to symbols")
    operation.assign([*operation.dims(1), width])


def _index(operation: Operation) -> None:
    source, given = operation.args[:2]
    dims = operation.dims(0)
    places = [place for place, index in enumerate(given) if index is not None]
    for place in places:
        keep_whole(dims[place], _INDEXED)
    shape = torch.broadcast_shapes(*(given[place].shape for place in places))  # type: ignore[no-untyped-call]
    indexed = [make_whole_dim(size, _INDEXED) for size in shape]
    if places[-1] - places[0] + 1 == len(places):
        operation.assign([*dims[: places[0]], *indexed, *dims[places[-1] + 1 :]])
    else:
        operation.assign([*indexed, *(dims[place] for place in range(source.dim()) if place not in places)])


def _gather(operation: Operation) -> None:
    result = operation.result
    place, dims = operation.args[1] % operation.args[0].dim(), list(operation.dims(0))
    keep_whole(dims[place], _INDEXED)
    dims[place] = make_whole_dim(result.shape[place], _INDEXED)
    if result.dim() == len(dims) and list(result.shape) == [*operation.args[0].shape[:place], result.shape[place],
                                                              *operation.args[0].shape[place + 1 :]]:  # fmt: skip
        operation.assign(dims)
    else:
        operation.keep_all_whole(_INDEXED)


INDEXING: Mapping[str, Rule] = MappingProxyType(
    {
        "select": _select,
        "unbind": _unbind,
        "embedding": _embed,
        "index": _index,
        "_unsafe_index": _index,
        "index_select": _gather,
        "gather": _gather,
    }
)
