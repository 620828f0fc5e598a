"""Operators that compute each element from elements at the same place, and operators that create tensors."""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.elastic.recording.dimensions import Dim, make_dim, tie
from subfleet.elastic.recording.following import Operation, Rule
from subfleet.protocol.errors import ConfigError


def combine_elements(operation: Operation) -> None:
    """Tie the dimensions of all tensors, aligned from the last one; sizes of 1 are repeated."""
    result = operation.result
    dims: list[Dim] = [()] * result.dim()
    for tensor in operation.inputs:
        if tensor.dim() > result.dim():
            continue
        own = operation.follower.dims_of(tensor)
        for back in range(1, tensor.dim() + 1):
            if tensor.shape[-back] == 1:
                continue
            if dims[-back]:
                tie(dims[-back], own[-back])
            else:
                dims[-back] = own[-back]
    for place, size in enumerate(result.shape):
        dims[place] = dims[place] or make_dim(size)
    for tensor in operation.outputs:
        operation.assign(dims, tensor)
    if len(operation.inputs) == 1 and (weight := operation.follower.find_weight(operation.inputs[0])):
        operation.follower.name_weight(result, weight)


def create(operation: Operation) -> None:
    """A new tensor; one that is created like another has its dimensions if the shapes are equal."""
    result = operation.result
    if operation.inputs and operation.inputs[0].shape == result.shape:
        operation.assign(operation.follower.dims_of(operation.inputs[0]))
    else:
        operation.assign([make_dim(size) for size in result.shape])


def read_number(operation: Operation) -> None:
    """A number of a tensor for Python, which may decide what the network computes.

    Raises:
        ConfigError: it depends on the network's input.
    """
    if any(operation.follower.is_computed(tensor) for tensor in operation.inputs):
        raise ConfigError(
            f"layer {operation.follower.layer!r} turns a tensor that depends on the inputs into a Python number or "
            "condition; a network must compute the same for all inputs: use torch.where in place of a branch"
        )


_COMBINED = (
    "_prelu_kernel", "_to_copy", "abs", "add", "addcdiv", "addcmul", "alias", "bernoulli", "bitwise_and", "bitwise_not",
    "bitwise_or", "celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "copy", "cos", "detach", "div",
    "dropout", "elu", "eq", "erf", "exp", "exp2", "expm1", "fill", "floor", "fmod", "ge", "gelu", "gt", "hardsigmoid",
    "hardswish", "hardtanh", "isinf", "isnan", "le", "leaky_relu", "lerp", "lift_fresh", "log", "log1p", "log2",
    "log_sigmoid_forward", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum",
    "mish", "mul", "native_dropout", "ne", "neg", "normal", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt",
    "rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "softshrink", "sqrt", "square", "sub", "tan", "tanh",
    "threshold", "to", "type_as", "uniform", "where", "zero",
)  # fmt: skip
_CREATED = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "new_empty", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm",
    "scalar_tensor", "tril", "triu", "zeros", "zeros_like",
)  # fmt: skip
_NO_TENSOR = ("_local_scalar_dense", "equal", "is_nonzero")

ELEMENTWISE: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_COMBINED, combine_elements),
        **dict.fromkeys(_CREATED, create),
        **dict.fromkeys(_NO_TENSOR, read_number),
    }
)
