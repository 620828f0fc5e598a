"""Operators that combine the elements of dimensions: sums, maxima, softmax and pooling."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from subfleet.elastic.recording.dimensions import Dim, keep_whole, make_whole_dim, may_be_cut
from subfleet.elastic.recording.following import Operation, Rule
from subfleet.elastic.recording.rules.elementwise import combine_elements


def _mix(operation: Operation, dim: Dim) -> None:
    if may_be_cut(dim):
        operation.follower.mixed.append(dim)


def _reduce(operation: Operation) -> None:
    source = operation.args[0]
    if isinstance(operation.get(1), Tensor):  # the larger of two tensors
        combine_elements(operation)
        return
    over = _find_reduced(operation)
    places = set(range(source.dim())) if over is None else {place % source.dim() for place in over}
    dims = operation.dims(0)
    for place in places:
        _mix(operation, dims[place])
    for tensor in operation.outputs:
        if tensor.dim() == source.dim():
            operation.assign([() if place in places else dim for place, dim in enumerate(dims)], tensor)
        else:
            operation.assign([dim for place, dim in enumerate(dims) if place not in places], tensor)


def _find_reduced(operation: Operation) -> tuple[int, ...] | None:
    """The reduced dimensions; None for all of them."""
    over: Any = operation.get(2 if operation.name == "linalg_vector_norm" else 1, "dim")
    if isinstance(over, int) and not isinstance(over, bool):
        return (over,)
    return tuple(over) if isinstance(over, (list, tuple)) and over else None


def _compare(operation: Operation) -> None:
    """Softmax and cumulative sums, along one dimension."""
    dims = operation.dims(0)
    _mix(operation, dims[operation.args[1] % operation.args[0].dim()])
    operation.assign(dims)


def _pool(operation: Operation) -> None:
    """Pooling and resizing, which keep samples and channels apart."""
    dims, source = operation.dims(0), operation.args[0]
    kept = source.dim() - (3 if "3d" in operation.name else 1 if "1d" in operation.name else 2)
    for place in dims[kept:]:
        keep_whole(place, "it is pooled or resized")
    for tensor in operation.outputs:
        places = [make_whole_dim(size, "a place of an image or sequence") for size in tensor.shape[kept:]]
        operation.assign([*dims[:kept], *places], tensor)


_NAMES: Mapping[Callable[[Operation], None], tuple[str, ...]] = MappingProxyType(
    {
        _reduce: (
            "all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "logsumexp", "max", "mean", "min",
            "prod", "std", "std_mean", "sum", "var", "var_mean",
        ),
        _compare: (
            "_log_softmax", "_safe_softmax", "_softmax", "cumprod", "cumsum", "log_softmax", "softmax",
        ),
        _pool: tuple(
            f"{prefix}{name}{dims}d{suffix}"
            for dims in (1, 2, 3)
            for prefix, name, suffix in (
                ("", "avg_pool", ""), ("", "max_pool", ""), ("", "max_pool", "_with_indices"),
                ("mkldnn_", "max_pool", ""),
                ("_", "adaptive_avg_pool", ""), ("", "adaptive_avg_pool", ""), ("", "adaptive_max_pool", ""),
                ("", "reflection_pad", ""), ("", "replication_pad", ""), ("", "upsample_nearest", ""),
                ("", "upsample_bilinear", ""), ("", "upsample_bicubic", ""), ("", "upsample_linear", ""),
                ("", "upsample_trilinear", ""), ("_", "upsample_bilinear", "_aa"),
            )
        ),
    }
)  # fmt: skip
REDUCTIONS: Mapping[str, Rule] = MappingProxyType({name: rule for rule, names in _NAMES.items() for name in names})
