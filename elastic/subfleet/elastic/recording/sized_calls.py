"""Arguments of calls that are sizes: they are written as expressions of axes."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from subfleet.elastic.recording.calls import Call
from subfleet.elastic.recording.dimensions import GROUP, Leaf, may_be_cut, measure, resolve
from subfleet.elastic.recording.functions import get_argument
from subfleet.protocol.errors import ConfigError

if TYPE_CHECKING:
    from subfleet.elastic.recording.encoding import CallEncoder


Arguments = tuple[list[Any], dict[str, Any]]
Sizing = Callable[["CallEncoder", Call, list[Any], dict[str, Any]], Arguments]
"""Replaces the sizes among a call's encoded arguments."""


def _get(call: Call, position: int, name: str, default: Any = None) -> Any:
    return get_argument(call.args, call.kwargs, position, name, default)


def _put(args: list[Any], kwargs: dict[str, Any], position: int, name: str, size: Any) -> Arguments:
    """The arguments with another one, at its position if it has one, else under its name."""
    if position < len(args):
        return [*args[:position], size, *args[position + 1 :]], kwargs
    return args, {**kwargs, name: size}


def _shape_result(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    """`view`, `reshape` and `expand`: the shape of the result; -1 stays."""
    given = call.args[1:] if len(call.args) > 1 else (call.kwargs.get("shape", ()),)
    if not all(isinstance(size, int) for size in given):
        if isinstance(given[0], Sequence) and not isinstance(given[0], str):
            shape = _express_shape(sizes, call.out, given[0])
            return ([args[0], {"tuple": shape}], kwargs) if len(call.args) > 1 else (args, {"shape": {"tuple": shape}})
        return args, kwargs  # a view as another type
    return [args[0], *_express_shape(sizes, call.out, given)], kwargs


def _express_shape(sizes: "CallEncoder", out: Tensor, given: Sequence[int]) -> list[Any]:
    return [-1 if size == -1 else sizes.express(dim) for size, dim in zip(given, sizes.dims_of(out), strict=True)]


def _create(first: int) -> Sizing:
    """A new tensor: its whole shape."""

    def size(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
        shape = {"tuple": [sizes.express(dim) for dim in sizes.dims_of(call.out)]}
        if len(call.args) <= first:
            return args, {**kwargs, "size": shape}
        flat = isinstance(call.args[first], int)
        rest = args[first + len(call.out.shape) :] if flat else args[first + 1 :]
        return [*args[:first], shape, *rest], kwargs

    return size


def _unflatten(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    place, parts = call.args[1] % call.args[0].dim(), len(call.args[2])
    dims = sizes.dims_of(call.out)[place : place + parts]
    return [*args[:2], {"tuple": [sizes.express(dim) for dim in dims]}], kwargs


def _split(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    place = _get(call, 2, "dim", 0) % call.args[0].dim()
    parts = [sizes.express(sizes.dims_of(out)[place]) for out in call.out]
    even = isinstance(_get(call, 1, "split_size_or_sections"), int)
    return _put(args, kwargs, 1, "split_size_or_sections", parts[0] if even else parts)


def _normalise_layer(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    dims = sizes.dims_of(call.args[0])[-len(_get(call, 1, "normalized_shape")) :]
    return _put(args, kwargs, 1, "normalized_shape", {"tuple": [sizes.express(dim) for dim in dims]})


def _normalise_groups(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    """The number of groups of a norm."""
    channels = sizes.dims_of(call.args[0])[1]
    size, group = sizes.express(channels), next((leaf.size for leaf in resolve(channels) if leaf.kind == GROUP), 1)
    groups = {"size": ["//", size["size"], group]} if isinstance(size, dict) else _get(call, 1, "num_groups")
    return _put(args, kwargs, 1, "num_groups", groups)


def _convolve(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    """The number of groups, and the padding where the kernel may be cut."""
    groups, weight = _get(call, 6, "groups", 1), _get(call, 1, "weight")
    if groups != 1:
        outer = _take_outer(sizes.dims_of(_get(call, 0, "input"))[1], groups, call)
        args, kwargs = _put(args, kwargs, 6, "groups", sizes.express(outer))
    side = sizes.express(sizes.dims_of(weight)[2])
    if isinstance(side, dict):
        kernel, padding = weight.shape[2], _get(call, 4, "padding", 0)
        if kernel % 2 == 0 or padding not in (kernel // 2, (kernel // 2,) * 2):
            raise ConfigError(
                f"the markers say that the kernel of layer {call.layer!r} may be cut, but its side is {kernel} and its "
                f"padding {padding}; it needs an odd side and half of that as padding"
            )
        half = {"size": ["//", side["size"], 2]}
        args, kwargs = _put(args, kwargs, 4, "padding", {"tuple": [half, half]})
    return args, kwargs


def _divide(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    """The kept part of the channels, and all of them."""
    cut = next((dim for dim in sizes.dims_of(call.args[0])[1:] if may_be_cut(dim)), None)
    if cut is None:
        return args, kwargs
    size = sizes.express(cut)
    return [args[0], size, {"whole": size["size"]}], kwargs


def _take_outer(dim: Sequence[Leaf], count: int, call: Call) -> list[Leaf]:
    """The outer leaves of a dimension that make up a number."""
    outer: list[Leaf] = []
    for leaf in resolve(dim):
        if measure(outer) == count:
            break
        outer.append(leaf)
    if measure(outer) != count:
        raise ConfigError(
            f"layer {call.layer!r} calls {call.name} with {count} groups, which its channels do not consist of"
        )
    return outer


def _narrow(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    source, place, start, _ = call.args[:4]
    dim = sizes.dims_of(source)[place]
    if not may_be_cut(dim):
        return args, kwargs
    return [*args[:2], _count_before(sizes, dim, start), sizes.express(sizes.dims_of(call.out)[place])], kwargs


def _get_item(sizes: "CallEncoder", call: Call, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    """Bounds of slices in dimensions that may be cut."""
    source, given = call.args[:2]
    indices = given if isinstance(given, tuple) else (given,)
    if not any(isinstance(index, slice) for index in indices):
        return args, kwargs
    dims, place, encoded = sizes.dims_of(source), 0, []
    for position, index in enumerate(indices):
        if index is Ellipsis:
            place = source.dim() - sum(later is not None for later in indices[position + 1 :])
        if index is Ellipsis or index is None:
            encoded.append(sizes.encode(index))
            continue
        if isinstance(index, slice) and index != slice(None) and may_be_cut(dims[place]):
            start, stop, _ = index.indices(source.shape[place])
            bounds = [_count_before(sizes, dims[place], bound) for bound in (start, stop)]
            encoded.append({"slice": [*bounds, None]})
        else:
            encoded.append(sizes.encode(index))
        place += 1
    return [args[0], {"tuple": encoded}], kwargs


def _count_before(sizes: "CallEncoder", dim: Sequence[Leaf], bound: int) -> Any:
    """The number of indices before a bound of a slice, as an expression."""
    leaves = [leaf for leaf in resolve(dim) if leaf.size > 1]
    if bound == 0:
        return 0
    if bound == measure(leaves):
        return sizes.express(leaves)
    if len(leaves) == 1 and leaves[0].parts:
        before: list[Any] = []
        remaining = bound
        for part in leaves[0].parts:
            if remaining < measure(part):
                break
            remaining -= measure(part)
            size = sizes.express(part)
            before.append(size["size"] if isinstance(size, dict) else size)
        return {"size": ["+", *before, *([remaining] if remaining else [])]}
    inner = sizes.express(leaves[1:])
    return {"size": ["*", bound // measure(leaves[1:]), inner["size"] if isinstance(inner, dict) else inner]}


def _repeat_names(table: Mapping[Sizing, Sequence[str]]) -> Mapping[str, Sizing]:
    return MappingProxyType({name: sizing for sizing, names in table.items() for name in names})


SIZED: Mapping[str, Sizing] = _repeat_names(
    {
        _shape_result: ("torch.Tensor.view", "torch.Tensor.reshape", "torch.reshape", "torch.Tensor.expand"),
        _create(0): ("torch.empty", "torch.zeros", "torch.ones", "torch.rand", "torch.randn", "torch.full"),
        _create(1): (
            "torch.Tensor.new_zeros", "torch.Tensor.new_empty", "torch.Tensor.new_ones", "torch.Tensor.new_full",
        ),
        _unflatten: ("torch.Tensor.unflatten", "torch.unflatten"),
        _split: ("torch.split", "torch.Tensor.split", "torch.functional.split"),
        _normalise_layer: ("torch.nn.functional.layer_norm", "torch.nn.functional.rms_norm"),
        _divide: ("divide_by_kept",),
        _normalise_groups: ("torch.nn.functional.group_norm",),
        _convolve: (
            "torch.conv1d", "torch.conv2d", "torch.nn.functional.conv1d", "torch.nn.functional.conv2d",
        ),
        _narrow: ("torch.Tensor.narrow", "torch.narrow"),
        _get_item: ("torch.Tensor.__getitem__",),
    }
)  # fmt: skip
"""By the name of the called function."""
