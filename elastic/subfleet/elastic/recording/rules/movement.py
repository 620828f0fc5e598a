"""Operators that move elements: views, permutations, concatenations and parts."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from subfleet.elastic.recording.dimensions import (
    Dim,
    join,
    keep_whole,
    make_dim,
    make_whole_dim,
    may_be_cut,
    measure,
    resolve,
    split,
    take_part,
    tie,
)
from subfleet.elastic.recording.following import Operation, Rule


def _keep_name(operation: Operation) -> None:
    """A view of a module's tensor has its name."""
    if weight := operation.follower.find_weight(operation.args[0]):
        operation.follower.name_weight(operation.result, weight)


def _permute(operation: Operation) -> None:
    rank, given = operation.args[0].dim(), operation.args[1:]
    order = list(range(rank))
    if given and isinstance(given[0], Sequence):
        order = [place % rank for place in given[0]]
    elif given:
        first, second = (place % rank for place in given[:2])
        order[first], order[second] = second, first
    elif operation.name == "t":
        order.reverse()
    dims = operation.dims(0)
    operation.assign([dims[place] for place in order])
    _keep_name(operation)


def _view(operation: Operation) -> None:
    source, result = operation.args[0], operation.result
    remaining = [leaf for dim in operation.dims(0) for leaf in resolve(dim)]
    dims: list[Dim] = []
    for size in reversed(result.shape):
        dim = _take_last(remaining, size)
        if dim is None:
            for own in operation.follower.dims_of(source):
                keep_whole(own, "a view cuts across it")
            operation.assign([make_whole_dim(own, "a view cuts across it") for own in result.shape])
            return
        dims.insert(0, dim)
    operation.assign(dims)
    _keep_name(operation)


def _take_last(remaining: list[Any], size: int) -> Dim | None:
    """Take the last leaves that make up a size, and split one if needed; None if that is impossible."""
    dim: list[Any] = []
    while (taken := measure(dim)) != size:
        if not remaining:
            return None
        last = remaining[-1]
        if size % (taken * last.size) == 0:
            remaining.pop()
            if last.size > 1 or last.is_batch:
                dim.insert(0, last)
            continue
        needed = size // taken
        if size % taken or last.size % needed:
            return None
        split(last, last.size // needed)
        remaining[-1:] = resolve((last,))
    return tuple(dim)


def _unsqueeze(operation: Operation) -> None:
    dims = list(operation.dims(0))
    dims.insert(operation.args[1] % operation.result.dim(), ())
    operation.assign(dims)
    _keep_name(operation)


def _squeeze(operation: Operation) -> None:
    source = operation.args[0]
    given = operation.get(1, "dim")
    places = range(source.dim()) if given is None else [given] if isinstance(given, int) else given
    gone = {place % source.dim() for place in places if source.shape[place] == 1}
    operation.assign([dim for place, dim in enumerate(operation.dims(0)) if place not in gone])
    _keep_name(operation)


def _expand(operation: Operation) -> None:
    source, result = operation.args[0], operation.result
    added, dims = result.dim() - source.dim(), operation.dims(0)
    operation.assign(
        [
            dims[place - added] if place >= added and source.shape[place - added] == size else make_dim(size)
            for place, size in enumerate(result.shape)
        ]
    )


def _repeat(operation: Operation) -> None:
    source, result = operation.args[0], operation.result
    added, dims = result.dim() - source.dim(), operation.dims(0)
    repeated: list[Dim] = []
    for place, size in enumerate(result.shape):
        own = source.shape[place - added] if place >= added else 1
        if own == 1:
            repeated.append(make_dim(size))
        else:
            repeated.append((*make_whole_dim(size // own, "a number of copies"), *dims[place - added]))
    operation.assign(repeated)


def _concatenate(operation: Operation) -> None:
    tensors = [tensor for tensor in operation.args[0] if tensor.numel()]
    result = operation.result
    place = operation.get(1, "dim", 0) % result.dim()
    every = [operation.follower.dims_of(tensor) for tensor in tensors]
    for dims in every[1:]:
        for other, (first, own) in enumerate(zip(every[0], dims, strict=True)):
            if other != place:
                tie(first, own)
    joined = list(every[0])
    joined[place] = join([own[place] for own in every])
    operation.assign(joined)


def _stack(operation: Operation) -> None:
    result, every = operation.result, [operation.follower.dims_of(tensor) for tensor in operation.args[0]]
    for dims in every[1:]:
        for first, own in zip(every[0], dims, strict=True):
            tie(first, own)
    place = operation.get(1, "dim", 0) % result.dim()
    stacked = list(every[0])
    stacked.insert(place, make_whole_dim(result.shape[place], "tensors are stacked"))
    operation.assign(stacked)


def _slice(operation: Operation) -> None:
    source, result = operation.args[0], operation.result
    place = operation.get(1, "dim", 0) % source.dim()
    bounds = slice(operation.get(2, "start"), operation.get(3, "end"), operation.get(4, "step", 1))
    start, stop, step = bounds.indices(source.shape[place])
    dims = list(operation.dims(0))
    if step == 1:
        dims[place] = take_part(dims[place], start, stop)
    else:
        keep_whole(dims[place], "a slice with steps reads it")
        dims[place] = make_whole_dim(result.shape[place], "a slice with steps")
    operation.assign(dims)


def _narrow(operation: Operation) -> None:
    source, place, start, length = operation.args[:4]
    dims = list(operation.dims(0))
    dims[place % source.dim()] = take_part(dims[place % source.dim()], start, start + length)
    operation.assign(dims)


def _split(operation: Operation) -> None:
    source = operation.args[0]
    place = operation.get(2, "dim", 0) % source.dim()
    begin = 0
    for tensor in operation.outputs:
        dims, end = list(operation.dims(0)), begin + tensor.shape[place]
        dims[place] = take_part(dims[place], begin, end)
        operation.assign(dims, tensor)
        begin = end


def _pad(operation: Operation) -> None:
    source, pads, result = operation.args[0], operation.args[1], operation.result
    dims = list(operation.dims(0))
    for back in range(len(pads) // 2):
        place, before, after = source.dim() - 1 - back, pads[2 * back], pads[2 * back + 1]
        if not before and not after:
            continue
        if min(before, after) < 0 or not may_be_cut(dims[place]):
            keep_whole(dims[place], "it is padded")
            dims[place] = make_whole_dim(result.shape[place], "a padded dimension")
        else:
            padding = [make_whole_dim(count, "padding") or make_dim(count) for count in (before, after)]
            parts = [padding[0], dims[place], padding[1]]
            dims[place] = join([part for part, count in zip(parts, (before, 1, after), strict=True) if count])
    operation.assign(dims)


def _roll(operation: Operation) -> None:
    places = operation.get(2, "dims") if operation.name == "roll" else operation.args[1]
    for place in [places] if isinstance(places, int) else places:
        keep_whole(operation.dims(0)[place], "its order is changed")
    operation.assign(operation.dims(0))


def _restride(operation: Operation) -> None:
    if operation.result.shape == operation.args[0].shape:
        operation.assign(operation.dims(0))
    else:
        operation.keep_all_whole("it is read with strides")


_NAMES: Mapping[Callable[[Operation], None], tuple[str, ...]] = MappingProxyType(
    {
        _permute: ("t", "transpose", "permute"),
        _view: ("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"),
        _unsqueeze: ("unsqueeze",),
        _squeeze: ("squeeze",),
        _expand: ("expand", "broadcast_to"),
        _repeat: ("repeat",),
        _concatenate: ("cat",),
        _stack: ("stack",),
        _slice: ("slice",),
        _narrow: ("narrow",),
        _split: (
            "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk",
            "unsafe_split_with_sizes",
        ),
        _pad: ("constant_pad_nd",),
        _roll: ("roll", "flip"),
        _restride: ("as_strided", "resize"),
    }
)  # fmt: skip
MOVEMENT: Mapping[str, Rule] = MappingProxyType({name: rule for rule, names in _NAMES.items() for name in names})
