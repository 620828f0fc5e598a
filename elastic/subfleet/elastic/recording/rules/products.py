"""Matrix products, convolutions and attention."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from subfleet.elastic.recording.dimensions import Dim, Leaf, keep_whole, make_dim, make_whole_dim, measure, resolve, tie
from subfleet.elastic.recording.following import Operation, Rule


def _multiply(operation: Operation) -> None:
    """`mm`, `bmm`, and with a first argument that is added, `addmm` and `baddbmm`."""
    added = operation.name in ("addmm", "baddbmm")
    left, right = operation.args[added], operation.args[added + 1]
    mine, others = operation.follower.dims_of(left), operation.follower.dims_of(right)
    tie(mine[-1], others[-2])
    if left.dim() > 2:
        tie(mine[0], others[0])
    result = [*mine[:-1], others[-1]]
    if added:
        own, tensor = operation.dims(0), operation.args[0]
        for back in range(1, tensor.dim() + 1):
            if tensor.shape[-back] > 1:
                tie(own[-back], result[-back])
    operation.assign(result)
    summed = others[-2] if operation.follower.find_weight(right) else mine[-1]
    operation.follower.add_product(left, right, result=result, summed=[summed])


def _apply_linear(operation: Operation) -> None:
    source, weight = operation.args[:2]
    mine, others = operation.dims(0), operation.dims(1)
    tie(mine[-1], others[1])
    if isinstance(operation.get(2, "bias"), Tensor):
        tie(operation.follower.dims_of(operation.get(2, "bias"))[0], others[0])
    result = [*mine[:-1], others[0]]
    operation.assign(result)
    operation.follower.add_product(source, weight, result=result, summed=[others[1]])


def _convolve(operation: Operation) -> None:
    source, weight, bias = operation.args[:3]
    transposed, groups = operation.args[6], operation.args[8]
    mine, kernel = operation.dims(0), operation.dims(1)
    if operation.follower.find_weight(weight) in operation.follower.kernels:
        tie(kernel[2], kernel[3])
        for leaf in resolve(kernel[2]):
            leaf.kind = "kernel"
    else:
        for side in kernel[2:]:
            keep_whole(side, "the side of a kernel")
    if transposed:
        channels = _tie_transposed(operation, mine[1], kernel, groups)
    elif groups == 1:
        tie(mine[1], kernel[1])
        channels = kernel[0]
    else:
        channels = _tie_groups(mine[1], kernel, groups, tuple(weight.shape[:2]))
    if isinstance(bias, Tensor):
        tie(operation.follower.dims_of(bias)[0], channels)
    result = operation.result
    pointwise = set(weight.shape[2:]) == set(operation.args[3]) == {1} and not any(operation.args[4])
    if not pointwise:
        for place in mine[2:]:
            keep_whole(place, "a convolution slides along it")
    spatial = [
        place if pointwise else make_whole_dim(size, "a place of an image or sequence")
        for place, size in zip(mine[2:], result.shape[2:], strict=True)
    ]
    operation.assign([mine[0], channels, *spatial])
    # Each filter reads the channels of its group only, a transposed one writes at each place of its input.
    places = mine[2:] if transposed else [make_whole_dim(size, "") for size in result.shape[2:]]
    read = kernel[:1] if transposed else kernel[1:2]
    written = kernel[1] if transposed else channels
    operation.follower.add_product(source, weight, result=[mine[0], written, *places], summed=[*read, *kernel[2:]])


def _tie_transposed(operation: Operation, channels: Dim, kernel: tuple[Dim, ...], groups: int) -> Dim:
    if groups == 1:
        tie(channels, kernel[0])
        return kernel[1]
    reason = "a transposed convolution in groups reads it"
    for dim in (channels, *kernel[:2]):
        keep_whole(dim, reason)
    return make_whole_dim(operation.result.shape[1], reason)


def _tie_groups(channels: Dim, kernel: tuple[Dim, ...], groups: int, shape: tuple[int, ...]) -> Dim:
    """Tie the groups of a convolution's inputs and outputs; what is in a group is cut alike in all of them."""
    outputs, read = shape[0] // groups, shape[1]
    group = Leaf(groups)
    tie(channels, (group, *make_dim(read)))
    tie(kernel[0], (group, *make_dim(outputs)))
    if read > 1:
        inside: list[Leaf] = []
        remaining = resolve(channels)
        while remaining and measure(inside) < read:
            inside.insert(0, remaining.pop())
        if measure(inside) == read:
            tie(inside, kernel[1])
        else:
            keep_whole(channels, "a convolution in groups reads it")
            keep_whole(kernel[1], "a convolution in groups reads it")
    return kernel[0]


def _attend(operation: Operation) -> None:
    query, key, value = operation.args[:3]
    queries, keys, values = (operation.dims(place) for place in range(3))
    for place in range(query.dim() - 2):
        tie(queries[place], keys[place])
        tie(queries[place], values[place])
    tie(queries[-1], keys[-1])
    tie(keys[-2], values[-2])
    weights = [*queries[:-1], keys[-2]]
    for mask in operation.inputs[3:]:
        for back, own in enumerate(reversed(operation.follower.dims_of(mask)), 1):
            if own:
                tie(own, weights[-back])
    operation.assign([*queries[:-1], values[-1]])
    operation.follower.add_product(query, key, result=weights, summed=[queries[-1]])
    operation.follower.add_product(value, result=[*queries[:-1], values[-1]], summed=[keys[-2]])
    for tensor in operation.outputs[1:]:
        operation.assign([make_whole_dim(size, "") for size in tensor.shape], tensor)


_NAMES: Mapping[Callable[[Operation], None], tuple[str, ...]] = MappingProxyType(
    {
        _multiply: ("mm", "bmm", "addmm", "baddbmm"),
        _apply_linear: ("linear",),
        _convolve: ("convolution", "_convolution"),
        _attend: (
            "_scaled_dot_product_attention_math", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention",
        ),
    }
)  # fmt: skip
PRODUCTS: Mapping[str, Rule] = MappingProxyType({name: rule for rule, names in _NAMES.items() for name in names})
